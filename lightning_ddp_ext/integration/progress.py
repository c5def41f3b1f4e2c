"""Show a progress bar of the Trainer's kind for what takes long; a bar that fails does no harm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from lightning_ddp_ext.checkpoint.collectives import Show, show_nothing
from lightning_ddp_ext.integration.lightning_tree import RichProgressBar

# Seconds: what is done sooner needs no bar.
_LONG = 2.0


def progress_of(trainer: Any) -> Show:
    """What shows how far a save or a restore is: on rank 0, unless the Trainer's own bar is off."""
    bar = None if trainer is None else trainer.progress_bar_callback
    if bar is None or not trainer.is_global_zero or bar.is_disabled:
        return show_nothing
    return _harmless(_rich if isinstance(bar, RichProgressBar) else _tqdm)


def _harmless(show: Show) -> Show:
    """The same, but its errors end the bar and not the work."""

    @contextmanager
    def safe_show(what: str, size: int | None) -> Iterator[Callable[[int], None]]:
        bar = ExitStack()
        advance: list[Callable[[int], None]] = []
        with suppress(Exception):
            advance.append(bar.enter_context(show(what, size)))

        def on_progress(done: int) -> None:
            try:
                advance[0](done)
            except Exception:
                advance[:] = [lambda done: None]

        try:
            yield on_progress
        finally:
            with suppress(Exception):
                bar.close()

    return safe_show


@contextmanager
def _tqdm(what: str, size: int | None) -> Iterator[Callable[[int], None]]:
    from tqdm.auto import tqdm

    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(total=size, desc=f"checkpoint: {what}", delay=_LONG, leave=False, **options) as bar:
        yield lambda done: _advance(bar, done) if done > bar.n else None


def _advance(bar: Any, done: int) -> None:
    bar.update(done - bar.n)


@contextmanager
def _rich(what: str, size: int | None) -> Iterator[Callable[[int], None]]:
    from rich.errors import LiveError
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    bar = Progress(*columns, transient=True)
    task = bar.add_task(f"checkpoint: {what}", total=size)
    begin = time.monotonic()
    may_start = True

    def on_progress(done: int) -> None:
        nonlocal may_start
        bar.update(task, completed=done)
        if may_start and time.monotonic() - begin >= _LONG:
            may_start = False
            try:
                bar.start()
            except LiveError:  # this rich shows one live display at a time, and the Trainer's is there
                bar.disable = True

    try:
        yield on_progress
    finally:
        bar.stop()
