"""The structure of a file is learnt without running or importing anything of it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ddp_ext.checkpoint.structure import Structure
from tests.checkpoint.content import Owner, kinds, model, numbers, saved


def names(path: Path, content: Any) -> list[str]:
    archive = saved(path, content)
    return [name for names in Structure(archive).names_of(archive.tensor_data).values() for name in names]


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
def test_only_memory_of_plain_weights_alone_may_stay_mapped(kind: str, tmp_path: Path) -> None:
    """Whatever else a record is for, one that only weights refer to is told from it."""
    shared = numbers(7)
    content = {
        "state_dict": {"a": numbers(5), "shared": shared, "b": numbers(6), "x._extra_state": numbers(4)},
        "other": [shared[2:], kinds()[kind]],
    }
    structure = Structure(saved(tmp_path / "it.ckpt", content))
    keys = dict(zip(["a", "shared", "b", "extra"], structure.order, strict=False))
    assert structure.weights() == {keys["a"], keys["b"]}


def test_the_order_is_that_of_torch(tmp_path: Path) -> None:
    """Keys come in the order in which `torch.load` asks for memory, empty ones as often as it asks."""
    base, empty = numbers(4), torch.empty(0)
    archive = saved(tmp_path / "it.ckpt", [base, empty, numbers(5), base[1:], empty[:0], numbers(6), empty])
    seen: list[int] = []

    def noted(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        seen.append(storage.nbytes())
        return storage.clone()

    torch.load(archive.path, mmap=True, map_location=noted)
    sizes = {record.name: record.size for record in archive.tensor_data}
    assert [sizes[f"data/{key}"] for key in Structure(archive).order] == seen


def test_a_malformed_pickle_raises(tmp_path: Path) -> None:
    """And whoever asks decides what that means."""
    archive = saved(tmp_path / "it.ckpt", {"a": numbers(3)})
    content = bytearray(Path(archive.path).read_bytes())
    (record,) = (record for record in archive.skeleton if record.name == "data.pkl")
    content[record.offset + record.size - 5 : record.offset + record.size] = b"qqqqq"
    Path(archive.path).write_bytes(content)
    with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, IndexError)):
        Structure(archive)
