"""A callback that detects ranks with different weights, with any ``ddp`` strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ddp_ext.arguments import integer
from lightning_ddp_ext.checksum import raise_if_different
from lightning_ddp_ext.errors import ConfigurationError

from ..private.compat import averages_models, is_sharded
from ..private.lightning_tree import pl
from ..strategy_ranks import ranks_of


class RankConsistency(pl.Callback):
    """Detects ranks with different weights.

    It checks at the start of training, after every n-th batch, and at the end. It
    compares all bits of parameters and optimiser states, with one checksum per tensor,
    of which the ranks exchange one number. It skips buffers, which DDP broadcasts, and
    the state of a ``ZeroRedundancyOptimizer``. With one rank it does nothing.

    Args:
        every_n_steps: the number of training batches between checks.

    Raises:
        ConfigurationError: ``every_n_steps`` is not a positive integer, or, in ``fit``,
            the strategy has no replicas to compare.
        DivergenceError: in ``fit``, on every rank: the ranks differ.

    Example::

        callback = RankConsistency(every_n_steps=500)
        trainer = L.Trainer(strategy="ddp", devices=2, callbacks=[callback])
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        self.every_n_steps = integer(
            every_n_steps,
            "every_n_steps",
            at_least=1,
            remedy="pass every_n_steps=1 to check after each batch",
        )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare(trainer, "at the start of training")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if batches % self.every_n_steps == 0:
            self._compare(trainer, f"after batch {batches}")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._compare(trainer, "at the end of training")

    def _compare(self, trainer: pl.Trainer, when: str) -> None:
        strategy = trainer.strategy
        if trainer.world_size == 1:
            return
        has_replicas = isinstance(strategy.model, DistributedDataParallel)
        if not has_replicas or averages_models(strategy):
            raise ConfigurationError(
                "RankConsistency needs a strategy with the same model on each rank, such as 'ddp'"
                f" without post-local SGD (got {type(strategy).__name__}); remove the callback"
            )
        raise_if_different(dict(_replica(trainer)), ranks_of(strategy), when=when)


def _replica(trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that must be the same on all ranks, with their names."""
    model = trainer.lightning_module
    for name, parameter in model.named_parameters():
        yield f"parameter {name}", parameter
    for index, optimizer in enumerate(trainer.optimizers):
        if is_sharded(optimizer):
            continue  # each rank has the state of different parameters
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"optimizer {index}: {key} of {name}", value
