"""Every rank gets the checkpoint, however it sees the file, or every rank raises the same error."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import Tensor

from lightning_ddp_ext.checkpoint import collectives
from lightning_ddp_ext.checkpoint import restore as module
from lightning_ddp_ext.checkpoint.collectives import Ranks
from lightning_ddp_ext.checkpoint.load import LoadOptions, Mode
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.restore import restore
from lightning_ddp_ext.checkpoint.save import write
from lightning_ddp_ext.checkpoint.zip_crc import open_archive
from tests.checkpoint.content import as_bytes, flip, from_bytes, kinds, mapped, numbers, same, saved
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group

MODES: tuple[Mode, ...] = ("auto", "map", "broadcast")
SENT = "sent from rank 0 to all (rank 1 on host "


@dataclass
class Case:
    """One restore: the paths by rank (the last one is that of all other ranks, too), and how."""

    paths: list[Path | str]
    mode: Mode = "auto"
    options: dict[str, Any] = field(default_factory=dict)


def restored(rank: int, world_size: int, directory: Path, cases: list[Case]) -> list[Any]:
    """What a rank gets in each case: how, and the content as bytes; or the error's type and text."""
    with stock_group(rank, world_size, directory):
        return [outcome(Ranks(rank, world_size), case) for case in cases]


def outcome(ranks: Ranks, case: Case) -> tuple[str, str | bytes]:
    path = case.paths[min(ranks.rank, len(case.paths) - 1)]
    if isinstance(path, Path) and path.is_dir():
        os.chdir(path)
        path = "it.ckpt"
    place = locate(path)
    try:
        content, how, _ = restore(place, ranks, LoadOptions(case.mode, **case.options))
    except Exception as error:
        assert ranks.gather(ranks.rank) == list(range(ranks.world_size)), "all are still in step"
        return type(error).__name__, str(error)
    gc.collect()  # of earlier cases, an error and its frames may still have it
    assert place.local is None or not mapped(place.local)
    return how, as_bytes(content)


def on_ranks(directory: Path, *cases: Case, world_size: int = 2, function: Any = restored) -> list[tuple[str, Any]]:
    """For each case how it was restored, and the content, equal on all ranks; or the error, which is equal, too."""
    by_rank = run_ranks(function, world_size, directory, list(cases))
    return [told_by_all(results) for results in zip(*by_rank, strict=True)]


def told_by_all(results: tuple[Any, ...]) -> tuple[str, Any]:
    if isinstance(results[0][1], str):
        assert set(results) == {results[0]}
        return results[0]  # type: ignore[no-any-return]
    contents = [from_bytes(content) for _, content in results]
    assert {how for how, _ in results} == {results[0][0]}
    assert all(same(content, contents[0]) for content in contents)
    return results[0][0], contents[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_every_kind(world_size: int, tmp_path: Path) -> None:
    """Mapped or sent, each rank has what was saved, and nothing stays in the file."""
    path = tmp_path / "it.ckpt"
    saved(path, kinds())
    results = on_ranks(tmp_path, *(Case([path], mode) for mode in MODES), world_size=world_size)
    sent = "sent from rank 0 to all (as asked for)"
    assert [how for how, _ in results] == ["mapped by every rank", "mapped by every rank", sent]
    assert all(same(content, kinds()) for _, content in results)


def test_one_rank_alone(tmp_path: Path) -> None:
    """It needs no process group, in whatever mode."""
    saved(tmp_path / "it.ckpt", kinds())
    for mode in MODES:
        _, content = outcome(Ranks(), Case([tmp_path / "it.ckpt"], mode))
        assert isinstance(content, bytes)
        assert same(from_bytes(content), kinds())


def test_who_sees_what_decides(tmp_path: Path) -> None:
    """Ranks without the file or with another one receive rank 0's; a copy at another path is as good as the file."""
    path, copied, other = tmp_path / "it.ckpt", tmp_path / "copy.ckpt", tmp_path / "other.ckpt"
    saved(path, kinds())
    shutil.copy(path, copied)
    saved(other, {"x": numbers(5)})
    missing, different, equal = on_ranks(tmp_path, *(Case([path, it]) for it in (tmp_path / "no.ckpt", other, copied)))
    assert missing[0].startswith(SENT)
    assert different[0].startswith(SENT)
    assert equal[0] == "mapped by every rank"
    assert all(same(content, kinds()) for _, content in (missing, different, equal))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_old_file_is_restored(tmp_path: Path) -> None:
    """A file from before torch 1.6, too; cut off, it is damaged on every rank."""
    content = {"state_dict": {"a": numbers(6000), "b": numbers(3)}}
    path, short = tmp_path / "it.ckpt", tmp_path / "short.ckpt"
    saved(path, content, _use_new_zipfile_serialization=False)
    short.write_bytes(path.read_bytes()[:-100])
    results = on_ranks(tmp_path, *(Case([it], mode) for it in (path, short) for mode in MODES))
    assert all(same(value, content) for _, value in results[:3])
    assert [kind for kind, _ in results[3:]] == ["DamagedCheckpointError"] * 3


def test_damage_is_named_on_every_rank(tmp_path: Path) -> None:
    """Whoever finds it, all raise the error that names the tensor; with ``verify=False`` all read it."""
    content = {"state_dict": {"a": numbers(6000), "b": numbers(5000), "c": numbers(4000)}, "n": 3}
    for position, name in enumerate("abc"):
        archive = saved(tmp_path / name, content)
        flip(tmp_path / name, archive.tensor_data[position].offset + 100, 0x40)
    cases = [Case([tmp_path / name], mode) for name in "abc" for mode in MODES]
    results = on_ranks(tmp_path, *cases, *(Case([tmp_path / "a"], mode, {"verify": False}) for mode in MODES))
    for case, (kind, text) in zip(cases, results, strict=False):
        path = Path(case.paths[0])
        assert kind == "DamagedCheckpointError"
        assert f"checkpoint {path} is damaged: state_dict.{path.name} differs" in text
    for _, value in results[len(cases) :]:
        assert same(value["state_dict"]["b"], numbers(5000))
        assert not same(value["state_dict"]["a"], numbers(6000))


def damage_skeleton(path: Path) -> None:
    (record,) = (record for record in open_archive(path).skeleton if record.name == "data.pkl")
    flip(path, record.offset + 30)


SPOILERS: dict[str, Callable[[Path], Any]] = {
    "CheckpointNotFoundError: checkpoint {} does not exist": os.unlink,
    "DamagedCheckpointError: checkpoint {} is damaged: data.pkl differs": damage_skeleton,
    "DamagedCheckpointError: checkpoint {} is damaged: its directory": lambda path: os.truncate(path, 1000),
    "DamagedCheckpointError: checkpoint {} is empty": lambda path: os.truncate(path, 0),
}


def test_rank_zeros_error_is_everybodys(tmp_path: Path) -> None:
    """What is wrong with rank 0's file is told by all ranks, also by those whose own file is whole."""
    cases = []
    for number, spoil in enumerate(SPOILERS.values()):
        good, bad = tmp_path / f"good{number}.ckpt", tmp_path / f"bad{number}.ckpt"
        saved(good, {"x": numbers(6000)})
        shutil.copy(good, bad)
        spoil(bad)
        cases += [Case([bad, good], "auto"), Case([bad, good], "broadcast"), Case([bad], "map")]
    for number, result in enumerate(on_ranks(tmp_path, *cases)):
        assert ": ".join(result).startswith(list(SPOILERS)[number // 3].format(cases[number].paths[0]))


def test_who_must_map_and_cannot_is_named(tmp_path: Path) -> None:
    """With ``restore="map"`` a missing and another file of rank 1 are errors on all, which say what to do."""
    for name in ("zero", "none", "other"):
        (tmp_path / name).mkdir()
    saved(tmp_path / "zero" / "it.ckpt", {"x": numbers(5)})
    saved(tmp_path / "other" / "it.ckpt", {"x": numbers(6)})
    missing, other = on_ranks(
        tmp_path, *(Case([tmp_path / "zero", tmp_path / name], "map") for name in ("none", "other"))
    )
    assert missing[0] == "CheckpointNotFoundError"
    assert missing[1].startswith("rank 1 (host ")
    assert missing[1].endswith("give the path of a file; or use restore='auto'")
    assert other[0] == "CheckpointError"
    assert "is another file than that of rank 0" in other[1]


class Refused:
    """Not among what ``weights_only=True`` allows."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Refused

    __hash__ = None  # type: ignore[assignment]


def test_a_refused_class_is_named_on_every_rank(tmp_path: Path) -> None:
    """All raise the refusal, and all read it when they may."""
    path, content = tmp_path / "it.ckpt", {"x": numbers(5), "y": Refused()}
    torch.save(content, path)
    cases = [Case([path], mode, {"weights_only": only}) for only in (True, False) for mode in MODES]
    results = on_ranks(tmp_path, *cases)
    assert [kind for kind, _ in results[:3]] == ["UnsafeCheckpointError"] * 3
    assert all(f"holds {__name__}.Refused, which weights_only=True refuses" in text for _, text in results[:3])
    assert all(same(value, content) for _, value in results[3:])


def unknown_to_rank_one(rank: int, world_size: int, directory: Path, cases: list[Case]) -> Any:
    if rank == 1:
        globals().pop("Refused")
    return restored(rank, world_size, directory, cases)


def test_one_ranks_failure_is_everybodys(tmp_path: Path) -> None:
    """A class that one rank alone cannot import fails the restore on all."""
    path = tmp_path / "it.ckpt"
    torch.save({"x": numbers(6000), "y": Refused()}, path)
    cases = [Case([path], mode, {"weights_only": False}) for mode in MODES]
    for kind, text in on_ranks(tmp_path, *cases, function=unknown_to_rank_one):
        assert kind == "CheckpointError"
        assert "needs a class that cannot be imported here" in text


class LooksAtItsTensor:
    """Has a sum that it computes when it is unpickled."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __setstate__(self, state: Any) -> None:
        self.tensor, self.sum = state["tensor"], state["tensor"].sum().item()


def sums(rank: int, world_size: int, directory: Path, path: Path) -> list[Any]:
    with stock_group(rank, world_size, directory), torch.sparse.check_sparse_tensor_invariants():
        options = LoadOptions("broadcast", weights_only=False)
        value, *_ = restore(locate(path), Ranks(rank, world_size), options)
        return [value["looks"].sum, torch.rand(2, generator=value["generator"]).tolist(), value["csr"].sum().item()]


def test_objects_that_look_at_their_tensors(tmp_path: Path) -> None:
    """A class with a sum, a random generator, a checked sparse tensor: they see the content on every rank."""
    generator = torch.Generator().manual_seed(7)
    content = {"looks": LooksAtItsTensor(numbers(5000)), "generator": generator, "csr": kinds()["csr"]}
    torch.save(content, tmp_path / "it.ckpt")
    expected = [numbers(5000).sum().item(), torch.rand(2, generator=generator).tolist(), kinds()["csr"].sum().item()]
    assert run_ranks(sums, 2, tmp_path, tmp_path / "it.ckpt") == [expected] * 2


def in_small_pieces(rank: int, world_size: int, directory: Path, cases: list[Case]) -> Any:
    module._TOGETHER, collectives._PIECE = 1000, 7777
    return restored(rank, world_size, directory, cases)


def test_many_small_tensors_and_a_large_one(tmp_path: Path) -> None:
    """Hundreds that travel together and one that is cut all arrive where they belong."""
    content = {f"t{index}": numbers(index % 37, start=index) for index in range(300)} | {"large": numbers(50_001)}
    saved(tmp_path / "it.ckpt", content)
    [(_, value)] = on_ranks(tmp_path, Case([tmp_path / "it.ckpt"], "broadcast"), function=in_small_pieces)
    assert same(value, content)


def test_a_map_location_holds_on_every_rank(tmp_path: Path) -> None:
    """Also for memory that several tensors share; a device that is not there is an error of all."""
    path, base = tmp_path / "it.ckpt", numbers(5000)
    saved(path, {"a": base, "b": base[3:], "c": numbers(2)})
    places: list[Any] = ["meta", {"cpu": "meta"}, "cuda:77"]
    results = on_ranks(tmp_path, *(Case([path], mode, {"map_location": it}) for it in places for mode in MODES))
    for _, content in results[:6]:
        found = [(name, tensor.device.type, tensor.numel()) for name, tensor in content.items()]
        assert found == [("a", "meta", 5000), ("b", "meta", 4997), ("c", "meta", 2)]
    assert [kind for kind, _ in results[6:]] == ["CheckpointError"] * 3


URL = "memory://bucket/it.ckpt"


def from_memory(rank: int, world_size: int, directory: Path) -> Any:
    """Each rank has an object store of its own in memory; first rank 0's alone has it, then all, then it hangs up."""
    by_zero, by_all = [Case([URL], mode) for mode in ("auto", "broadcast")], [Case([URL], "map")]
    with stock_group(rank, world_size, directory):
        ranks = Ranks(rank, world_size)
        results = [outcome(ranks, case) for case in by_zero]
        if rank == 0:
            write(kinds(), URL)
        results += [outcome(ranks, case) for case in by_zero]
        write(kinds(), URL)
        results += [outcome(ranks, case) for case in by_all]
        if rank == 0:
            MemoryFileSystem._open = hang_up
        return results + [outcome(ranks, case) for case in by_zero + by_all]


def hang_up(*_: Any, **__: Any) -> Any:
    raise ConnectionResetError("the store has hung up")


def test_an_object_store_is_read(tmp_path: Path) -> None:
    """By rank 0, or by each with ``map``; a missing object and a store that fails are errors of all."""
    results = [told_by_all(pair) for pair in zip(*run_ranks(from_memory, 2, tmp_path), strict=True)]
    missing = ("CheckpointNotFoundError", f"checkpoint {URL} does not exist; give the path of a file")
    assert results[:2] == [missing] * 2
    assert all(same(content, kinds()) for _, content in results[2:5])
    says = f"checkpoint {URL} cannot be fetched: ConnectionResetError: the store has hung up"
    assert results[5:] == [("CheckpointError", says)] * 3
