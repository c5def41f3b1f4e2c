"""Telling everything below a Trainer's loaders which epoch it is, before they are read."""

from __future__ import annotations

from typing import Any

from lightning_ddp_ext.data.epochs import set_epoch, unseedable_shufflers
from lightning_ddp_ext.data.worker_seeds import WorkerEpochs, seed_generators
from lightning_ddp_ext.integration.lightning_tree import rank_zero_warn


class Epochs:
    """The epoch of a Trainer's training, and optional random streams that belong to it.

    Args:
        seed: with one, Python's, NumPy's and torch's generators are seeded at the beginning of each epoch, on each rank
            and in each worker with numbers of their own.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self.seed = seed
        self._named: set[str] = set()

    def attach(self, trainer: Any) -> None:
        """Whose epoch it is."""
        self._trainer = trainer
        self.seed_with(self.seed)

    def seed_with(self, seed: int | None) -> None:
        """Seed generators from now on, or not."""
        self.seed = seed
        self._in_workers = WorkerEpochs(rank=self._trainer.global_rank, seed=seed)

    @property
    def now(self) -> int:
        """The epoch that is trained, or that is trained next."""
        loop = self._trainer.fit_loop
        epoch: int = loop.epoch_progress.current.processed
        return epoch + 1 if _is_restarted_after_last_batch(loop) else epoch

    def tell(self, loader: object) -> None:
        """Tell everything below ``loader``; in workers, too, when they start, or, if they persist, when they read."""
        epoch = self.now
        set_epoch(loader, epoch)
        self._in_workers.set(epoch)
        self._in_workers.install(loader)

    def forget(self, loader: object) -> None:
        """Leave a loader as it was before :meth:`tell`; what was told stays."""
        self._in_workers.uninstall(loader)

    def seed_epoch(self) -> None:
        """Seed this rank's generators for the epoch, if that was asked for."""
        if self.seed is not None:
            seed_generators(self.seed, epoch=self.now, rank=self._trainer.global_rank)

    def warn_of_same_orders(self, loader: object) -> None:
        """Name samplers that shuffle and cannot be told the epoch, once each."""
        names = {type(sampler).__name__ for sampler in unseedable_shufflers(loader)} - self._named
        self._named |= names
        for name in sorted(names):
            rank_zero_warn(
                f"{name} shuffles, and has no set_epoch, so it may read the same order in every epoch; give it a "
                "method set_epoch(epoch) that its order depends on"
            )


def _is_restarted_after_last_batch(fit_loop: Any) -> bool:
    """Whether a checkpoint saved in ``on_train_batch_end`` of an epoch's last batch has just been restored.

    Lightning makes the iterators first, and counts this epoch as done afterwards, in ``FitLoop.reset``. Versions that
    do not know where in an epoch they restart go on in the same one instead.
    """
    if not hasattr(fit_loop, "restarted_mid_epoch"):
        return False
    epoch, batch = fit_loop.epoch_progress.total, fit_loop.epoch_loop.batch_progress
    is_within = epoch.processed == epoch.completed == epoch.started - 1 == epoch.ready - 1
    is_trained = batch.total.completed == batch.total.processed - 1 == batch.total.ready - 1
    return bool(fit_loop.restarting and batch.is_last_batch and is_within and is_trained)
