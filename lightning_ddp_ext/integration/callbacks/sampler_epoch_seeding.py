"""A callback that calls ``set_epoch`` on all objects inside any strategy's loaders.

``DDPExtStrategy`` does so itself, and only reads the seed of workers from the callback.
With a stock strategy, the callback takes these steps:

1. ``setup`` makes the Trainer call ``_prepare`` for each loader, until the run ends.
2. ``_prepare`` wraps the loader that Lightning prepares in a ``DistributedLoader``.
3. That calls ``_start_iterator`` when the first batch of an iterator is requested.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.arguments import integer
from lightning_ddp_ext.data.loader import DistributedLoader, LazyIterator, Started, source_of
from lightning_ddp_ext.data.position import global_order_of
from lightning_ddp_ext.data.random_state import seed_generators

from ..data.orders import epoch_of
from ..private.compat import active_loop_of, is_read_by
from ..private.lightning_tree import RunningStage, pl
from ..private.replaced_methods import Prepare, ReplacedMethods
from ..start.devices import RankDevicesStrategy


class SamplerEpochSeeding(pl.Callback):
    """Calls ``set_epoch`` on all objects inside the loaders, and can seed each epoch.

    Before a loader is iterated over, in training, in evaluation and after a resume, the
    callback passes the current training epoch to every object in the loader that has a
    method ``set_epoch(epoch)``: samplers and batch samplers, the objects that they
    wrap, datasets and the objects that they wrap, loaders that are not a
    ``DataLoader``, and datasets in persistent workers. Each gets an epoch once. The
    samplers to which Lightning passes the epoch keep what a hook sets after that.

    ``DDPExtStrategy`` does this itself, so with it the callback is only needed for
    ``seed``.

    Args:
        seed: if given, Python's ``random``, NumPy and torch are seeded at the start of
            each training epoch, on each rank and in each worker, with a seed derived
            from (``seed``, epoch, rank, worker). ``None`` does not seed.

    Raises:
        ConfigurationError: ``seed`` is negative or not an integer.

    Example::

        trainer = L.Trainer(strategy="ddp", devices=2, callbacks=[SamplerEpochSeeding(seed=42)])
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self.seed = None if seed is None else integer(seed, "seed", remedy="pass seed=0")
        # From `setup` to the end of a run, which is `teardown` or an exception. If neither was
        # called, the next `setup` undoes the replacement.
        self._replaced = ReplacedMethods()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, RankDevicesStrategy):
            return  # ours, which wraps the loaders itself
        self._replaced.undo_all()
        self._replaced.prepare_loaders(trainer, partial(self._prepare, trainer))

    def _prepare(
        self,
        trainer: pl.Trainer,
        as_lightning: Prepare,
        dataloader: object,
        shuffle: bool,
        mode: RunningStage,
    ) -> object:
        """Return the loader that the Trainer reads: Lightning's, wrapped.

        Args:
            trainer: the Trainer.
            as_lightning: Lightning's own method.
            dataloader, shuffle, mode: its arguments.
        """
        source = source_of(dataloader)  # an earlier run may have wrapped it
        # Lightning overlooks our sampler in place of a batch sampler, and would add another.
        if global_order_of(source) is None:
            source = as_lightning(source, shuffle, mode)
        wrapped = DistributedLoader(source, partial(self._start_iterator, trainer))
        return wrapped.shown()  # a proxy with the class and attributes of the loader

    def _start_iterator(self, trainer: pl.Trainer, iterator: LazyIterator) -> Started:
        """Read the loader, after passing the epoch to the objects inside.

        Users' own iterators of a loader, beside the loop's, do not change its epoch.
        """
        epoch = epoch_of(trainer)
        if is_read_by(active_loop_of(trainer), iterator):
            iterator.loader.set_epoch(epoch, is_set_by_lightning=trainer.state.fn == "fit")
        with iterator.loader.workers_of(epoch, rank=trainer.global_rank, seed=self.seed):
            return Started(iter(iterator.loader.loader))

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.seed is not None:
            seed_generators(self.seed, epoch=epoch_of(trainer), rank=trainer.global_rank)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._replaced.undo_all()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._replaced.undo_all()


def worker_seed_of(trainer: Any) -> int | None:
    """Return the seed that the Trainer's last ``SamplerEpochSeeding`` gives to workers."""
    seeds = [each.seed for each in trainer.callbacks if isinstance(each, SamplerEpochSeeding)]
    return seeds[-1] if seeds else None
