"""What ``self.log(..., sync_dist=True)`` reduces over the ranks: a step's values together, and an epoch's."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.integration.lightning_tree import refuse_missing
from lightning_ddp_ext.reductions.at_once import all_reduce
from lightning_ddp_ext.reductions.packed import DTYPES, OPS, Packed, Value
from lightning_ddp_ext.rendezvous.process_group import current

T = TypeVar("T")

_TRAINING = "training_step"
_EPOCH_END = "the end of an epoch"


class StepMetrics:
    """The values that a strategy's ranks log together.

    What is logged in a step waits until its end, or until somebody reads it before, and is reduced then; readers see
    the same tensors as without. Ranks that have logged different values all raise. A rank that logs nothing where
    others do is found out in a first training step, and in one after a step in which something was logged; else the
    others wait for it, until it reduces something, too, or the timeout ends that. One rank alone may read in the
    middle of a step, unless that step goes on to another collective, which the others would reach before they answer.

    Args:
        strategy: whose ranks.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._packed = Packed()
        self._is_in_step = False
        self._key: str | None = None  # under which Lightning stores what is being logged
        self._answers: Iterator[Any] | None = None  # to what Lightning is about to reduce
        self._is_first = True  # no training step has ended yet
        self._is_open = False  # an epoch's values have been read, and some rank may wait for more of them
        self._is_expected = True  # all ranks reduce in the next training step, even those that have logged nothing

    def attach(self, trainer: Any) -> None:
        """Have the Trainer's results tell us what is logged under which name, and when it is read."""
        self._is_first = self._is_expected = True
        self._is_open = False
        training = trainer.fit_loop.epoch_loop
        for loop in (training, training.val_loop, trainer.validate_loop, trainer.test_loop):
            results = loop._results
            refuse_missing(type(results), "update_metrics", "metrics", "valid_items", "reset")
            results.update_metrics = functools.partial(self._update, results)
            results.metrics = functools.partial(self._read, results)
            results.reset = functools.partial(self._reset, results)

    # Logging.

    def _update(self, results: Any, key: str, value: Any, batch_size: int) -> None:
        _spare_moves(results[key])
        self._key = key
        try:
            type(results).update_metrics(results, key, value, batch_size)
        finally:
            self._key = None

    def reduce(self, tensor: T, group: Any, reduce_op: Any) -> T:
        """Reduce at once; or later, and in place, what is logged in a step.

        Collective: every rank of the group must call it.
        """
        if self._answers is not None:
            return next(self._answers)  # type: ignore[no-any-return]
        if self._is_in_step and self._key is not None and self._can_pack(tensor, group, reduce_op):
            self._packed.add(Value(self._key, reduce_op, tensor))  # type: ignore[arg-type]
            return tensor
        self.close()
        return self._strategy.data.evaluation.reduce(  # type: ignore[no-any-return]
            all_reduce, tensor, group, reduce_op
        )

    def _can_pack(self, tensor: Any, group: Any, op: Any) -> bool:
        device = self._strategy.root_device
        return (
            group is None
            and op in OPS
            and isinstance(tensor, Tensor)
            and tensor.ndim == 0
            and tensor.dtype in DTYPES
            and tensor.device == device
            and device.type in ("cpu", "cuda")
            and self._has_others
        )

    @property
    def _has_others(self) -> bool:
        return dist.is_initialized() and dist.get_world_size() > 1

    # Steps.

    @contextmanager
    def together(self, step: str) -> Iterator[None]:
        """Reduce what is logged in the block at its end. Collective, if there is anything."""
        self._packed.begin(step)
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
        is_expected = step == _TRAINING and self._is_expected and self._has_others
        if self._packed.names or is_expected:
            self._is_expected = self._reduce(is_end=True)
        self._is_first &= step != _TRAINING

    # Reading.

    def _read(self, results: Any, on_step: bool) -> Any:
        if len(self._packed):
            self._reduce(is_end=False)
        if not on_step:
            self._compute(results)
        return type(results).metrics(results, on_step)

    def _compute(self, results: Any) -> None:
        """Have Lightning compute the values of an epoch that are not known yet, from what one collective gives."""
        due = {key: result for key, result in results.valid_items() if self._is_due(result)}
        if not due:
            return
        states = {key: _states(key, result) for key, result in due.items()}
        self._packed.begin(_EPOCH_END)
        for value in (each for values in states.values() for each in values):
            self._packed.add(value)
        self._reduce(is_end=False)
        self._is_open = True
        for key, result in due.items():
            self._answers = iter([value.tensor for value in states[key]])
            try:
                result.compute()
            finally:
                self._answers = None

    def close(self) -> None:
        """Find out whether a rank waits for values of an epoch that others do not have.

        Collective, if anything of an epoch has been read since: every rank must call it.
        """
        if self._is_open:
            self._is_open = False
            if self._packed.where != _EPOCH_END:
                self._packed.begin(_EPOCH_END)
            self._reduce(is_end=True)

    def _reset(self, results: Any, metrics: bool | None = None, fx: str | None = None) -> None:
        if metrics is None and fx is None:
            self.close()
        type(results).reset(results, metrics, fx)

    def _is_due(self, result: Any) -> bool:
        meta = result.meta
        is_joint = meta.on_epoch and meta.sync.should and not meta.sync.rank_zero_only
        is_unknown = result.is_tensor and result._computed is None
        return is_joint and is_unknown and self._can_pack(result.value, meta.sync.group, meta.sync.op)

    # The collective.

    def _reduce(self, *, is_end: bool) -> bool:
        return self._packed.reduce(
            is_end=is_end,
            device=self._strategy.root_device,
            group=self._group(),
            absent=self._strategy.data.evaluation.idle,
        )

    def _group(self) -> dist.ProcessGroup | None:
        """The ranks; on CPU memory in a group of its own, where nothing else can take the place of a message.

        In a first training step all ranks are there, and those that never log anything need no group for that.
        """
        membership = current()
        is_trial = self._is_first and self._packed.where == _TRAINING
        if is_trial or membership is None or self._strategy.root_device.type != "cpu":
            return None
        return membership.new_group(range(membership.world.world_size), backend="gloo", purpose="metrics")


def _spare_moves(result: Any) -> None:
    """Have a logged value go over all it has only where it has to move: Lightning does so whenever it is logged again.

    That took more time than the collective.
    """
    if not result.is_tensor or "to" in vars(result):
        return
    refuse_missing(type(result), "to")

    def to(*args: Any, **kwargs: Any) -> Any:
        return result if args == (result.value.device,) and not kwargs else type(result).to(result, *args, **kwargs)

    result.to = to


def _states(key: str, result: Any) -> list[Value]:
    """What Lightning reduces to compute the value of an epoch, in its order."""
    op = result.meta.sync.op
    values = [Value(key, op, result.value.clone())]
    if result.meta.is_mean_reduction:
        values.append(Value(f"{key}, batch size", op, result.cumulated_batch_size))
    return values
