"""Let a rank that has no batch take part in a step, with no effect on any metric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ddp_ext.data.metric_state import preserve_metric_state

from .compat import results_of
from .named_calls import ranks_of


class IdleSteps:
    """Base class for evaluation in which ranks without a batch are idle."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._batches: dict[int, int] = {}  # number of batches by rank, if some ranks have fewer
        self._step = 0  # the number of the current step's batch
        self._is_in_step = False

    @property
    def _idle_ranks(self) -> tuple[int, ...]:
        """The ranks that have no batch for the current step."""
        return tuple(rank for rank, batches in sorted(self._batches.items()) if batches <= self._step)

    @property
    def is_idle(self) -> bool:
        """Whether this rank's current batch does not count."""
        return bool(self._batches) and self._strategy.global_rank in self._idle_ranks

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks that are idle in the current step; reductions must leave their values out."""
        return self._idle_ranks if self._is_in_step else ()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step; on an idle rank, keep it from affecting metrics."""
        self._is_in_step = True
        try:
            if not self.is_idle:
                yield
                return
            module = self._strategy.lightning_module
            with preserve_metric_state(results_of(module.trainer), module):
                yield
        finally:
            self._is_in_step = False

    def _by_rank(self, value: Any) -> tuple[Any, ...]:
        """Return the values of all ranks in rank order. Collective: every rank must call it."""
        return tuple(ranks_of(self._strategy).gather(value))
