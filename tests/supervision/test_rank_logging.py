"""Log lines that say their rank, and a file per rank, in one process: what is there before is there afterwards."""

from __future__ import annotations

import io
import json
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing
from rich.console import Console
from rich.logging import RichHandler

from lightning_ddp_ext.supervision.rank_logging import RankFile, prefixed_console
from tests.harness.ranks import run_ranks

PREFIX = f"[rank 1/4 {socket.gethostname()}] "

log = logging.getLogger("tests.user")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def as_it_was(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test leaves handlers, formatters and filters as they were."""
    monkeypatch.setattr(logging.root, "handlers", [caplog.handler])  # none that an import has left on a closed stream
    before = what_is_there()
    yield
    assert what_is_there() == before


def what_is_there() -> list[object]:
    handlers: list[Any] = [*log.handlers, logging.lastResort]
    return [(each, each.formatter, list(each.filters)) for each in handlers]


@contextmanager
def handling(logger: logging.Logger, handler: logging.Handler, format: str | None = None) -> Iterator[None]:
    """A logger that has this handler, and lets everything through."""
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    if format is not None:
        handler.setFormatter(logging.Formatter(format))
    yield
    logger.setLevel(level)
    logger.removeHandler(handler)


class Json(logging.Formatter):
    """What a user's formatter may do: one object a line, of all that is in the record."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({**vars(record), "text": record.getMessage()}, default=repr)


def test_every_line_of_a_message_and_of_a_traceback_has_its_rank(capsys: Captured) -> None:
    """In front of the message, whatever the formatter puts around it; before and afterwards lines have none."""
    with handling(log, logging.StreamHandler(sys.stderr), "%(levelname)s|%(message)s"):
        log.info("before")
        with prefixed_console(PREFIX):
            try:
                raise ValueError("two\nlines")
            except ValueError:
                log.exception("%s\nb", "a")
        log.info("after")
    before, first, *others, after = capsys.readouterr().err.splitlines()
    assert (before, first, after) == ("INFO|before", f"ERROR|{PREFIX}a", "INFO|after")
    assert others[:2] == [f"{PREFIX}b", f"{PREFIX}Traceback (most recent call last):"]
    assert others[-2:] == [f"{PREFIX}ValueError: two", f"{PREFIX}lines"]
    assert all(line.startswith(PREFIX) for line in others)


def test_other_handlers_get_every_record_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that collect records or write elsewhere see neither a prefix nor what a formatter of ours leaves in it."""
    stream = io.StringIO()
    elsewhere = logging.StreamHandler(stream)
    elsewhere.setFormatter(Json())
    with handling(log, logging.StreamHandler(sys.stderr)), handling(log, elsewhere):
        log.info("step %d", 7, extra={"mine": 1})
        with prefixed_console(PREFIX, level=logging.WARNING), closing(RankFile(tmp_path, 1, 4)):
            log.info("step %d", 7, extra={"mine": 1})
    assert [(record.msg, record.args) for record in caplog.records] == [("step %d", (7,))] * 2
    before, within = map(json.loads, stream.getvalue().splitlines())
    assert (within["msg"], within["args"], within["text"], within["mine"]) == ("step %d", [7], "step 7", 1)
    assert within.keys() <= before.keys()


def test_each_handler_of_the_console_has_it(capsys: Captured) -> None:
    """Those of any logger, structured and rich ones, and what logging shows where there is none."""
    unhandled = logging.getLogger("tests.unhandled")
    unhandled.propagate = False
    structured, theirs = logging.StreamHandler(sys.stdout), logging.Formatter("%(message)s!")
    structured.setFormatter(Json())
    rich = [RichHandler(console=Console(stderr=True, width=200), markup=markup) for markup in (False, True)]
    with handling(log, structured), handling(log, rich[0]), handling(log, rich[1]), prefixed_console(PREFIX):
        log.info("step %d", 7)
        unhandled.warning("by none")
        log.info({"step": 7})
        structured.setFormatter(theirs)
    assert structured.formatter is theirs, "what is set meanwhile stays"
    out, err = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert (first["text"], second["msg"]) == (f"{PREFIX}step 7", {"step": 7})
    assert err.count(f"{PREFIX}step 7") == 2
    assert f"{PREFIX}by none\n" in err


def test_the_file_has_all_that_loggers_let_through(tmp_path: Path) -> None:
    """At once, below what was there: lines that the console leaves out, and those of loggers that do not propagate."""
    alone, path = logging.getLogger("tests.alone"), tmp_path / "rank-03.log"
    alone.propagate = False
    path.write_text("the run before\n")
    with closing(RankFile(tmp_path, 3, 12, format="%(message)s")), prefixed_console(PREFIX, level=logging.ERROR):
        with handling(log, logging.NullHandler()):
            log.debug("step %d", 7)
        alone.warning("kept")
        alone.info("not let through")
        before, _, *lines = path.read_text().splitlines()
    alone.warning("after")
    assert [before, *lines] == ["the run before", "step 7", "kept"]
    assert "after" not in path.read_text()


def test_the_level_of_the_file_can_be_chosen(tmp_path: Path) -> None:
    """Then the file does not open with a line about the rank."""
    with closing(RankFile(tmp_path, 0, 2, level=logging.WARNING, format="%(message)s")):
        log.info("a detail")
        log.warning("a warning")
    assert (tmp_path / "rank-0.log").read_text() == "a warning\n"


def test_the_console_shows_what_it_shows_without_the_file(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logging shows warnings for which there is no handler, and the file is none of those; others are shown once."""
    monkeypatch.setattr(logging.root, "handlers", [])
    stderr = logging.StreamHandler(sys.stderr)
    with closing(RankFile(tmp_path, 0, 2)), closing(RankFile(tmp_path, 1, 2)), handling(log, stderr):
        logging.getLogger("tests.other").warning("unhandled")
        log.warning("handled")
    assert logging.root.handlers == []
    assert capsys.readouterr().err == "unhandled\nhandled\n"
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}.log").read_text().count("WARNING tests.other: unhandled") == 1


def ends_badly(rank: int, directory: Path) -> None:
    RankFile(directory, rank, 2)
    raise ValueError("the reason")


def start_one_that_ends_badly(rank: int, world_size: int, directory: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException):
        torch.multiprocessing.start_processes(ends_badly, (directory,), nprocs=1, start_method="fork")


def test_the_file_of_a_started_process_gets_what_ended_it(tmp_path: Path) -> None:
    """No hook of the Trainer runs in a process that multiprocessing has started, when an exception ends it."""
    run_ranks(start_one_that_ends_badly, 1, tmp_path)
    text = (tmp_path / "rank-0.log").read_text()
    assert text.endswith("ValueError: the reason\n")
    assert text.count("Traceback") == 1
