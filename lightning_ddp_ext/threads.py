"""Start threads that use this process's CUDA device.

A new thread uses device 0. If it calls CUDA there, each rank of a host takes some
hundred MiB of that device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_device: torch.device | None = None


def use_device(device: torch.device) -> None:
    """Set the device of the threads that start from now on."""
    global _device
    _device = device


def start_thread(
    name: str, target: Callable[..., object], *args: Any, daemon: bool = True
) -> threading.Thread:
    """Start and return a thread that calls ``target`` on this process's device."""
    device = _device

    def run() -> None:
        if device is not None and device.type == "cuda":
            # After an error of the device, the thread still has to report it.
            with suppress(RuntimeError):
                torch.cuda.set_device(device)
        target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread
