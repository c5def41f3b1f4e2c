"""A store in a file works whatever an earlier run has left there, and the file goes when nobody needs it any more."""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import itertools
import logging
import os
import struct
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.errors import StoreError
from lightning_ddp_ext.rendezvous import file_store as module
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.file_store import open_file, remove_file, settle_in
from tests.ranks import run_ranks


def close_all(path: Path) -> None:
    """Close what stores leave open until their process ends."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(int(name))):
                os.close(int(name))


def record(key: bytes, value: bytes) -> bytes:
    """A record as torch writes it."""
    return struct.pack("<I", len(key)) + key + struct.pack("<I", len(value)) + value


def test_a_new_file_is_made(tmp_path: Path) -> None:
    """All ranks that open one path share what they set."""
    path = str(tmp_path / "store")
    first, second = open_file(path, Deadline(5.0)), open_file(path, Deadline(5.0))
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    """A file that another rank, or ``mktemp``, has made a moment ago is taken."""
    path = tmp_path / "store"
    path.touch()
    open_file(str(path), Deadline(5.0)).set("key", "value")
    assert path.stat().st_size > 0


@pytest.mark.parametrize(
    "content",
    [b"learning_rate: 0.1\n", b"\0" * 64, os.urandom(64), b"PK\x03\x04", b"x", b"\t\0\0\0refcount?\x01"],
    ids=["text", "zeros", "random", "zip", "short", "nearly"],
)
def test_a_file_with_something_else_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    """The message shows the path, how the file begins, and the remedy; not a byte of it is changed."""
    path = tmp_path / "precious"
    path.write_bytes(content)
    with pytest.raises(StoreError) as refused:
        open_file(str(path), Deadline(5.0))
    assert str(refused.value) == (
        f"init_method 'file://{path}': the file holds something else than a store (it begins with {content[:13]!r}); "
        "name a file that does not exist yet"
    )
    assert path.read_bytes() == content


def test_a_locked_file_ends_in_a_clear_error(tmp_path: Path) -> None:
    """Another process that keeps the file locked is named as the reason, within the deadline."""
    path = tmp_path / "store"
    with path.open("wb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StoreError) as refused:
            open_file(str(path), Deadline(0.3))
    assert str(refused.value) == (
        f"init_method 'file://{path}': another process has kept the file locked for 0.3 s; end it or choose another "
        "file"
    )


def test_a_file_that_is_locked_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """Other ranks lock the file while they write."""
    path = tmp_path / "store"
    with path.open("wb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        opening = threading.Thread(target=lambda: open_file(str(path), Deadline(20.0)))
        opening.start()
        opening.join(0.05)
        assert opening.is_alive()
    opening.join()
    assert path.stat().st_size > 0


def heal_anywhere(rank: int, world_size: int, path: Path) -> None:
    """Cut a file off at each of its bytes and open it; a store that reads for ever is ended with this process."""
    messages: list[str] = []
    logger = logging.getLogger(module.__name__)
    logger.addFilter(lambda logged: messages.append(logged.getMessage()) or False)

    @settings(max_examples=5, deadline=None, database=None)
    @given(st.dictionaries(st.text(max_size=3), st.binary(max_size=9), min_size=1, max_size=3))
    def heal(values: dict[str, bytes]) -> None:
        pieces = [record(b"refcount/", b"1"), *(record(b"/" + key.encode(), value) for key, value in values.items())]
        content = b"".join(pieces)
        ends = list(itertools.accumulate(map(len, pieces), initial=0))
        for length in range(len(content) + 1):
            path.write_bytes(content[:length])
            messages.clear()
            store = open_file(str(path), Deadline(5.0))
            count = bisect.bisect(ends, length) - 1
            cut = length - ends[count]
            assert messages == [f"{path}: cut {cut} bytes of an unfinished record that a killed run left"] * (cut > 0)
            assert path.read_bytes().startswith(content[: ends[count]])
            assert all(store.get(key) == value for key, value in list(values.items())[: max(0, count - 1)])
            store.set("after", "1")
            assert store.get("after") == b"1"
            del store  # its end writes to the file
            close_all(path)

    heal()


def test_a_file_cut_off_anywhere_is_healed(tmp_path: Path) -> None:
    """Whatever the length at which a kill has cut the file, whole records stay and the store works."""
    run_ranks(heal_anywhere, 1, tmp_path / "store")


def test_the_last_rank_deletes_the_file(tmp_path: Path) -> None:
    """A file in which nobody has arrived since the run was complete is deleted, once."""
    path = tmp_path / "store"
    settle_in(open_file(str(path), Deadline(5.0)), "run 1")
    remove_file(str(path), "run 1", Deadline(5.0))
    assert not path.exists()
    remove_file(str(path), "run 1", Deadline(5.0))


def test_a_file_to_which_the_next_run_has_come_is_kept(tmp_path: Path) -> None:
    """A process that has opened the file since the run was complete keeps it, even if it has done nothing more."""
    path = tmp_path / "store"
    settle_in(open_file(str(path), Deadline(5.0)), "run 1")
    coming = open_file(str(path), Deadline(5.0))
    remove_file(str(path), "run 1", Deadline(5.0))
    assert path.exists()
    settle_in(coming, "run 2")
    remove_file(str(path), "run 1", Deadline(5.0))
    assert path.exists()


def test_a_file_that_is_deleted_while_it_is_opened_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens a file that the last rank of a run deletes at the same moment gets the one that comes after it."""
    path = str(tmp_path / "store")
    settle_in(open_file(path, Deadline(5.0)), "run 1")
    cut = module._cut_torn_tail

    def deleted_then(descriptor: int, name: str) -> None:
        cut(descriptor, name)
        if not deleted:
            deleted.append(True)
            os.unlink(path)

    deleted: list[bool] = []
    monkeypatch.setattr(module, "_cut_torn_tail", deleted_then)
    open_file(path, Deadline(5.0)).set("key", "value")
    monkeypatch.undo()
    assert open_file(path, Deadline(5.0)).get("key") == b"value"


def lose_the_file(rank: int, world_size: int, path: Path, other: bytes) -> bytes:
    """Use a store, and end it, after something else has taken the place of its file; what a store with it reads."""
    store = open_file(str(path), Deadline(5.0))
    store.set("mine", "x" * 20)
    path.unlink()
    path.write_bytes(other)
    store.set("mine", "y")
    value: bytes = store.get("mine")
    del store
    return value


def test_a_store_stays_with_its_own_file(tmp_path: Path) -> None:
    """A store whose file is gone neither touches nor reads another one that takes its place, not even at its end."""
    path, other = tmp_path / "store", b"another run's file, which is longer than the first" * 9
    assert run_ranks(lose_the_file, 1, path, other) == [b"y"]
    assert path.read_bytes() == other


def test_without_proc_a_store_goes_by_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a system that does not name a process's open files, stores work as they do in plain torch."""
    monkeypatch.setattr(os.path, "exists", lambda name: False)
    path = str(tmp_path / "store")
    open_file(path, Deadline(5.0)).set("key", "value")
    assert open_file(path, Deadline(5.0)).get("key") == b"value"
