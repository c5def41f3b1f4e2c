"""Saves in the background that fail only when the ranks wait for them."""

import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_ddp_ext import RankZeroCheckpointIO


class _Failing(RankZeroCheckpointIO):
    def __init__(self, fails: Callable[[str], bool]) -> None:
        super().__init__()
        self.fails = fails
        self.awaited = threading.Event()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if self.fails(str(path)):
            self.awaited.wait()
            path = "/dev/null/it.ckpt"
        super().save_checkpoint(checkpoint, path, storage_options)


class FailsWhenAwaited(AsyncCheckpointIO):
    """Lightning's IO for background saves, of which some fail.

    Args:
        fails: whether the save to a path fails.
    """

    def __init__(self, fails: Callable[[str], bool]) -> None:
        self.failing = _Failing(fails)
        super().__init__(self.failing)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.failing.awaited.clear()
        super().save_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        self.failing.awaited.set()
        super().teardown()
