"""Show a progress bar of the Trainer's kind for what takes long; a bar that fails does no harm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from lightning_ddp_ext.checkpoint.collectives import Show, show_nothing
from lightning_ddp_ext.integration.lightning_tree import RichProgressBar

# Seconds: what is done sooner needs no bar.
_LONG = 2.0


class _Bar(NamedTuple):
    update: Callable[[int], object]
    close: Callable[[], object]


def progress_of(trainer: Any) -> Show:
    """What shows how far a save or a restore is: on rank 0, unless the Trainer's own bar is off."""
    bar = None if trainer is None else trainer.progress_bar_callback
    if bar is None or not trainer.is_global_zero or bar.is_disabled:
        return show_nothing
    return partial(_show, _rich if isinstance(bar, RichProgressBar) else _tqdm)


@contextmanager
def _show(make: Callable[[str, int | None], _Bar], what: str, size: int | None) -> Iterator[Callable[[int], None]]:
    begin = time.monotonic()
    bar: _Bar | None = None
    has_failed = False

    def on_progress(done: int) -> None:
        nonlocal bar, has_failed
        if has_failed or time.monotonic() - begin < _LONG:
            return
        try:
            bar = bar or make(f"checkpoint: {what}", size)
            bar.update(done)
        except Exception:
            has_failed = True

    try:
        yield on_progress
    finally:
        if bar is not None:
            with suppress(Exception):
                bar.close()


def _tqdm(what: str, size: int | None) -> _Bar:
    from tqdm.auto import tqdm

    bar = tqdm(total=size, desc=what, leave=False, unit="B", unit_scale=True, unit_divisor=1024)
    return _Bar(lambda done: bar.update(max(0, done - bar.n)), bar.close)


def _rich(what: str, size: int | None) -> _Bar:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    bar = Progress(*columns, transient=True)
    task = bar.add_task(what, total=size)
    bar.start()  # an error in versions of rich that show one live display at a time, while the Trainer's is there
    return _Bar(lambda done: bar.update(task, completed=done), bar.stop)
