"""Have a rank without a batch take part in a step without leaving a trace in any metric."""

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
    """Base of training and evaluation, in which ranks without a batch are idle."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._batches: dict[int, int] = {}  # of ranks that have fewer than others, by rank
        self._is_in_step = False

    @property
    @abstractmethod
    def _number(self) -> int:
        """The number of the present step's batch, from 0."""

    @property
    def _idle_ranks(self) -> tuple[int, ...]:
        """The ranks that have no batch of their own for the present step."""
        if not self._batches:
            return ()
        number = self._number
        return tuple(rank for rank, batches in sorted(self._batches.items()) if batches <= number)

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
        """Have an idle rank leave no trace of a step of the module in any metric."""
        module = self._strategy.lightning_module
        self._is_in_step = True
        try:
            with preserve_metric_state(results_of(module.trainer), module) if self.is_idle else nullcontext():
                yield
        finally:
            self._is_in_step = False

    def _lengths_by_rank(self, sized: Any) -> tuple[int, ...]:
        """Return the numbers of batches, by rank; -1 for none. Collective: every rank must call it."""
        length = batches_of(sized)
        own = torch.tensor(-1 if length == float("inf") else int(length), device=self._strategy.root_device)
        return tuple(self._strategy.all_gather(own).flatten().tolist())

    def _refuse(self, error: Exception) -> None:
        """Raise an error that every rank has found, once all have: else slower ranks would report a failed rank."""
        self._strategy.barrier("a refusal")
        raise error
