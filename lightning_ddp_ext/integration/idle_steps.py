"""Steps that a rank without a batch takes part in, and that leave no trace in any metric."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from lightning_ddp_ext.data.loader import batches_of
from lightning_ddp_ext.data.metric_state import preserve_metric_state

from .compat import results_of


class IdleSteps(ABC):
    """Base of what has ranks make equally many steps, in training and in evaluation."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._is_in_step = False

    @property
    @abstractmethod
    def _idle_ranks(self) -> tuple[int, ...]:
        """The ranks that have no batch of their own for the present step."""

    @property
    def is_idle(self) -> bool:
        """Whether this rank's present batch does not count."""
        return self._strategy.global_rank in self._idle_ranks

    @property
    def idle(self) -> tuple[int, ...]:
        """The ranks whose values a reduction must leave out: those that are idle in the step that all ranks are in."""
        return self._idle_ranks if self._is_in_step else ()

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the module: on an idle rank it leaves no trace in any metric."""
        module = self._strategy.lightning_module
        self._is_in_step = True
        try:
            with preserve_metric_state(results_of(module.trainer), module) if self.is_idle else nullcontext():
                yield
        finally:
            self._is_in_step = False

    def _lengths_by_rank(self, sized: Any) -> tuple[int, ...]:
        """The numbers of batches, by rank; -1 for none. Collective: every rank must call it."""
        length = batches_of(sized)
        own = torch.tensor(-1 if length == float("inf") else int(length), device=self._strategy.root_device)
        return tuple(self._strategy.all_gather(own).flatten().tolist())

    def _refuse(self, error: Exception) -> None:
        """Raise what every rank has found; together, or the slower ones would hear of a failure instead of this."""
        self._strategy.barrier("a refusal")
        raise error
