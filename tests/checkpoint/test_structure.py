"""The structure of a file is learnt without running or importing anything of it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ddp_ext.checkpoint.structure import named_tensors, names_by_record, read_structure
from tests.checkpoint.content import Owner, kinds, model, numbers, saved


def names(path: Path, content: Any) -> list[str]:
    archive = saved(path, content)
    return [name for names in names_by_record(archive, archive.tensor_data).values() for name in names]


class Both(Owner):
    """Has an attribute beside its base's slot."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.other = numbers(5)


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
    ],
)  # fmt: skip
def test_names_are_paths(content: Any, expected: list[str], tmp_path: Path) -> None:
    """Keys, numbers and attributes lead to each tensor."""
    assert sorted(names(tmp_path / "it.ckpt", content)) == expected


def test_a_modules_tensors_have_their_usual_names(tmp_path: Path) -> None:
    """Of a whole module, a buffer that is not part of its state is named, too."""
    found = names(tmp_path / "it.ckpt", {"model": model()})
    assert set(found) == {*(f"model.{name}" for name in model().state_dict()), "model.scratch"}


def test_memory_that_is_shared_has_all_its_names(tmp_path: Path) -> None:
    """One tensor under two names, and a view of it."""
    base = numbers(9)
    assert names(tmp_path / "it.ckpt", {"a": base, "again": base, "part": base[3:]}) == ["a", "again", "part"]


class WouldRun:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.directory),)


def test_nothing_of_the_file_is_run(tmp_path: Path) -> None:
    """Objects of any class are passed over, and what lies beside them is named."""
    assert names(tmp_path / "it.ckpt", {"bad": WouldRun(tmp_path / "ran"), "good": numbers(3)}) == ["good"]
    assert not (tmp_path / "ran").exists()


def test_circles_and_repetitions_end(tmp_path: Path) -> None:
    """What contains itself, or itself twice on each of many levels, is walked in a moment."""
    circle: dict[str, Any] = {"x": numbers(1)}
    circle["again"] = [circle]
    assert names(tmp_path / "it.ckpt", circle) == ["x"]
    tower: Any = [numbers(2)]
    for _ in range(100):
        tower = [tower, tower]
    assert len(names(tmp_path / "it.ckpt", tower)) == 1


@pytest.mark.parametrize("kind", list(kinds()))
def test_types_and_shapes_are_those_of_the_tensor(kind: str, tmp_path: Path) -> None:
    """Of a dense tensor of each kind; a sparse one is several."""
    tensor = kinds()[kind]
    found = dict(named_tensors(read_structure(saved(tmp_path / "it.ckpt", {"x": tensor}))))
    if tensor.layout == torch.strided:
        facts = (f"torch.{found['x'].dtype}", found["x"].shape, found["x"].device)
        assert facts == (str(tensor.dtype), tuple(tensor.shape), tensor.device.type)


def test_a_malformed_pickle_raises(tmp_path: Path) -> None:
    """And whoever asks decides what that means."""
    archive = saved(tmp_path / "it.ckpt", {"a": numbers(3)})
    content = bytearray(Path(archive.path).read_bytes())
    (record,) = (record for record in archive.skeleton if record.name == "data.pkl")
    content[record.offset + record.size - 5 : record.offset + record.size] = b"qqqqq"
    Path(archive.path).write_bytes(content)
    with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, IndexError)):
        read_structure(archive)
    assert names_by_record(archive, archive.tensor_data) == {"data/0": []}
