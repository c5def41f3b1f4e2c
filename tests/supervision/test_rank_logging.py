"""Log lines that say their rank, and a file per rank, in one process: what is there before is there afterwards."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing.util
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.supervision.rank_logging import RankFile, prefixed_console
from tests.harness.ranks import run_ranks

PREFIX = f"[rank 1/4 {socket.gethostname()}] "

log = logging.getLogger("tests.user")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def as_it_was(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test leaves handlers, formatters, filters, and what is to be done at the end of the process as they were."""
    monkeypatch.setattr(logging.root, "handlers", [caplog.handler])  # none that an import has left on a closed stream
    before = what_is_there()
    yield
    assert what_is_there() == before


class OnStderr(logging.StreamHandler):
    """Writes to what is stderr at the moment: under pytest it is another one in a fixture than in the test."""

    stream = property(lambda self: sys.stderr, lambda self, value: None)


@pytest.fixture
def console(capsys: Captured) -> Iterator[logging.StreamHandler[Any]]:
    """A handler of the user's that writes to stderr."""
    handler = OnStderr()
    handler.setFormatter(logging.Formatter("%(levelname)s|%(message)s"))
    with handling(log, handler):
        yield handler


def what_is_there() -> list[object]:
    """What is changed while lines have a prefix or a file."""
    handlers: list[Any] = [*log.handlers, logging.lastResort]
    at_the_end = dict(multiprocessing.util._finalizer_registry)  # type: ignore[attr-defined]
    return [*((each, each.formatter, list(each.filters)) for each in handlers), at_the_end]


@contextmanager
def handling(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    """A logger that has this handler, and lets everything through."""
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield
    logger.setLevel(level)
    logger.removeHandler(handler)


class Json(logging.Formatter):
    """What a user's formatter may do: one object a line, of all that is in the record."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({**vars(record), "text": record.getMessage()}, default=repr)


@pytest.mark.usefixtures("console")
def test_a_line_has_its_rank_in_front_of_its_message(capsys: Captured) -> None:
    """Whatever the handler's formatter puts around the message; before and afterwards it has not."""
    log.info("before")
    with prefixed_console(PREFIX):
        log.info("step %d of %s", 7, "9")
    log.info("after")
    assert capsys.readouterr().err == f"INFO|before\nINFO|{PREFIX}step 7 of 9\nINFO|after\n"


@pytest.mark.usefixtures("console")
def test_every_line_of_a_message_and_of_a_traceback_has_it(capsys: Captured) -> None:
    """With several ranks on one console the next line may be another rank's."""
    with prefixed_console(PREFIX):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("a\nb")
    first, *others = capsys.readouterr().err.splitlines()
    assert first == f"ERROR|{PREFIX}a"
    assert others[:2] == [f"{PREFIX}b", f"{PREFIX}Traceback (most recent call last):"]
    assert others[-2:] == [f"{PREFIX}ValueError: two", f"{PREFIX}lines"]
    assert all(line.startswith(PREFIX) for line in others)


@pytest.mark.usefixtures("console")
def test_other_handlers_get_the_record_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that collect records or write elsewhere see neither a prefix nor what a formatter of ours leaves in it."""
    stream = io.StringIO()
    elsewhere = logging.StreamHandler(stream)
    elsewhere.setFormatter(Json())
    with handling(log, elsewhere):
        log.info("step %d", 7, extra={"mine": 1})
        with prefixed_console(PREFIX), closing(RankFile(tmp_path, 1, 4)):
            log.info("step %d", 7, extra={"mine": 1})
    assert [(record.msg, record.args) for record in caplog.records] == [("step %d", (7,))] * 2
    before, within = map(json.loads, stream.getvalue().splitlines())
    assert (within["msg"], within["args"], within["text"], within["mine"]) == ("step %d", [7], "step 7", 1)
    assert within.keys() <= before.keys()


def test_structured_lines_on_the_console_stay_readable(console: logging.Handler, capsys: Captured) -> None:
    """One object a line still is one, with the rank in its text; a message that is a mapping stays as it is."""
    console.setFormatter(Json())
    with prefixed_console(PREFIX):
        log.info("step %d", 7)
        log.info({"step": 7})
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["text"] == f"{PREFIX}step 7"
    assert second["msg"] == {"step": 7}


def test_each_handler_of_the_console_has_it(capsys: Captured) -> None:
    """Those of any logger, and what logging shows where there is none; a formatter that is set meanwhile stays."""
    alone = logging.getLogger("tests.alone")
    alone.propagate = False
    handler = logging.StreamHandler(sys.stdout)
    with handling(log, handler), prefixed_console(PREFIX):
        alone.warning("nobody")
        log.info("none")
        handler.setFormatter(logging.Formatter("%(message)s!"))
    assert handler.formatter is not None
    assert handler.formatter._fmt == "%(message)s!"
    assert capsys.readouterr() == (f"{PREFIX}none\n", f"{PREFIX}nobody\n")


@pytest.mark.usefixtures("console")
def test_lines_below_the_consoles_level_are_left_out_there_alone(
    capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    """Other handlers get them."""
    with prefixed_console(PREFIX, level=logging.WARNING):
        log.info("a detail")
        log.warning("a warning")
    assert capsys.readouterr().err == f"WARNING|{PREFIX}a warning\n"
    assert caplog.messages == ["a detail", "a warning"]


def test_a_rich_handler_shows_it(capsys: Captured) -> None:
    """Also where text in brackets is markup."""
    rich_logging, rich_console = pytest.importorskip("rich.logging"), pytest.importorskip("rich.console")
    for markup in (False, True):
        on_stderr = rich_console.Console(stderr=True, width=200)
        with handling(log, rich_logging.RichHandler(console=on_stderr, markup=markup)), prefixed_console(PREFIX):
            log.info("rich")
    assert capsys.readouterr().err.count(f"{PREFIX}rich") == 2


def test_the_file_has_all_that_loggers_let_through(tmp_path: Path) -> None:
    """At once: lines that the console leaves out, and those of loggers that keep theirs from the root."""
    alone = logging.getLogger("tests.alone")
    alone.propagate = False
    file = RankFile(tmp_path / "a" / "b", 3, 12)
    with closing(file), prefixed_console(PREFIX, level=logging.ERROR), handling(log, logging.NullHandler()):
        log.debug("step %d", 7)
        alone.warning("kept")
        alone.info("not let through")
        lines = (tmp_path / "a" / "b" / "rank-03.log").read_text().splitlines()
    time = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "
    assert all(re.match(time, line) for line in lines)
    opening, *rest = (re.sub(time, "", line) for line in lines)
    assert opening.startswith("INFO lightning_ddp_ext.supervision.rank_logging: rank 3 of 12 on ")
    assert rest == ["DEBUG tests.user: step 7", "WARNING tests.alone: kept"]


def test_the_console_shows_what_it_shows_without_the_file(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logging shows warnings for which there is no handler, and the file is none of those; others are shown once."""
    monkeypatch.setattr(logging.root, "handlers", [])
    with closing(RankFile(tmp_path, 0, 2)), closing(RankFile(tmp_path, 1, 2)), handling(log, OnStderr()):
        logging.getLogger("tests.other").warning("nobody's")
        log.warning("handled")
    assert logging.root.handlers == []
    assert capsys.readouterr().err == "nobody's\nhandled\n"
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}.log").read_text().count("WARNING tests.other: nobody's") == 1


def test_the_file_is_appended_to_from_its_level_on_and_closed(tmp_path: Path) -> None:
    """A second run goes on below the first; afterwards nothing is written."""
    (tmp_path / "rank-0.log").write_text("the first run\n")
    with closing(RankFile(tmp_path, 0, 2, level=logging.WARNING, format="%(message)s")) as file:
        log.info("a detail")
        log.warning("a warning")
    assert file.stream is None
    log.warning("after")
    assert (tmp_path / "rank-0.log").read_text() == "the first run\na warning\n"


def test_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """The message names argument, rule, rank, path, reason and remedy."""
    (tmp_path / "logs").write_text("a file")
    with pytest.raises(ConfigurationError) as refused:
        RankFile(tmp_path / "logs", 3, 4)
    assert str(refused.value) == (
        f"directory must be one where each rank can write a log file (rank 3 on {socket.gethostname()} got "
        f"'{tmp_path}/logs/rank-3.log': File exists); name another one, or leave it out"
    )


def test_warnings_are_lines_once_logging_has_captured_them(tmp_path: Path, capsys: Captured) -> None:
    """They are those of the logger ``py.warnings``."""
    stderr = OnStderr()
    with warnings.catch_warnings(), handling(logging.getLogger("py.warnings"), stderr):
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        with closing(RankFile(tmp_path, 1, 4)), prefixed_console(PREFIX):
            warnings.warn("captured", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert re.match(f"{re.escape(PREFIX)}.*UserWarning: captured\n", capsys.readouterr().err)
    assert (tmp_path / "rank-1.log").read_text().count("WARNING py.warnings: ") == 1


def ends_badly(rank: int, directory: Path) -> None:
    RankFile(directory, rank, 2)
    raise ValueError("the reason")


def start_one_that_ends_badly(rank: int, world_size: int, directory: Path) -> None:
    try:
        torch.multiprocessing.start_processes(ends_badly, (directory,), nprocs=1, start_method="fork")
    except torch.multiprocessing.ProcessRaisedException:
        return
    raise AssertionError("it has not raised")


def test_the_file_of_a_started_process_gets_what_ended_it(tmp_path: Path) -> None:
    """No hook of the Trainer runs in a process that multiprocessing has started, when an exception ends it."""
    run_ranks(start_one_that_ends_badly, 1, tmp_path)
    text = (tmp_path / "rank-0.log").read_text()
    assert text.endswith("ValueError: the reason\n")
    assert text.count("Traceback") == 1
