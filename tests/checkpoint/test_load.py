"""A checkpoint is read as torch reads it, in memory of its own, and what is refused or cannot be read is explained."""

from __future__ import annotations

import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ddp_ext.checkpoint import load as module
from lightning_ddp_ext.checkpoint.load import damage_error
from lightning_ddp_ext.checkpoint.structure import names_by_record
from lightning_ddp_ext.checkpoint.zip_crc import Record, open_archive
from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError
from tests.checkpoint.content import Owner, flip, kinds, mapped, model, numbers, plain, read_alone, same, saved, unusual

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


@pytest.fixture(autouse=True)
def way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are mapped like large ones."""
    monkeypatch.setattr(module, "_SMALL_FILE", 0)


ODD = {"owner": lambda: Owner(numbers(5000)), "model": model, "storage": lambda: numbers(5000).untyped_storage()}


def describe(value: Any) -> Any:
    """An odd value as plain tensors."""
    if isinstance(value, Owner):
        return [value.tensor]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, torch.UntypedStorage | torch.storage.TypedStorage):
        return bytes(value.untyped() if isinstance(value, torch.storage.TypedStorage) else value)
    return plain(value)


@pytest.mark.parametrize("kind", list(kinds()))
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_tensor_of_each_kind(kind: str, weights_only: bool, tmp_path: Path) -> None:
    """It is what torch reads, in memory that the file has nothing to do with, and it can be written to."""
    path = tmp_path / "it.ckpt"
    archive = saved(path, {"x": kinds()[kind], "y": [numbers(5000)]})
    value = read_alone(archive, weights_only=weights_only)
    assert not mapped(path)
    path.write_bytes(b"")
    assert same(value["x"], kinds()[kind])
    if value["x"].layout == torch.strided and kind != "expanded":
        value["x"].detach().zero_()


@pytest.mark.parametrize("kind", [*ODD, *unusual()])
@pytest.mark.parametrize("map_weights", [True, False])
def test_hidden_memory_is_the_processs_own(kind: str, map_weights: bool, tmp_path: Path) -> None:
    """Inside of modules, objects, other tensors' attributes and subclasses, no tensor stays in the file."""
    path = tmp_path / "it.ckpt"
    content = {"state_dict": {}, "x": ODD[kind]() if kind in ODD else unusual()[kind]}
    archive = saved(path, content)
    expected = torch.load(path, weights_only=False)["x"]
    value = read_alone(archive, weights_only=False, map_weights=map_weights)["x"]
    assert not mapped(path)
    path.write_bytes(b"")
    assert type(value) is type(expected)
    assert same(describe(value), describe(expected))


def test_views_still_share(tmp_path: Path) -> None:
    """What shared memory when it was saved shares it when it is read, small and large."""
    for size in (10, 10_000):
        base = numbers(size)
        content = {"whole": base, "part": base[3:], "again": base}
        value = read_alone(saved(tmp_path / "it.ckpt", content))
        assert same(value, content)
        value["whole"][5] = -1
        assert value["part"][2] == -1
        assert value["again"] is value["whole"]


WEIGHTS = {"a": numbers(6000), "tied": numbers(5000), "part": numbers(9000)[100:], "small": numbers(3)}


def test_weights_stay_mapped_until_they_are_dropped(tmp_path: Path) -> None:
    """Where they are only copied into a model, they take no memory; then nothing of the file is mapped any more."""
    path = tmp_path / "it.ckpt"
    value = read_alone(saved(path, {"state_dict": WEIGHTS, "epoch": 3}), map_weights=True)
    assert mapped(path)
    assert same(value, {"state_dict": WEIGHTS, "epoch": 3})
    value.pop("state_dict")
    assert not mapped(path)


@pytest.mark.parametrize("kind", [*kinds(), "shared", "extra state", "in a weight"])
def test_everything_but_weights_has_memory_of_its_own(kind: str, tmp_path: Path) -> None:
    """Optimisers and callbacks keep what they are given: it does not stay in the file, whatever it is."""
    path, weight = tmp_path / "it.ckpt", numbers(6000)
    content: dict[str, Any] = {"state_dict": {**WEIGHTS, "weight": weight}, "kept": None}
    if kind in kinds():
        content["kept"] = [kinds()[kind]]
    elif kind == "shared":
        content["kept"] = weight[5:]
    else:
        content["state_dict"]["layer._extra_state"] = weight if kind == "extra state" else {"inner": weight}
    value = read_alone(saved(path, content), weights_only=False, map_weights=True)
    assert same(value, content)
    for name in (*WEIGHTS, "weight"):
        del value["state_dict"][name], content["state_dict"][name]
    assert not mapped(path)
    path.write_bytes(b"")
    assert same(value, content)


def test_weights_that_are_kept_elsewhere_have_memory_of_their_own(tmp_path: Path) -> None:
    """The same tensors, or all of the same state dict."""
    path = tmp_path / "it.ckpt"
    content = {"state_dict": WEIGHTS, "all": WEIGHTS, "one": WEIGHTS["a"]}
    value = read_alone(saved(path, content), map_weights=True)
    assert same(value, content)
    del value["state_dict"]
    assert not mapped(path)
    assert same(value, {"all": WEIGHTS, "one": WEIGHTS["a"]})


def test_a_plain_state_dict_is_mapped_too(tmp_path: Path) -> None:
    """A file of `torch.save(model.state_dict())` is nothing but weights."""
    path = tmp_path / "it.ckpt"
    value = read_alone(saved(path, WEIGHTS), map_weights=True)
    assert mapped(path)
    assert same(value, WEIGHTS)
    value.clear()
    assert not mapped(path)


def test_what_cannot_be_pickled_again_is_read(tmp_path: Path) -> None:
    """An object that forbids it does not keep a file from being read."""
    path = tmp_path / "it.ckpt"
    content = {"state_dict": WEIGHTS, "kept": Once()}
    value = read_alone(saved(path, content), weights_only=False, map_weights=True)
    assert not mapped(path)
    assert same(value["state_dict"], WEIGHTS)


class Once:
    """Can be pickled, and what comes of it cannot."""

    def __reduce__(self) -> Any:
        return threading.Lock, ()


def test_damage_names_the_tensors(tmp_path: Path) -> None:
    """All names of what lies in a changed record are told, and no other; with ``verify=False`` it is read."""
    path = tmp_path / "it.ckpt"
    base = numbers(5000)
    content = {
        "state_dict": {"a": base, "tied": base, "b": numbers(4)},
        "opt": [{"m": numbers(3)}],
        "s": kinds()["csr"],
    }
    archive = saved(path, content)
    flip(path, archive.tensor_data[0].offset)
    with pytest.raises(DamagedCheckpointError, match=r"damaged: state_dict.a, state_dict.tied differ from") as caught:
        read_alone(open_archive(path))
    assert caught.value.damaged == ("state_dict.a", "state_dict.tied")
    assert not torch.equal(read_alone(open_archive(path), verify=False)["state_dict"]["a"], base)
    names = list(names_by_record(archive, list(archive.tensor_data)).values())
    assert names == [["state_dict.a", "state_dict.tied"], ["state_dict.b"], ["opt.0.m"], ["s"], ["s"], ["s"]]


def test_a_record_of_nobody_goes_by_its_own_name(tmp_path: Path) -> None:
    """Damage in the skeleton is found before anything is unpickled, and named after its record."""
    path = tmp_path / "it.ckpt"
    archive = saved(path, {"x": Bomb()})
    (skeleton,) = (record for record in archive.skeleton if record.name == "data.pkl")
    flip(path, skeleton.offset + skeleton.size // 2)
    with pytest.raises(DamagedCheckpointError, match=r"damaged: data.pkl differs from what was written") as caught:
        read_alone(open_archive(path), weights_only=False)
    assert caught.value.damaged == ("data.pkl",)
    assert "damaged: a0, a1, a2, a3, a4, a5, a6, a7, a8, a9 and 2 more differ from" in str(
        damage_error(archive, [Record(f"a{index}", 0, 0, 0) for index in range(12)])
    )


exploded: list[str] = []


def explode(how: str) -> str:
    exploded.append(how)
    return how


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> Any:
        return explode, ("boom",)


@pytest.mark.parametrize("weights_only", [True, None])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_refused_class_is_named_and_not_run(legacy: bool, weights_only: bool | None, tmp_path: Path) -> None:
    """The error names it and says how to allow it; what it would have run has not been run."""
    exploded.clear()
    archive = saved(tmp_path / "it.ckpt", {"x": Bomb()}, _use_new_zipfile_serialization=not legacy)
    name = f"{__name__}.explode"
    with pytest.raises(UnsafeCheckpointError, match=f"holds {name}, which weights_only=True refuses") as caught:
        read_alone(archive, weights_only=weights_only)
    assert f"add_safe_globals([{name}])" in str(caught.value)
    assert exploded == []
    assert read_alone(archive, weights_only=False) == {"x": "boom"}
    with torch.serialization.safe_globals([explode]):
        assert read_alone(archive, weights_only=True) == {"x": "boom"}
    assert exploded == ["boom", "boom"]


class Elsewhere:
    """A class whose module will be gone."""


@pytest.mark.parametrize("how", ["no module", "no class", "broken module"])
def test_a_class_that_cannot_be_imported_is_named(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing module, a module without the class, one that fails to import: the error says what to do."""
    place = types.ModuleType("a_module_of_mine")
    place.Elsewhere = Elsewhere  # type: ignore[attr-defined]
    monkeypatch.setattr(Elsewhere, "__module__", place.__name__)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, place.__name__, place)
        archive = saved(tmp_path / "it.ckpt", {"x": Elsewhere()})
    if how == "no class":
        monkeypatch.setitem(sys.modules, place.__name__, types.ModuleType(place.__name__))
    elif how == "broken module":
        (tmp_path / "a_module_of_mine.py").write_text("raise ImportError('libfoo.so is missing')")
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CheckpointError, match="needs a class that cannot be imported here") as caught:
        read_alone(archive, weights_only=False)
    assert not isinstance(caught.value, DamagedCheckpointError)


class Raises:
    """Raises what it was given when it is unpickled."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __setstate__(self, state: Any) -> None:
        raise state["error"]


@pytest.mark.parametrize("error", [TypeError("odd"), KeyError("odd"), MemoryError(), ZeroDivisionError("odd")])
def test_whatever_unpickling_raises_is_named(error: Exception, tmp_path: Path) -> None:
    """Any error on the way is one of ours, and what it was is told."""
    archive = saved(tmp_path / "it.ckpt", Raises(error))
    with pytest.raises(DamagedCheckpointError, match=r"cannot be read: ('?odd|MemoryError)") as caught:
        read_alone(archive, weights_only=False)
    assert type(caught.value.__cause__) is type(error)
