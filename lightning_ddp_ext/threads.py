"""Start threads that use this process's CUDA device, and wait for the work of devices.

A new thread uses device 0. If it calls CUDA there, each rank of a host takes some
hundred MiB of that device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
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
    if device is None and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())

    def run() -> None:
        if device is not None and device.type == "cuda":
            # After an error of the device, the thread still has to report it.
            with suppress(RuntimeError):
                torch.cuda.set_device(device)
        target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def wait_for_gpus(devices: Iterable[torch.device]) -> None:
    """Wait for the work in the current stream of each GPU among the devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
