"""Measure a step with the timers of torch's DDP, which have no public name."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

_NEVER = 1 << 30  # steps


def has_timers(model: object) -> bool:
    """Whether this is a model in DDP, of a version of torch that has these timers."""
    names = ("_set_ddp_runtime_logging_sample_rate", "_get_ddp_logging_data")
    return all(hasattr(model, name) for name in names)


class MeasuredStep:
    """A step of this rank that DDP measures, on a GPU with CUDA events.

    DDP's times for forward and backward include two waits of this thread: rank 0's
    buffers are sent before the forward pass, and logged values may be reduced after it.
    Hooks measure these waits.

    Args:
        model: the model in DDP; its next step is measured.
        data: the time for the step's batch, in ms.
        times: gets the times for data, forward, backward and waiting, in ms, once they
            are known.
    """

    def __init__(self, model: Any, data: float, times: list[dict[str, float]]) -> None:
        self._times = times
        self._model = model
        self._data = data
        self._moments: dict[str, float] = {}
        self._iteration: int | None = None
        model._set_ddp_runtime_logging_sample_rate(1)
        self._hooks = [
            model.register_forward_pre_hook(partial(self.mark, "start")),
            model.module.register_forward_pre_hook(partial(self.mark, "forward")),
            model.register_forward_hook(partial(self.mark, "end of forward")),
        ]

    def mark(self, event: str, *_: Any) -> None:
        """Record the first time at which an event happens, such as ``"backward"``.

        Nothing is recorded in a step that only accumulates gradients.
        """
        if self._model.require_backward_grad_sync:
            self._moments.setdefault(event, time.perf_counter())

    def remove_hooks(self) -> None:
        """Remove the hooks of the model, at the latest when the fit ends."""
        for hook in self._hooks:
            hook.remove()

    def is_over(self, model: Any) -> bool:
        """Whether the times are known or remain unknown.

        Called after this step and each further one. DDP takes its times in the next
        step. They remain unknown if this step did not exchange gradients, or the
        strategy has built another model in DDP since.
        """
        measured = self._model._get_ddp_logging_data()
        iteration = measured.get("iteration", 0)
        if self._iteration is None:
            self._iteration = iteration
            self.remove_hooks()
        is_measured = "backward" in self._moments and model is self._model
        if is_measured and iteration == self._iteration:
            return False
        self._model._set_ddp_runtime_logging_sample_rate(_NEVER)
        if not is_measured:
            return True
        for_buffers = self._between("start", "forward")
        for_values = self._between("end of forward", "backward")
        exchange = measured["backward_comm_time"] - measured["backward_compute_comm_overlap_time"]
        self._times.append(
            {
                "data": self._data,
                "forward": max(0.0, measured["forward_compute_time"] / 1e6 - for_buffers),
                "backward": max(0.0, measured["backward_compute_time"] / 1e6 - for_values),
                "waiting": max(0.0, exchange / 1e6) + for_buffers + for_values,
            }
        )
        return True

    def _between(self, one: str, other: str) -> float:
        """Return the time between two events in ms; 0 unless they happened in this order."""
        moment = self._moments
        return max(0.0, moment.get(other, 0.0) - moment.get(one, float("inf"))) * 1e3
