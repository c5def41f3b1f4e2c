"""Log lines on the console that say which rank they come from, and a file with all log lines of a rank.

The prefix is put in front by the formatters of console handlers, and the file is one more handler of loggers. Records,
other handlers, and what is added to loggers later are left alone; what was there before is there afterwards.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_EARLY_AT_THE_END = 100  # of a process


@contextmanager
def prefixed_console(prefix: str, *, level: int = logging.NOTSET) -> Iterator[None]:
    """Put a prefix before what handlers of loggers write to stdout and stderr, and leave out lines below a level.

    Every line of a message and of a traceback has the prefix, as those of ``torchrun --tee`` and ``srun --label`` do:
    the next line may be another rank's. Forked processes, such as workers of a ``DataLoader``, keep their rank's.
    """

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= level

    handlers: set[Any] = {logging.lastResort, *(handler for logger in _loggers() for handler in logger.handlers)}
    with ExitStack() as at_close:
        for handler in filter(_is_plain_console, handlers):
            is_markup = getattr(handler, "markup", False)  # rich would take the prefix for a style
            formatter = _PrefixFormatter(handler.formatter, prefix.replace("[", r"\[") if is_markup else prefix)
            handler.setFormatter(formatter)
            handler.addFilter(is_shown)
            at_close.callback(formatter.give_way, handler)
            at_close.callback(handler.removeFilter, is_shown)
        yield


class RankFile(logging.FileHandler):
    """Appends what this rank's loggers let through to a file, each line at once, until it is closed.

    The file is ``rank-3.log`` or, of more than ten, ``rank-03.log``. It ends with the exception that ends the process.

    Raises:
        ConfigurationError: this rank cannot make or write the file.
    """

    def __init__(
        self, directory: Path, rank: int, world_size: int, *, level: int = logging.NOTSET, format: str = FORMAT
    ) -> None:
        path, host = directory / f"rank-{rank:0{len(str(world_size - 1))}d}.log", socket.gethostname()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            super().__init__(path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise ConfigurationError(
                f"directory must be one where each rank can write a log file (rank {rank} on {host} got '{path}': "
                f"{error.strerror or error}); name another one, or leave it out"
            ) from error
        self.setLevel(level)
        self.setFormatter(logging.Formatter(format))
        if level <= logging.INFO:
            self._write(logging.INFO, f"rank {rank} of {world_size} on {host}, process {os.getpid()}")
        self._at_close = ExitStack()
        self._at_close.callback(Finalize(None, self._end_process, exitpriority=_EARLY_AT_THE_END).cancel)
        for logger in _loggers():
            if logger.parent is None or not logger.propagate:  # each record gets to exactly one of these
                self._add_to(logger)

    @override
    def close(self) -> None:
        self._at_close.close()
        super().close()

    def write_exception(self, exception: BaseException) -> None:
        """Write a traceback, whatever the level. On the console it is for whoever catches the exception in the end."""
        self._write(logging.CRITICAL, "ended by an exception", exception)

    def _add_to(self, logger: logging.Logger) -> None:
        """Become a handler of a logger; where it has no other, show what ``logging`` would have shown without any."""
        handlers: list[logging.Handler] = [self]
        if not logger.handlers and logging.lastResort is not None:
            logging.lastResort.addFilter(_has_no_handler)
            self._at_close.callback(logging.lastResort.removeFilter, _has_no_handler)
            handlers.append(logging.lastResort)
        for handler in handlers:
            logger.addHandler(handler)
            self._at_close.callback(logger.removeHandler, handler)

    def _write(self, level: int, text: str, exception: BaseException | None = None) -> None:
        exc_info = None if exception is None else (type(exception), exception, exception.__traceback__)
        self.handle(logging.LogRecord(__name__, level, __file__, 0, text, (), exc_info))

    def _end_process(self) -> None:
        """At the end of the process. One of multiprocessing gets here while the exception that ends it is under way."""
        ended_by = sys.exc_info()[1]
        if isinstance(ended_by, SystemExit) and ended_by.__context__ is not None:
            ended_by = ended_by.__context__  # torch.multiprocessing has caught it, and exits
        if ended_by is not None:
            self.write_exception(ended_by)
        self.close()


class _PrefixFormatter(logging.Formatter):
    """Formats as another formatter does, with a prefix before the message and before each further line."""

    def __init__(self, formatter: logging.Formatter | None, prefix: str) -> None:
        super().__init__()
        self._before = formatter
        self._prefix = prefix

    @override
    def format(self, record: logging.LogRecord) -> str:
        formatter = self._before or logging.Formatter()
        if isinstance(record.msg, Mapping):  # for a formatter that takes messages apart
            return formatter.format(record)
        text, prefixed = record.getMessage(), copy.copy(record)  # other handlers get the same record
        prefixed.msg, prefixed.args = text if text.startswith(self._prefix) else self._prefix + text, None
        return formatter.format(prefixed).replace("\n", f"\n{self._prefix}")

    def give_way(self, handler: logging.Handler) -> None:
        """Give the handler its formatter back, unless it has been given another one since."""
        if handler.formatter is self:
            handler.setFormatter(self._before)


def _loggers() -> list[logging.Logger]:
    named = list(logging.root.manager.loggerDict.values())
    return [logging.root, *(logger for logger in named if isinstance(logger, logging.Logger))]


def _is_plain_console(handler: Any) -> bool:
    """Whether it writes to stdout or stderr, by itself or through a rich console, and has no prefix yet."""
    stream = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    is_console = stream is not None and stream in (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return is_console and not isinstance(handler.formatter, _PrefixFormatter)


def _has_no_handler(record: logging.LogRecord) -> bool:
    """Whether no logger has a handler for the record, but for a rank's file."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        if not all(isinstance(handler, RankFile) or handler is logging.lastResort for handler in logger.handlers):
            return False
        logger = logger.parent if logger.propagate else None
    return True
