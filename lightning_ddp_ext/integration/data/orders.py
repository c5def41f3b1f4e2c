"""Find the training loaders, and start or continue their epochs, in the right order.

Each rank draws the order of a loader from a seed that all ranks share. If a user's
sampler draws it, it also depends on how the rank has seeded its global generators. The
rank's **keys** identify these seeds: one integer for each generator. Seed, keys and the
checksum of each order are saved, so a resumed run draws the same orders, and detects
another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ddp_ext.data.inspection import length_or_inf, name_of
from lightning_ddp_ext.data.loader import DistributedLoader
from lightning_ddp_ext.data.position import Position
from lightning_ddp_ext.data.proxy import iterable_of
from lightning_ddp_ext.data.random_state import GLOBAL_GENERATORS, keys_of, mix
from lightning_ddp_ext.data.samplers import RankOrderSampler, TorchOrderSampler

from ..private.compat import combined_loader_of, mode_of
from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import ranks_of


def epoch_of(trainer: Any) -> int:
    """Return the current or next epoch.

    With ``max_steps``, ``trainer.current_epoch`` lags behind.
    """
    return int(trainer.fit_loop.epoch_progress.current.processed)


def training_loaders_of(trainer: Any) -> list[DistributedLoader]:
    """Return the training loaders, in the order of the combined loader."""
    combined = combined_loader_of(trainer.fit_loop)
    return [] if combined is None else [iterable_of(loader) for loader in combined.flattened]


def positions_of(trainer: Any) -> list[Position]:
    """Return the position in each training loader, in the same order."""
    # `TrainerLoaders.prepare` gives each of them a position.
    return [loader.position for loader in training_loaders_of(trainer) if loader.position]


def batches_of_epoch(trainer: Any) -> tuple[float, float]:
    """Return how many batches a whole epoch has, and how many are left in the current one.

    Both are those of the loader that determines when this rank's epoch ends, and ``inf``
    if it has no length. In a resumed epoch, the batches before its start are not left.
    """
    choose = min if mode_of(trainer.fit_loop) == "min_size" else max
    position = choose(positions_of(trainer), key=lambda each: length_or_inf(each.loader))
    return length_or_inf(position.loader), position.left(position.start)


# A rank's keys, and for each training loader, the checksum of its order in one epoch.
RankOrders = tuple[list[int], list[int]]


class Orders:
    """The orders of the training loaders in one fit.

    Lightning restores a checkpoint and loads the data in either order. The seed and this
    rank's keys are those of the checkpoint, set by :meth:`restore`, or else those that
    :meth:`agree` determines when the first loader is prepared. Both are final when an
    epoch begins.

    Args:
        strategy: our strategy.

    Attributes:
        seed: the seed for the order of samples; ``None`` until it is determined.
        by_rank: the orders of each rank in the epoch that began last, perhaps in the run
            that saved the checkpoint; empty before the first epoch.
    """

    def __init__(self, strategy: RankDevicesStrategy) -> None:
        self._strategy = strategy
        self.seed: int | None = None
        self.by_rank: list[RankOrders] = []
        self._keys: list[int] = []  # of this rank; empty until they are determined

    def restore(self, seed: int, by_rank: Sequence[RankOrders]) -> None:
        """Use seed and keys of the run that saved a checkpoint.

        With another number of ranks, each rank keeps its own keys.
        """
        self.seed = seed
        self.by_rank = list(by_rank)
        if len(self.by_rank) == self._strategy.world_size:
            self._keys, _ = self.by_rank[self._strategy.global_rank]

    def agree(self) -> int:
        """Determine what is missing of this rank's keys and the common seed.

        The keys are those of the global generators at this time. The seed, which is
        returned, is that of ``seed_everything`` on rank 0. Collective if it is missing.
        """
        if not self._keys:
            self._keys = keys_of(GLOBAL_GENERATORS)
        if self.seed is None:
            own_seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
            self.seed = int(ranks_of(self._strategy).from_rank_zero(own_seed))
        return self.seed

    def start_epoch(self, epoch: int) -> None:
        """Make the training loaders start an epoch at its beginning."""
        self._seed_samplers()
        for position in positions_of(self._strategy.current_trainer):
            position.start_epoch(epoch)

    def continue_epoch(self, epoch: int, places: Sequence[Mapping[str, Any]]) -> str | None:
        """Make the training loaders continue an epoch at this rank's saved places.

        If that is impossible, return a sentence with the loader, the reason and the remedy,
        which the ranks can exchange. The epoch must then be started again, since some of
        the loaders may already have their places.

        Args:
            epoch: the epoch.
            places: for each loader, what ``Position.state_after`` returned.
        """
        self._seed_samplers()
        positions = positions_of(self._strategy.current_trainer)
        if len(places) != len(positions):
            return (
                f"it began with {len(places)} training loaders, and there are {len(positions)} now;"
                " resume with the same loaders"
            )
        for loader in training_loaders_of(self._strategy.current_trainer):
            loader.set_epoch(epoch)  # positions draw the order of this epoch
        # Only an order that all ranks share can continue on another number of ranks. A rank
        # that the saved run did not have compares it with the order of the last saved rank.
        _, checksums = self.by_rank[min(self._strategy.global_rank, len(self.by_rank) - 1)]
        for position, place, checksum in zip(positions, places, checksums, strict=True):
            problem = position.continue_epoch(epoch, place, checksum)
            if problem is not None:
                return f"{name_of(position.loader)} {problem}"
        return None

    def _seed_samplers(self) -> None:
        """Give the seed and the keys to the samplers of the training loaders.

        Each loader gets its own seed, so that two of the same length do not draw the same
        order. The exceptions are a sampler of ours that a user has made, which keeps its
        seed, and one that draws the order of stock ``ddp``, which has one seed for all.
        """
        assert self.seed is not None  # since the loaders are prepared
        for number, loader in enumerate(training_loaders_of(self._strategy.current_trainer)):
            sampler = loader.position.sampler if loader.position else None
            own_seed = mix(self.seed, number)
            if isinstance(sampler, RankOrderSampler):
                sampler.set_order(own_seed, self._keys)
            elif sampler is not None and loader.is_divided:
                sampler.seed = self.seed if isinstance(sampler, TorchOrderSampler) else own_seed

    def gather(self) -> None:
        """Gather the orders of all ranks in the epoch that has begun.

        A rank that later saves alone then has those of all ranks. Collective.
        """
        checksums = [position.checksum for position in positions_of(self._strategy.current_trainer)]
        self.by_rank = ranks_of(self._strategy).gather((self._keys, checksums))
