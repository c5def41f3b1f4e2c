"""Tell each epoch to everything below a Trainer's loaders, and seed random numbers that belong to it."""

from __future__ import annotations

from typing import Any

from lightning_ddp_ext.data.epochs import unseedable_shufflers
from lightning_ddp_ext.data.worker_seeds import begin_epoch, seed_generators
from lightning_ddp_ext.integration.lightning_tree import rank_zero_warn


class EpochSeeding:
    """The beginning of an epoch in loaders.

    Args:
        seed: with one, Python's, NumPy's and torch's generators are seeded at the beginning of each epoch, on each rank
            and in each worker with numbers of their own.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self.seed = seed
        self._warned_of: set[str] = set()

    def begin(self, loader: object, epoch: int, rank: int) -> None:
        """Tell the epoch to everything below a loader of our own, before a pass over it begins."""
        begin_epoch(loader, epoch, rank=rank, seed=self.seed)

    def seed_epoch(self, epoch: int, rank: int) -> None:
        """Seed this rank's generators for an epoch, if that was asked for."""
        if self.seed is not None:
            seed_generators(self.seed, epoch=epoch, rank=rank)

    def warn_of_same_orders(self, loader: object) -> None:
        """Name samplers that shuffle and cannot be told the epoch, once each."""
        names = {type(sampler).__name__ for sampler in unseedable_shufflers(loader)} - self._warned_of
        self._warned_of |= names
        for name in sorted(names):
            rank_zero_warn(
                f"{name} shuffles, and has no set_epoch, so it may read the same order in every epoch; give it a "
                "method set_epoch(epoch) that its order depends on"
            )


def epoch_of(trainer: Any) -> int:
    """The epoch that is trained, or that is trained next; ``trainer.current_epoch`` lags behind with ``max_steps``."""
    epoch: int = trainer.fit_loop.epoch_progress.current.processed
    return epoch
