"""Determine the orders of the training loaders, and continue them in a resumed epoch.

Each rank draws the order of a loader from a seed that all ranks share. If a user's
sampler draws it, it also depends on how the rank has seeded its global generators,
which a few integers tell: the rank's **keys**. Seed, keys and the checksum of each
order are saved, so a resumed run draws the same orders, and detects another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ddp_ext.data.proxy import name_of
from lightning_ddp_ext.data.random_state import GLOBAL_GENERATORS, keys_of, mix
from lightning_ddp_ext.data.samplers import RankOrderSampler, TorchOrderSampler

from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import ranks_of
from .training_loaders import positions_of, training_loaders_of


class Orders:
    """The orders of the training loaders in one fit.

    Args:
        strategy: our strategy.

    Attributes:
        seed: the seed for the order of samples; ``None`` until the ranks agree on it.
        by_rank: of each rank, its keys, and for each loader the checksum of its order in
            the current epoch; empty before the first epoch.
    """

    def __init__(self, strategy: RankDevicesStrategy) -> None:
        self._strategy = strategy
        self.seed: int | None = None
        self.by_rank: list[tuple[list[int], list[int]]] = []
        self._keys: list[int] = []  # of this rank; empty until a loader is prepared

    def restore(self, section: Mapping[str, Any]) -> None:
        """Use the seed and keys of the run that saved a section, see ``resume``.

        With another number of ranks, each rank keeps its own keys.
        """
        self.seed = section["seed"]
        self.by_rank = section["orders"]
        if len(self.by_rank) == self._strategy.world_size:
            self._keys, _ = self.by_rank[self._strategy.global_rank]

    def agree_on_seed(self) -> int:
        """Return the seed for the order of samples. Collective the first time.

        It is the seed of the resumed run, otherwise rank 0's.
        """
        self._keys = self._keys or keys_of(GLOBAL_GENERATORS)
        if self.seed is None:
            own = int(os.environ.get("PL_GLOBAL_SEED", 0))
            self.seed = int(ranks_of(self._strategy).from_rank_zero(own))
        return self.seed

    def assign(self) -> None:
        """Make each training loader draw another order. Collective the first time.

        Hooks may have loaded the data before a checkpoint has set the seed. Stock's
        samplers all have one seed.
        """
        seed = self.agree_on_seed()
        for number, loader in enumerate(training_loaders_of(self._strategy.current_trainer)):
            sampler = loader.position.sampler if loader.position else None
            if isinstance(sampler, RankOrderSampler):
                sampler.set_order(mix(seed, number), self._keys)
            elif sampler is not None and loader.is_divided:
                is_stocks = isinstance(sampler, TorchOrderSampler)
                sampler.seed = seed if is_stocks else mix(seed, number)

    def gather(self) -> None:
        """Gather all ranks' keys, and the checksums of the epoch that has begun.

        A rank that later saves alone then has those of all ranks. Collective.
        """
        checksums = [position.checksum for position in positions_of(self._strategy.current_trainer)]
        self.by_rank = ranks_of(self._strategy).gather((self._keys, checksums))

    def continue_epoch(self, epoch: int, places: Sequence[Mapping[str, Any]]) -> str | None:
        """Make the training loaders continue an epoch at this rank's saved places.

        Return why that is impossible, if it is, with the loader and the remedy.

        Args:
            epoch: the epoch.
            places: for each loader, what ``Position.state_after`` returned.
        """
        loaders = training_loaders_of(self._strategy.current_trainer)
        positions = positions_of(self._strategy.current_trainer)
        if len(places) != len(positions):
            return (
                f"it began with {len(places)} training loaders, and there are {len(positions)} now;"
                " resume with the same loaders"
            )
        for loader in loaders:
            loader.set_epoch(epoch)
        # A rank that the saved run did not have draws the order that all ranks draw.
        _, checksums = self.by_rank[min(self._strategy.global_rank, len(self.by_rank) - 1)]
        for position, place, checksum in zip(positions, places, checksums, strict=True):
            problem = position.continue_epoch(epoch, place, checksum)
            if problem is not None:
                return f"{name_of(position.loader)} {problem}"
        return None
