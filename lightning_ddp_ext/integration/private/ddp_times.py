"""Measure a step with the timers of torch's DDP, which have no public name."""

from __future__ import annotations

import time
from typing import Any

_NEVER = 1 << 30  # steps


def has_timers(model: Any) -> bool:
    """Whether this is a model in DDP, of a version of torch that has these timers."""
    names = ("_set_ddp_runtime_logging_sample_rate", "_get_ddp_logging_data")
    has_names = all(hasattr(model, name) for name in names)
    return has_names and hasattr(getattr(model, "logger", None), "set_runtime_stats_and_log")


class MeasuredStep:
    """A step that exchanges gradients, measured from now on.

    DDP has the times for forward and backward, on a GPU from CUDA events.

    Args:
        model: the model in DDP.
    """

    def __init__(self, model: Any) -> None:
        self._forward_at: float | None = None  # when DDP's first forward pass began
        self._hook = model.register_forward_pre_hook(self._on_forward)
        model._set_ddp_runtime_logging_sample_rate(1)
        self._started_at = time.perf_counter()

    def _on_forward(self, model: Any, _: object) -> None:
        if self._forward_at is None and model.require_backward_grad_sync:
            self._forward_at = time.perf_counter()

    def end(self, model: Any) -> dict[str, float]:
        """Return the times for data, forward, backward and waiting, in ms.

        Empty if the step did not exchange gradients.
        """
        self._hook.remove()
        model.logger.set_runtime_stats_and_log()  # DDP itself does this in the next step
        model._set_ddp_runtime_logging_sample_rate(_NEVER)
        if self._forward_at is None:
            return {}
        measured = model._get_ddp_logging_data()
        exchange = measured["backward_comm_time"] - measured["backward_compute_comm_overlap_time"]
        return {
            "data": (self._forward_at - self._started_at) * 1e3,
            "forward": measured["forward_compute_time"] / 1e6,
            "backward": measured["backward_compute_time"] / 1e6,
            "waiting": max(0.0, exchange / 1e6),
        }
