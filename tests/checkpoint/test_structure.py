"""The structure of a file is learnt without running or importing anything of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_ddp_ext.checkpoint.structure import names_by_record
from tests.checkpoint.content import Owner, flip, numbers, saved


def names(path: Path, content: Any) -> list[str]:
    archive = saved(path, content)
    return [name for names in names_by_record(archive, archive.tensor_data).values() for name in names]


class WouldRun:
    """Makes a directory when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def circle() -> dict[str, Any]:
    content: dict[str, Any] = {"x": numbers(1)}
    content["again"] = [content]
    return content


def shared() -> dict[str, Any]:
    base = numbers(9)
    parameter = nn.Parameter(numbers(2))
    return {"a": base, "again": base, "part": base[3:], "p": parameter, "q": parameter}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"a": numbers(1), "b": {3: [numbers(1), "x", (numbers(1),)]}}, ["a", "b.3.0", "b.3.2.0"]),
        ([Owner(numbers(1)), nn.Parameter(numbers(1))], ["0.tensor", "1"]),
        ({"s": numbers(3, 3).to_sparse()}, ["s", "s"]),
        ({"storage": numbers(3).untyped_storage()}, ["storage"]),
        ({"model": nn.Linear(2, 2)}, ["model._parameters.bias", "model._parameters.weight"]),
        ({"bad": WouldRun(), "good": numbers(3)}, ["good"]),
        (circle(), ["x"]),
        (shared(), ["a", "again", "p", "part", "q"]),
    ],
)  # fmt: skip
def test_names_are_paths(content: Any, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, numbers and attributes lead to each tensor, and nothing of the file is run."""
    monkeypatch.chdir(tmp_path)
    assert sorted(names(tmp_path / "it.ckpt", content)) == expected
    assert not Path("ran").exists()


def test_a_malformed_pickle_has_no_names(tmp_path: Path) -> None:
    """Where nothing can be learnt, a record goes by its own name."""
    path = tmp_path / "it.ckpt"
    archive = saved(path, {"a": numbers(3)})
    (record,) = (record for record in archive.skeleton if record.name == "data.pkl")
    flip(path, record.offset + record.size - 1)
    assert names_by_record(archive, archive.tensor_data) == {"data/0": []}
