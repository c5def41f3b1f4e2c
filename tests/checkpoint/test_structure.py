"""The structure of a file is learnt without running or importing anything of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ddp_ext.checkpoint.structure import named_tensors, names_by_record, read_structure
from tests.checkpoint.content import Owner, kinds, numbers, saved


def names(path: Path, content: Any) -> list[str]:
    archive = saved(path, content)
    return [name for names in names_by_record(archive, archive.tensor_data).values() for name in names]


class Both(Owner):
    """Has an attribute beside its base's slot."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.other = numbers(5)


class WouldRun:
    """Makes a directory when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def circle() -> dict[str, Any]:
    content: dict[str, Any] = {"x": numbers(1)}
    content["again"] = [content]
    return content


def tower() -> Any:
    content: Any = [numbers(2)]
    for _ in range(100):
        content = [content, content]
    return {"x": numbers(1), "tower": content}


def shared() -> dict[str, Any]:
    base = numbers(9)
    parameter = nn.Parameter(numbers(2))
    return {"a": base, "again": base, "part": base[3:], "p": parameter, "q": parameter}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (numbers(1), []),
        ({"a": numbers(1), "b": {3: [numbers(1), "x", (numbers(1),)]}}, ["a", "b.3.0", "b.3.2.0"]),
        ([Owner(numbers(1)), nn.Parameter(numbers(1))], ["0.tensor", "1"]),
        ([Both(numbers(1))], ["0.other", "0.tensor"]),
        ({"s": numbers(3, 3).to_sparse()}, ["s", "s"]),
        ({"set": {1, 2}, "bytes": b"x", "none": None}, []),
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


def test_repetitions_end(tmp_path: Path) -> None:
    """What contains itself twice on each of many levels is walked in a moment."""
    assert len(names(tmp_path / "it.ckpt", tower())) == 2


@pytest.mark.parametrize("kind", [kind for kind, tensor in kinds().items() if tensor.layout == torch.strided])
def test_types_and_shapes_are_those_of_the_tensor(kind: str, tmp_path: Path) -> None:
    """Of a dense tensor of each kind that has memory."""
    tensor = kinds()[kind]
    found = dict(named_tensors(read_structure(saved(tmp_path / "it.ckpt", {"x": tensor}))))
    if kind != "meta":
        assert (f"torch.{found['x'].dtype}", found["x"].shape) == (str(tensor.dtype), tuple(tensor.shape))


def test_a_malformed_pickle_has_no_names(tmp_path: Path) -> None:
    """Where nothing can be learnt, a record goes by its own name."""
    archive = saved(tmp_path / "it.ckpt", {"a": numbers(3)})
    content = bytearray(Path(archive.path).read_bytes())
    (record,) = (record for record in archive.skeleton if record.name == "data.pkl")
    content[record.offset + record.size - 5 : record.offset + record.size] = b"qqqqq"
    Path(archive.path).write_bytes(content)
    assert names_by_record(archive, archive.tensor_data) == {"data/0": []}
