"""Records outlive the rank that wrote them."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext.checkpoint import rank_records
from lightning_ddp_ext.checkpoint.rank_records import Kind, RankRecords, open_records
from lightning_ddp_ext.ranks import Ranks


@pytest.fixture
def records() -> RankRecords:
    """Return the records of eight batches, of which each kind keeps the last four."""
    records = open_records(Ranks())[0]
    for batches in range(8):
        records.write(Kind.BUFFERS, batches, b"older")
        records.write(Kind.WINDOW, batches, b"other")
    return records


def found(records: RankRecords) -> dict[int, bytes | None]:
    """Return the recorded buffers by their number of batches."""
    return {batches: records.find(batches, Kind.BUFFERS) for batches in range(3, 9)}


def test_the_newest_records_are_found(records: RankRecords) -> None:
    """A record overwrites the oldest one of its kind."""
    records.write(Kind.BUFFERS, 8, b"newer")
    older = dict.fromkeys((5, 6, 7), b"older")
    assert found(records) == {3: None, 4: None, **older, 8: b"newer"}


@pytest.mark.parametrize(
    "written",
    [1, 8, 20, 24, 28, 29],
    ids=[
        "in the number",
        "after the number",
        "in the header",
        "after the header",
        "in the content",
        "before the trailer",
    ],
)
def test_a_record_that_was_cut_short_is_not_found(
    written: int, records: RankRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves the beginning of the new record and the end of the old one."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:written], at))
    with pytest.raises(OSError, match="No space left on device"):
        records.write(Kind.BUFFERS, 8, b"newer")
    older = dict.fromkeys((5, 6, 7), b"older")
    assert found(records) == {3: None, 4: None, **older, 8: None}


def test_a_full_disk_is_an_error(disk: Path) -> None:
    """The error is raised by the write that finds no space."""
    on_disk = RankRecords(os.open(disk / "records", os.O_RDWR | os.O_CREAT))
    with pytest.raises(OSError, match="No space left on device"):
        on_disk.write(Kind.BUFFERS, 1, bytes(5 << 20))
    on_disk.close()


def test_files_have_no_name_and_are_in_shared_memory_or_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If neither exists, the error has the system's reason."""
    monkeypatch.setattr(rank_records, "_MEMORY", str(tmp_path / "missing"))  # as in a chroot
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_records(Ranks())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(OSError, match="No such file"):
        open_records(Ranks())


@dataclass(frozen=True)
class Interrupted(Ranks):
    """A rank that exchanges some values with the others before one of them dies."""

    answers: Iterator[bool] = field(kw_only=True)

    def gather(self, value: Any) -> list[Any]:
        if next(self.answers, False):
            return [value]
        raise ZeroDivisionError


@pytest.mark.parametrize("exchanges", [0, 1, 2])
def test_no_file_is_left_if_another_rank_dies_meanwhile(
    exchanges: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is removed and closed although an exchange with the other ranks raises."""
    monkeypatch.setattr(rank_records, "_MEMORY", str(tmp_path))
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(ZeroDivisionError):
        open_records(Interrupted(answers=repeat(True, exchanges)))
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(open_before)
