"""Log lines on the console that say which rank they come from, and all lines of a rank in a file of its own.

While ``RankLines`` are open, ours stand in front of four functions of ``logging`` and ``warnings``, and nobody's
loggers, handlers, formatters and records are touched:

=========================  =========================================================================================
function                   what is done there
=========================  =========================================================================================
``Handler.format``         a handler of the console formats a copy of the record whose message has the prefix
``Handler.handle``         a handler of the console leaves out what is below its level
``Logger.callHandlers``    the rank's file gets every record that a logger lets through, whether it propagates or not
``warnings.showwarning``   a warning that is shown is a line, too
=========================  =========================================================================================

So handlers and formatters that come later are no different from those that are there, a handler on the root logger
does not keep ``basicConfig`` and ``lastResort`` from working, and the end is four assignments. The console is what
writes to stdout or stderr; files, and handlers that collect records, get them as they are.
"""

from __future__ import annotations

import copy
import io
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from multiprocessing.util import Finalize
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rank_logger import prefix_of

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_WARNINGS = "py.warnings"  # as logging.captureWarnings() calls it
_EARLY_AT_THE_END = 100  # of a process


class RankLines:
    """While these are open, lines on the console begin with the rank, and the rank's file gets all lines.

    Every line of a message and of a traceback has the prefix, as those of ``torchrun --tee``, ``srun --label`` and
    ``mpirun --tag-output`` do: with several ranks on one console another rank's line may be next. A rank that is the
    only one has no prefix. Forked processes, such as workers of a ``DataLoader``, keep their rank's.

    Args:
        rank: of this process.
        world_size: number of ranks.
        console_level: lines below it are left out of the console.
        file: gets all lines from its own level on, and is closed with these.

    >>> with RankLines(1, 4):
    ...     logging.getLogger("training").warning("now on stderr with its rank")
    """

    def __init__(
        self, rank: int, world_size: int, *, console_level: int = logging.NOTSET, file: logging.Handler | None = None
    ) -> None:
        self.prefix = prefix_of(rank, world_size) if world_size > 1 else ""
        self.console_level = console_level
        self._opening = f"rank {rank} of {world_size} on {socket.gethostname()}, process {os.getpid()}"
        self._file = file
        self._at_end: Finalize | None = None

    def open(self) -> None:
        """Begin."""
        if not _open:
            for function in _IN_FRONT:
                _functions.enter_context(_in_front_of(*function))
        _open.append(self)
        self._at_end = Finalize(None, self._end, exitpriority=_EARLY_AT_THE_END)
        self.write(_record_of(logging.INFO, self._opening))

    def close(self) -> None:
        """End; more than once does no harm."""
        if self not in _open:
            return
        _open.remove(self)
        if not _open:
            _functions.close()
        if self._at_end is not None:
            self._at_end.cancel()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> RankLines:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, record: logging.LogRecord) -> None:
        """Write to the file what its level lets through."""
        if self._file is not None and record.levelno >= self._file.level:
            self._file.handle(copy.copy(record))  # formatters leave their results in a record, for others to find

    def write_exception(self, exception: BaseException) -> None:
        """Write a traceback to the file, whatever its level. On the console it is for whoever catches it in the end."""
        if self._file is not None:
            self._file.handle(_record_of(logging.CRITICAL, "ended by an exception", exception))

    def _end(self) -> None:
        """At the end of the process. One of multiprocessing gets here while the exception that ends it is under way."""
        ended_by = sys.exc_info()[1]
        if isinstance(ended_by, SystemExit) and ended_by.__context__ is not None:
            ended_by = ended_by.__context__  # torch.multiprocessing has caught it, and exits
        if ended_by is not None:
            self.write_exception(ended_by)
        self.close()


def open_file(
    directory: Path, rank: int, world_size: int, *, level: int = logging.NOTSET, format: str = FORMAT
) -> logging.FileHandler:
    """What appends a rank's lines to its file, ``rank-3.log`` or, of more than ten, ``rank-03.log``, each at once.

    Raises:
        ConfigurationError: this rank cannot make or write the file.
    """
    path = directory / f"rank-{rank:0{len(str(world_size - 1))}d}.log"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigurationError(
            f"directory must be one where each rank can write a log file (rank {rank} on {socket.gethostname()} got "
            f"'{path}': {error.strerror or error}); name another one, or leave it out"
        ) from error
    file.setLevel(level)
    file.setFormatter(logging.Formatter(format))
    return file


def _record_of(level: int, text: str, exception: BaseException | None = None) -> logging.LogRecord:
    exc_info = None if exception is None else (type(exception), exception, exception.__traceback__)
    return logging.getLogger(__name__).makeRecord(__name__, level, __file__, 0, text, (), exc_info)


_open: list[RankLines] = []
_functions = ExitStack()


def _format(format_as_before: Callable[..., str], handler: logging.Handler, record: logging.LogRecord) -> str:
    prefix = _prefix()
    if not prefix or not _is_of_console(handler):
        return format_as_before(handler, record)
    if getattr(record, "markup", getattr(handler, "markup", False)):
        prefix = prefix.replace("[", r"\[")  # rich would take it for a style
    return format_as_before(handler, _prefixed(record, prefix)).replace("\n", f"\n{prefix}")


def _handle(handle_as_before: Callable[..., Any], handler: logging.Handler, record: logging.LogRecord) -> Any:
    if any(record.levelno < lines.console_level for lines in _open) and _is_of_console(handler):
        return False
    return handle_as_before(handler, record)


def _call_handlers(call_as_before: Callable[..., None], logger: logging.Logger, record: logging.LogRecord) -> None:
    _write(record)  # first: a console may block
    call_as_before(logger, record)


def _show_warning(
    show_as_before: Callable[..., None],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    if file is not None or show_as_before.__module__ == logging.__name__:  # captured already: it is a record by now
        show_as_before(message, category, filename, lineno, file, line)
        return
    shown = io.StringIO()
    show_as_before(message, category, filename, lineno, shown, line)
    text = shown.getvalue()
    if text:  # else somebody collects warnings, or shows them in another way
        _write(
            logging.getLogger(_WARNINGS).makeRecord(
                _WARNINGS, logging.WARNING, filename, lineno, text.rstrip(), (), None
            )
        )
        with suppress(OSError, AttributeError):  # as in warnings: there may be no stderr
            sys.stderr.write("".join(f"{_prefix()}{each}" for each in text.splitlines(keepends=True)))


_IN_FRONT: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (logging.Handler, "format", _format),
    (logging.Handler, "handle", _handle),
    (logging.Logger, "callHandlers", _call_handlers),
    (warnings, "showwarning", _show_warning),
)


@contextmanager
def _in_front_of(owner: Any, name: str, ours: Callable[..., Any]) -> Iterator[None]:
    """Call ``ours`` with the function that is there and its arguments; afterwards that function alone."""
    there = getattr(owner, name)
    is_active = True

    @wraps(there)
    def in_front(*args: Any, **kwargs: Any) -> Any:
        return ours(there, *args, **kwargs) if is_active else there(*args, **kwargs)

    setattr(owner, name, in_front)
    try:
        yield
    finally:
        is_active = False
        if getattr(owner, name) is in_front:  # else somebody has put himself in front of ours, and will call it
            setattr(owner, name, there)


def _prefix() -> str:
    return next((lines.prefix for lines in _open), "")


def _write(record: logging.LogRecord) -> None:
    for lines in _open:
        lines.write(record)


def _prefixed(record: logging.LogRecord, prefix: str) -> logging.LogRecord:
    """The record with a prefix before its message: a copy, as other handlers get the same one."""
    if isinstance(record.msg, Mapping):  # for a formatter that takes messages apart
        return record
    text = record.getMessage()
    if text.startswith(prefix):
        return record
    prefixed = copy.copy(record)
    prefixed.msg, prefixed.args = prefix + text, None
    return prefixed


def _is_of_console(handler: logging.Handler) -> bool:
    """Whether the handler writes to stdout or stderr, by itself or through a rich console."""
    stream: Any = getattr(handler, "stream", None) or getattr(getattr(handler, "console", None), "file", None)
    if stream in (None, sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__):
        return stream is not None
    try:
        return stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):
        return False  # it has no descriptor, or is closed
