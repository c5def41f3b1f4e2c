"""A callback that tells log lines of different ranks apart, with any strategy."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Literal, get_args

from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rank_logger import prefix_of
from lightning_ddp_ext.supervision.rank_logging import FORMAT, RankFile, prefixed_console

from ..lightning_tree import pl
from ..options import check_choice

Console = Literal["all", "rank_zero"]


class RankLogging(pl.Callback):
    """Has each log line say which rank it comes from, and on request keeps a file per rank.

    From the callback's ``setup`` to its ``teardown``, every line that ``logging`` writes to stdout or stderr begins its
    message with ``[rank 1/4 host]``. That holds for the handlers that loggers have when ``setup`` is called, so
    configure ``logging`` before, and put the callback first for the lines of other callbacks' ``setup``. Other handlers
    get the records as they are. Python's warnings are log lines after ``logging.captureWarnings(True)``; what is
    printed, and what C++ writes, is none. With one rank nothing is added.

    A rank's file has all lines that loggers let through, also those that the console leaves out, and the traceback of
    an exception that ends the rank.

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
        if directory is not None and "://" in os.fspath(directory):
            raise ConfigurationError(
                f"directory must be on a file system of each rank's host (got {directory!r}); write 'logs', say"
            )
        check_choice("console", console, *get_args(Console))
        try:
            self._level = logging.Handler(level).level
            logging.Formatter(format)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"level and format must be what logging takes (got level={level!r} and format={format!r}: {error});"
                f" write level='INFO' and format={FORMAT!r}, say"
            ) from None
        self._directory = None if directory is None else Path(directory)
        self._quiet_level = logging.WARNING if console == "rank_zero" else logging.NOTSET
        self._format = format
        self._file: RankFile | None = None
        self._opened = ExitStack()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()
        rank, world_size = trainer.global_rank, trainer.world_size
        if self._directory is not None:
            self._file = RankFile(self._directory, rank, world_size, level=self._level, format=self._format)
            self._opened.callback(self._file.close)
        prefix = prefix_of(rank, world_size) if world_size > 1 else ""
        self._opened.enter_context(prefixed_console(prefix, level=self._quiet_level if rank else logging.NOTSET))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if self._file is not None:
            self._file.write_exception(exception)
        self._close()

    def _close(self) -> None:
        self._opened.close()
        self._file = None
