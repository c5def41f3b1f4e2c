"""`checkpoint clean` finds what killed saves have left, and removes it on request."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lightning_ddp_ext.checkpoint.atomic_file import atomic_write
from tests.cli.command import checkpoint


@pytest.fixture
def leftover(tmp_path: Path) -> Path:
    """What a save that was killed has left in ``tmp_path``."""
    path = tmp_path / ".ddpx-0123456789abcdef.partial"
    path.write_bytes(bytes(2048))
    return path


def test_leftovers_are_listed_and_removed_on_request(leftover: Path) -> None:
    """Path, size and age; other files stay, whatever they are called, and no link is followed."""
    names = (".ddpx-ab12.link", ".ddpx-aaaaaaaaaaaaaaaa.partial", ".ddpx-bbbbbbbbbbbbbbbb.partial")
    link, trap, directory = map(leftover.with_name, names)
    others = [leftover.with_name(name) for name in ("it.ckpt", ".ddpx-notes.partial", f"{leftover.name}.ckpt")]
    directory.mkdir()
    for other in others:
        other.touch()
    for each in (link, trap):
        each.symlink_to("it.ckpt")
    two_hours_ago = time.time() - 7200
    for path in leftover.parent.iterdir():
        os.utime(path, (two_hours_ago, two_hours_ago), follow_symlinks=False)
    ended = checkpoint("clean", leftover.parent)
    assert (ended.status, ended.stderr) == (0, "")
    assert ended.row(str(leftover))[1] == "2.0 KiB"
    assert "run this again with --yes" in ended.stdout
    document = checkpoint("clean", "--json", leftover.parent).document
    found, other = document["leftovers"]
    assert (document["removed"], found["path"], found["size"]) == (False, str(leftover), 2048)
    assert other["path"] == str(link)
    assert 7200 <= found["age"] < 7300
    assert leftover.exists()
    ended = checkpoint("clean", leftover.parent, "--yes")
    assert ended.status == 0
    assert str(leftover) in ended.stdout
    assert "removed 2 files, 2.0 KiB" in ended.stdout
    assert sorted(leftover.parent.iterdir()) == sorted([directory, trap, *others])


def test_what_is_younger_than_an_hour_stays(leftover: Path) -> None:
    """Another host may be writing it, and that is said."""
    ended = checkpoint("clean", leftover.parent, "--yes")
    assert ended.status == 0
    assert "left alone: 1 file younger than an hour, which another host may be writing" in ended.stdout
    assert leftover.exists()
    [found] = checkpoint("clean", "--json", "--yes", leftover.parent).document["leftovers"]
    assert not found["removed"]


def test_what_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """A save goes on, and its file is there in the end."""
    with atomic_write(tmp_path / "it.ckpt"):
        ended = checkpoint("clean", tmp_path, "--yes")
        assert (ended.status, ended.stdout) == (0, f"nothing to clean in {tmp_path}: no save was killed there\n")
    assert (tmp_path / "it.ckpt").exists()
