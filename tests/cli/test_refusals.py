"""What the `checkpoint` commands cannot work on is told in one sentence."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import checkpoint, save
from tests.harness.damage import flip


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes/today.txt", "nothing")


def from_before_torch_1_6(path: Path) -> None:
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)


def too_deep(path: Path) -> None:
    content: list[Any] = []
    for _ in range(1200):
        content = [content]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10 * limit)
    try:
        torch.save(content, path)
    finally:
        sys.setrecursionlimit(limit)


def whole(path: Path) -> None:
    """Leave the file as it is."""


@pytest.mark.parametrize(
    ("command", "spoil", "spelling", "says"),
    [
        ("verify", lambda path: os.truncate(path, 9000), "it.ckpt", "was probably cut off"),
        ("verify", archive, "it.ckpt", "is not a checkpoint: it is a zip archive without data.pkl"),
        ("verify", os.unlink, "it.ckpt", "it.ckpt does not exist"),
        ("verify", whole, "nosuch://bucket/it.ckpt", "'nosuch://bucket/it.ckpt' needs a file system that is not there"),
        ("inspect", from_before_torch_1_6, "it.ckpt", "load it with torch.load, and save it again"),
        (
            "inspect",
            lambda path: flip(path, "data.pkl"),
            "it.ckpt",
            "is damaged: data.pkl differs from what was written",
        ),
        ("inspect", too_deep, "it.ckpt", "it.ckpt cannot be listed: maximum recursion depth exceeded"),
        ("inspect", whole, "memory://bucket/no.ckpt", "memory://bucket/no.ckpt does not exist"),
        ("clean", whole, "missing", "directory missing does not exist"),
        ("clean", whole, "it.ckpt", "it.ckpt is not a directory; give the directory in which checkpoints are saved"),
        ("clean", whole, "memory://bucket", "memory://bucket is a URL, and only local directories have such files"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_sentence(
    command: str,
    spoil: Callable[[Path], object],
    spelling: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Status 1, one sentence on stderr, and the same sentence in JSON."""
    monkeypatch.chdir(tmp_path)
    spoil(save(tmp_path / "it.ckpt"))
    ended = checkpoint(command, spelling)
    assert (ended.status, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert says in ended.stderr
    assert says in checkpoint(command, "--json", spelling).document["error"]
