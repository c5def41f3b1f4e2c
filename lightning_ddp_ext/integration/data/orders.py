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
    """Return the positions in the training loaders, in the same order."""
    positions = [loader.position for loader in training_loaders_of(trainer)]
    return [position for position in positions if position is not None]


class Orders:
    """What determines the orders of a strategy's training loaders.

    Attributes:
        seed: the seed for the order of samples, once the ranks have agreed on it.
        by_rank: of each rank, its keys (see ``data.random_state.keys_of``), and for each
            loader the checksum of its order in the epoch; empty before an epoch.
    """

    def __init__(self, strategy: RankDevicesStrategy) -> None:
        self._strategy = strategy
        self.forget()

    def forget(self) -> None:
        """Reset the state for a fit."""
        self.seed: int | None = None
        self._keys: list[int] = []
        self.by_rank: list[tuple[list[int], list[int]]] = []

    def restore(self, section: Mapping[str, Any]) -> None:
        """Draw the orders of the run that saved a section, see ``resume``."""
        self.seed = section["seed"]
        self.by_rank = section["orders"]
        is_of_these_ranks = len(self.by_rank) == self._strategy.world_size
        own = self.by_rank[self._strategy.global_rank][0] if is_of_these_ranks else None
        self._keys = own or keys_of(GLOBAL_GENERATORS)

    def checksums_of(self, rank: int) -> list[int]:
        """Return the checksums of a rank's orders, or of one that all ranks draw."""
        return self.by_rank[min(rank, len(self.by_rank) - 1)][1]

    def agree(self) -> int:
        """Return the seed for the order of samples. Collective the first time.

        It is the seed of the resumed run, otherwise rank 0's.
        """
        if self.seed is None:
            own = int(os.environ.get("PL_GLOBAL_SEED", 0))
            self.seed = int(ranks_of(self._strategy).from_rank_zero(own))
            self._keys = keys_of(GLOBAL_GENERATORS)
        return self.seed

    def assign(self) -> None:
        """Let each training loader draw a different order. Collective the first time.

        Hooks may have loaded the data before a checkpoint has set the seed. Stock's
        samplers all have one seed.
        """
        seed = self.agree()
        for number, loader in enumerate(training_loaders_of(self._strategy.current_trainer)):
            assert loader.position is not None
            sampler = loader.position.sampler
            if isinstance(sampler, RankOrderSampler):
                sampler.set_order(mix(seed, number), self._keys)
            elif sampler is not None and loader.is_dealt:
                is_stocks = isinstance(sampler, TorchOrderSampler)
                sampler.seed = seed if is_stocks else mix(seed, number)

    def gather(self) -> None:
        """Gather the ranks' keys and checksums of the epoch that has begun.

        A rank that saves alone then has those of all ranks. Collective.
        """
        checksums = [position.checksum for position in positions_of(self._strategy.current_trainer)]
        self.by_rank = ranks_of(self._strategy).gather((self._keys, checksums))
