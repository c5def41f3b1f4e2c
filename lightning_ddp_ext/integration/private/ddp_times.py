"""Measure a step with the timers of torch's DDP, which have no public name."""

from __future__ import annotations

from typing import Any

_NEVER = 1 << 30  # steps


def has_timers(model: object) -> bool:
    """Whether this is a model in DDP, of a version of torch that has these timers."""
    names = ("_set_ddp_runtime_logging_sample_rate", "_get_ddp_logging_data")
    return all(hasattr(model, name) for name in names)


def measure_next_step(model: Any, *, is_measured: bool) -> None:
    """Start or stop DDP's timers, which use CUDA events on a GPU.

    DDP measures only steps that exchange gradients.
    """
    model._set_ddp_runtime_logging_sample_rate(1 if is_measured else _NEVER)


def times_of_last_step(model: Any) -> dict[str, float]:
    """Return the times for forward, backward and waiting of the last measured step, in ms.

    DDP takes the times of a step at the start of the next one. Empty before.
    """
    measured = model._get_ddp_logging_data()
    if not measured.get("backward_comm_time"):
        return {}
    exchange = measured["backward_comm_time"] - measured["backward_compute_comm_overlap_time"]
    return {
        "forward": measured["forward_compute_time"] / 1e6,
        "backward": measured["backward_compute_time"] / 1e6,
        "waiting": max(0.0, exchange / 1e6),
    }
