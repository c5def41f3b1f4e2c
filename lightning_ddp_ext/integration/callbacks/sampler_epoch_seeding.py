"""A callback that tells everything below the loaders which epoch it is, with any strategy."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_ddp_ext.data.checks import seed_of
from lightning_ddp_ext.integration.epochs import Epochs
from lightning_ddp_ext.integration.lightning_tree import Callback, LightningModule, Trainer
from lightning_ddp_ext.integration.sampling import Sampling, leave_ours_alone
from lightning_ddp_ext.integration.watching import Watch


class SamplerEpochSeeding(Callback):
    """Gives each epoch its own order, everywhere below the loaders, and on request its own random numbers.

    Just before a loader is iterated over, in training and in evaluation, everything below it that has a method
    ``set_epoch`` is given the epoch that training is in, also after a resume: samplers, batch samplers, what they wrap,
    datasets and what they wrap, loaders that are no ``DataLoader``, and datasets in persistent workers. A sampler that
    shuffles and has no such method is named in a warning.

    ``DDPExtStrategy`` does this by itself: there the callback is needed for ``seed`` alone.

    Args:
        seed: with one, Python's ``random``, NumPy and torch are seeded when a training epoch begins, on each rank and
            in each worker with a stream made from (``seed``, epoch, rank, worker). ``None`` leaves them alone.

    Raises:
        SamplerError: ``seed`` is negative or no integer.

    Example::

        trainer = L.Trainer(strategy="ddp", devices=2, callbacks=[SamplerEpochSeeding(seed=42)])
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self.seed = None if seed is None else seed_of(seed)
        self._epochs = Epochs(seed=self.seed)
        self._watch = Watch(self._epochs.tell)
        self._strategy: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        sampling = getattr(trainer.strategy, "sampling", None)
        if isinstance(sampling, Sampling):
            self._epochs = sampling.epochs
            self._epochs.seed_with(self.seed)
            return
        self._epochs.attach(trainer)
        self._strategy = strategy = trainer.strategy
        leave_ours_alone(trainer._data_connector)
        process_own = strategy.process_dataloader

        def process_dataloader(dataloader: object) -> object:
            processed = process_own(dataloader)
            self._epochs.warn_of_same_orders(processed)
            self._watch.add(processed)
            return processed

        strategy.process_dataloader = process_dataloader  # type: ignore[method-assign]

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epochs.seed_epoch()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    def _leave(self) -> None:
        for loader in self._watch.end():
            self._epochs.forget(loader)
        if self._strategy is not None:
            vars(self._strategy).pop("process_dataloader", None)
            self._strategy = None
