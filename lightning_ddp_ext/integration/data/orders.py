"""Find the training loaders, and let each of them draw a different order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning_ddp_ext.data.loader import DistributedLoader
from lightning_ddp_ext.data.position import Position
from lightning_ddp_ext.data.proxy import iterable_of
from lightning_ddp_ext.data.random_state import GLOBAL_GENERATORS, keys_of, mix
from lightning_ddp_ext.data.samplers import RankOrderSampler, TorchOrderSampler

from ..private.compat import combined_loader_of
from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import ranks_of

OrdersOfRank = tuple[list[int], list[int]]  # keys, and a checksum for each loader


def epoch_of(trainer: Any) -> int:
    """Return the current or next epoch.

    With ``max_steps``, ``trainer.current_epoch`` lags behind.
    """
    return int(trainer.fit_loop.epoch_progress.current.processed)


def training_loaders_of(trainer: Any) -> list[DistributedLoader]:
    """Return the training loaders, in the order of the combined loader."""
    return _loaders_of(trainer.fit_loop)


def positions_of(trainer: Any) -> list[Position]:
    """Return the positions in the training loaders, in the same order."""
    positions = [loader.position for loader in training_loaders_of(trainer)]
    return [position for position in positions if position is not None]


def validation_loaders_of(trainer: Any) -> list[DistributedLoader]:
    """Return the loaders of the fit's validation, in the order of the combined loader."""
    return _loaders_of(trainer.fit_loop.epoch_loop.val_loop)


def _loaders_of(loop: Any) -> list[Any]:
    combined = combined_loader_of(loop)
    return [] if combined is None else [iterable_of(loader) for loader in combined.flattened]


class Orders:
    """What determines the orders of a strategy's training loaders.

    Attributes:
        by_rank: of each rank, its keys (see ``data.random_state.keys_of``), and for each
            loader the checksum of its order in the epoch; empty before an epoch.
    """

    def __init__(self, strategy: RankDevicesStrategy) -> None:
        self._strategy = strategy
        self.forget()

    def forget(self) -> None:
        """Reset the state for a fit."""
        self._seed: int | None = None
        self._keys: list[int] = []
        self.by_rank: list[OrdersOfRank] = []

    def restore(self, section: Mapping[str, Any]) -> None:
        """Draw the orders of the run that saved a section, see ``saved_place``."""
        self._seed = section["seed"]
        self.by_rank = section["orders"]
        is_of_these_ranks = len(self.by_rank) == self._strategy.world_size
        own = self.by_rank[self._strategy.global_rank][0] if is_of_these_ranks else None
        self._keys = own or keys_of(GLOBAL_GENERATORS)

    def section(self) -> dict[str, Any]:
        """Return the part of a section for :meth:`restore`."""
        return {"seed": self._seed, "orders": self.by_rank}

    def agree(self) -> int:
        """Return the seed for the order of samples. Collective the first time.

        It is the seed of the resumed run, otherwise rank 0's.
        """
        if self._seed is None:
            own = int(os.environ.get("PL_GLOBAL_SEED", 0))
            self._seed = int(ranks_of(self._strategy).from_rank_zero(own))
            self._keys = keys_of(GLOBAL_GENERATORS)
        return self._seed

    def assign(self) -> None:
        """Let each training loader draw a different order. Collective the first time.

        Hooks may have loaded the data before a checkpoint has set the seed. Stock's
        samplers all have one seed.
        """
        seed = self.agree()
        trainer = self._strategy.current_trainer
        loaders = training_loaders_of(trainer)
        for number, (loader, position) in enumerate(
            zip(loaders, positions_of(trainer), strict=True)
        ):
            position.rank = self._strategy.global_rank
            position.world_size = self._strategy.world_size
            sampler = position.sampler
            is_rank_order = isinstance(sampler, RankOrderSampler)
            if isinstance(sampler, RankOrderSampler):
                sampler.set_keys(self._keys)
            if sampler is not None and (loader.is_dealt or is_rank_order):
                is_stocks = isinstance(sampler, TorchOrderSampler)
                sampler.seed = seed if is_stocks else mix(seed, number)

    def gather(self) -> None:
        """Gather the ranks' keys and checksums of the epoch that has begun. Collective.

        A rank that saves alone then has those of all ranks.
        """
        checksums = [position.checksum for position in positions_of(self._strategy.current_trainer)]
        self.by_rank = ranks_of(self._strategy).gather((self._keys, checksums))

    def checksums_of(self, loader: int) -> list[int]:
        """Return the checksum of each rank's order in the loader with this number."""
        return [checksums[loader] for _, checksums in self.by_rank]
