"""A thread works on the device of its process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from lightning_ddp_ext.threads import start_thread, use_device


def test_a_thread_uses_the_device_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sets the device before it runs, since CUDA would use the first one."""
    calls: list[Any] = []
    monkeypatch.setattr("lightning_ddp_ext.threads._device", None)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: calls.append((threading.current_thread().name, device)),
    )
    device = torch.device("cuda", 3)
    use_device(device)
    start_thread("worker", calls.append, "worked").join()
    assert calls == [("worker", device), "worked"]


def test_a_thread_also_runs_on_a_broken_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error of CUDA, each call raises; the thread still has to report it."""
    calls: list[str] = []

    def set_device(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("lightning_ddp_ext.threads._device", torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    start_thread("worker", calls.append, "worked").join()
    assert calls == ["worked"]
