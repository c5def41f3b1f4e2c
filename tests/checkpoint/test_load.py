"""A checkpoint is read as torch reads it, into memory of its own; what is refused or cannot be read is explained."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext.checkpoint.load import Mode
from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from tests.checkpoint.content import MAPPED, different, flip, kinds, mapped, numbers, restored, same, saved, unusual

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


@pytest.mark.parametrize("mode", ["map", "broadcast"])
def test_all_but_weights_is_read_into_memory_of_the_process(mode: Mode, tmp_path: Path) -> None:
    """Tensors of every kind, also within modules, objects and other tensors, are torch's and outlive the file."""
    path = tmp_path / "it.ckpt"
    content = {"state_dict": {"weight": numbers(MAPPED)}, **kinds(), **unusual()}
    torch.save(content, path)
    expected = torch.load(path, weights_only=False)
    value = restored(path, mode, weights_only=False, map_weights=True)
    assert same(value.pop("state_dict"), expected.pop("state_dict"))
    assert not mapped(path)
    os.truncate(path, 0)
    assert different(value, expected) == []


def test_weights_stay_in_the_file_until_they_are_dropped(tmp_path: Path) -> None:
    """What is only copied into a model takes no memory; what is kept elsewhere, or as extra state, has its own."""
    path, weight = tmp_path / "it.ckpt", numbers(MAPPED)
    weights = {"a": weight, "part": weight[100:], "small": numbers(3)}
    extra = {"one._extra_state": weight[:5000], "other._extra_state": {"inner": weight[:5000]}}
    content = {"state_dict": {**weights, **extra}, "kept": weight[5:]}
    saved(path, content)
    value = restored(path, map_weights=True)
    assert mapped(path)
    assert same(value, content)
    for name in weights:
        del value["state_dict"][name], content["state_dict"][name]
    assert not mapped(path)
    os.truncate(path, 0)
    assert same(value, content)


def test_a_plain_state_dict_is_mapped_too(tmp_path: Path) -> None:
    """A file of `torch.save(model.state_dict())` is nothing but weights."""
    path, weights = tmp_path / "it.ckpt", {"a": numbers(MAPPED), "b": numbers(3)}
    saved(path, weights)
    value = restored(path, map_weights=True)
    assert mapped(path)
    assert same(value, weights)
    value.clear()
    assert not mapped(path)


class Once:
    """Can be pickled, and what comes of it cannot."""

    def __reduce__(self) -> Any:
        return threading.Lock, ()


def test_what_cannot_be_pickled_again_is_read_where_it_is_seen(tmp_path: Path) -> None:
    """An object that forbids it keeps a file from being mapped, and from being sent."""
    path, weights = tmp_path / "it.ckpt", {"a": numbers(MAPPED)}
    saved(path, {"state_dict": weights, "kept": Once()})
    value = restored(path, weights_only=False, map_weights=True)
    assert not mapped(path)
    assert same(value["state_dict"], weights)
    with pytest.raises(CheckpointError, match=r"cannot be sent to other ranks: TypeError: .*; put it where every rank"):
        restored(path, "broadcast", weights_only=False)


@pytest.mark.parametrize("size", [10, 10_000])
def test_views_still_share(size: int, tmp_path: Path) -> None:
    """What shared memory when it was saved shares it when it is read."""
    base = numbers(size)
    content = {"whole": base, "part": base[3:], "again": base}
    saved(tmp_path / "it.ckpt", content)
    value = restored(tmp_path / "it.ckpt")
    assert same(value, content)
    value["whole"][5] = -1
    assert value["part"][2] == -1
    assert value["again"] is value["whole"]


def test_damage_names_the_tensors(tmp_path: Path) -> None:
    """All names of what lies in changed records are known, ten are told; with ``verify=False`` it is read."""
    path, base = tmp_path / "it.ckpt", numbers(50)
    archive = saved(path, {"state_dict": {"a": base, "tied": base}, "whole": numbers(2), "t": [numbers(3)] * 10})
    for record in archive.tensor_data:
        if record.size != 8:
            flip(path, record.offset)
    with pytest.raises(
        DamagedCheckpointError, match=r"damaged: state_dict.a, state_dict.tied, t.0, .* and 2 more"
    ) as it:
        restored(path)
    assert it.value.damaged == ("state_dict.a", "state_dict.tied", *(f"t.{number}" for number in range(10)))
    assert not torch.equal(restored(path, verify=False)["state_dict"]["a"], base)


exploded: list[str] = []


def explode(how: str) -> str:
    exploded.append(how)
    return how


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> Any:
        return explode, ("boom",)


def test_damage_outside_of_tensors_goes_by_its_record(tmp_path: Path) -> None:
    """It is found before anything is unpickled."""
    exploded.clear()
    path = tmp_path / "it.ckpt"
    (pickled,) = (record for record in saved(path, {"x": Bomb()}).skeleton if record.name == "data.pkl")
    flip(path, pickled.offset + pickled.size // 2)
    with pytest.raises(DamagedCheckpointError, match=r"damaged: data.pkl differs from what was written") as caught:
        restored(path, weights_only=False)
    assert caught.value.damaged == ("data.pkl",)
    assert exploded == []


@pytest.mark.parametrize(("weights_only", "legacy"), [(True, False), (None, True)])
def test_a_refused_class_is_named_and_not_run(legacy: bool, weights_only: bool | None, tmp_path: Path) -> None:
    """The error names it and says how to allow it; what it would have run has not been run."""
    exploded.clear()
    path = tmp_path / "it.ckpt"
    saved(path, {"x": Bomb()}, _use_new_zipfile_serialization=not legacy)
    name = f"{__name__}.explode"
    with pytest.raises(UnsafeCheckpointError, match=f"holds {name}, which weights_only=True refuses") as caught:
        restored(path, weights_only=weights_only)
    assert f"add_safe_globals([{name}])" in str(caught.value)
    assert exploded == []
    with torch.serialization.safe_globals([explode]):
        assert restored(path, weights_only=True) == {"x": "boom"}
    assert restored(path, weights_only=False) == {"x": "boom"}
