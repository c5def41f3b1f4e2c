"""A callback that tells log lines of different ranks apart, with any strategy."""

from __future__ import annotations

import logging
import os
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.integration.lightning_tree import Callback, LightningModule, Trainer
from lightning_ddp_ext.supervision.rank_logging import FORMAT, RankLines, open_file

Console = Literal["all", "rank_zero"]


class RankLogging(Callback):
    """Has each log line say which rank it comes from, and on request keeps a file per rank.

    From the callback's ``setup`` to its ``teardown``, every line that ``logging`` writes to stdout or stderr begins its
    message with ``[rank 1/4 host]``, whatever logger, handler and formatter it comes through, and so does every
    warning. Other handlers get the records as they are. Put the callback first for the lines of other callbacks'
    ``setup``. What is printed, and what C++ writes, is no log line. With one rank nothing is added.

    A rank's file has all lines that loggers let through, also those that the console leaves out, warnings, and the
    traceback of an exception that ends the rank.

    Args:
        directory: where each rank appends to a file, ``rank-3.log``, on its own host; made if need be. Never a URL.
        console: ``"rank_zero"`` leaves lines below WARNING of all ranks but 0 out of the console.
        level: of the lines in the files, as ``logging`` has it: ``"INFO"`` or 20.
        format: of the lines in the files, as ``logging.Formatter`` takes it.

    Raises:
        ConfigurationError: an argument makes no sense; in ``setup``, on a rank that cannot write its file. With
            ``DDPExtStrategy`` the others end with a ``RankFailedError`` at once, which names it.

    Example::

        trainer = L.Trainer(strategy="ddp", devices=4, callbacks=[RankLogging("logs", console="rank_zero")])
    """

    def __init__(
        self,
        directory: str | PathLike[str] | None = None,
        *,
        console: Console = "all",
        level: int | str = logging.NOTSET,
        format: str = FORMAT,
    ) -> None:
        self._directory = None if directory is None else _directory_of(directory)
        self._console = _console_of(console)
        self._level = _level_of(level)
        self._format = _format_of(format)
        self._lines: RankLines | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()
        rank, world_size = trainer.global_rank, trainer.world_size
        file = None
        if self._directory is not None:
            file = open_file(self._directory, rank, world_size, level=self._level, format=self._format)
        is_quiet = self._console == "rank_zero" and rank != 0
        self._lines = RankLines(
            rank, world_size, console_level=logging.WARNING if is_quiet else logging.NOTSET, file=file
        )
        self._lines.open()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._lines is not None:
            self._lines.write_exception(exception)
        self._close()

    def _close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _directory_of(directory: str | PathLike[str]) -> Path:
    if "://" in os.fspath(directory):
        raise ConfigurationError(
            f"directory must be on a file system of each rank's host (got {os.fspath(directory)!r}); write 'logs', say"
        )
    return Path(directory)


def _console_of(console: Console) -> Console:
    if console not in get_args(Console):
        raise ConfigurationError(
            f"console must be one of {', '.join(get_args(Console))} (got {console!r}); write console='rank_zero', say"
        )
    return console


def _level_of(level: int | str) -> int:
    try:
        return logging.Handler(level).level
    except (TypeError, ValueError):
        raise ConfigurationError(
            f"level must be one of logging's, by name or number (got {level!r}); write level='INFO', say"
        ) from None


def _format_of(format: str) -> str:
    try:
        logging.Formatter(format)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"format must be one for logging.Formatter (got {format!r}: {error}); write format={FORMAT!r}, say"
        ) from None
    return format
