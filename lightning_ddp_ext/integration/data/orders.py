"""Determine the orders of the training loaders, and continue them in a resumed epoch.

Each rank draws the order of a loader from a seed that all ranks share. If a user's
sampler draws it, it also depends on how the rank has seeded its global generators. The
rank's **keys** identify these seeds: one integer for each generator. Seed, keys and the
checksum of each order are saved, so a resumed run draws the same orders, and detects
another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_ddp_ext.data.inspection import name_of
from lightning_ddp_ext.data.random_state import GLOBAL_GENERATORS, keys_of, mix
from lightning_ddp_ext.data.samplers import RankOrderSampler, TorchOrderSampler

from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import ranks_of
from .training_loaders import positions_of, training_loaders_of


class RankOrders(NamedTuple):
    """What determines and identifies the orders of one rank.

    A checkpoint contains it as a plain tuple, which torch reads with ``weights_only``.

    Attributes:
        keys: the rank's keys.
        checksums: for each training loader, the checksum of its order in one epoch.
    """

    keys: list[int]
    checksums: list[int]


class Orders:
    """The orders of the training loaders in one fit.

    Seed and keys are determined by two methods, in the order in which Lightning restores
    the checkpoint and loads the data:

    - :meth:`restore` sets those of the checkpoint, also in place of earlier ones.
    - :meth:`agree` sets those that are not set yet, when a loader is prepared.

    When an epoch begins, :meth:`assign` passes the final ones on to the samplers.

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

    def restore(self, seed: int, by_rank: Sequence[tuple[list[int], list[int]]]) -> None:
        """Use seed and keys of the run that saved a checkpoint.

        With another number of ranks, each rank keeps its own keys.
        """
        self.seed = seed
        self.by_rank = [RankOrders(*each) for each in by_rank]
        if len(self.by_rank) == self._strategy.world_size:
            self._keys = self.by_rank[self._strategy.global_rank].keys

    def agree(self) -> int:
        """Determine the seed and this rank's keys, unless they are; return the seed.

        The seed is that of ``seed_everything`` on rank 0. The keys are those of the
        global generators at this time. Collective the first time.
        """
        self._keys = self._keys or keys_of(GLOBAL_GENERATORS)
        if self.seed is None:
            seed_here = int(os.environ.get("PL_GLOBAL_SEED", 0))
            self.seed = int(ranks_of(self._strategy).from_rank_zero(seed_here))
        return self.seed

    def assign(self) -> None:
        """Give the seed and keys to the samplers of the training loaders.

        Each loader gets its own seed, so that two of the same length do not draw the same
        order. The exception is a sampler that draws the order of stock ``ddp``, which has
        one seed for all loaders. Collective the first time.
        """
        seed = self.agree()
        for number, loader in enumerate(training_loaders_of(self._strategy.current_trainer)):
            sampler = loader.position.sampler if loader.position else None
            if isinstance(sampler, RankOrderSampler):
                sampler.set_order(mix(seed, number), self._keys)
            elif sampler is not None and loader.is_divided:
                is_order_of_stock = isinstance(sampler, TorchOrderSampler)
                sampler.seed = seed if is_order_of_stock else mix(seed, number)

    def gather(self) -> None:
        """Gather the orders of all ranks in the epoch that has begun.

        A rank that later saves alone then has those of all ranks. Collective.
        """
        checksums = [position.checksum for position in positions_of(self._strategy.current_trainer)]
        self.by_rank = ranks_of(self._strategy).gather(RankOrders(self._keys, checksums))

    def continue_epoch(self, epoch: int, places: Sequence[Mapping[str, Any]]) -> str | None:
        """Make the training loaders continue an epoch at this rank's saved places.

        Return why that is impossible, if it is, with the loader and the remedy.

        Args:
            epoch: the epoch.
            places: for each loader, what ``Position.state_after`` returned.
        """
        positions = positions_of(self._strategy.current_trainer)
        if len(places) != len(positions):
            return (
                f"it began with {len(places)} training loaders, and there are {len(positions)} now;"
                " resume with the same loaders"
            )
        for loader in training_loaders_of(self._strategy.current_trainer):
            loader.set_epoch(epoch)
        # Only an order that all ranks share can continue on another number of ranks. A rank
        # that the saved run did not have compares it with the order of the last saved rank.
        checksums = self.by_rank[min(self._strategy.global_rank, len(self.by_rank) - 1)].checksums
        for position, place, checksum in zip(positions, places, checksums, strict=True):
            problem = position.continue_epoch(epoch, place, checksum)
            if problem is not None:
                return f"{name_of(position.loader)} {problem}"
        return None
