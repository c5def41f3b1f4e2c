"""Every rank gets the checkpoint, however it sees the file, or every rank raises the
same error.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from lightning_ddp_ext.checkpoint.load import LoadOptions, Mode
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.restore import restore
from lightning_ddp_ext.checkpoint.save import write
from lightning_ddp_ext.ranks import Ranks
from tests.checkpoint.content import kinds, numbers, same, saved
from tests.harness.training import Kind, on_ranks

MODES: tuple[Mode, ...] = ("auto", "map", "broadcast")
MAPPED = "mapped by every rank"
REQUESTED = "sent from rank 0 to all ranks (as requested)"
SENT = "sent from rank 0 to all ranks (rank 1 on host "
Paths = list[Path]  # by rank; the last one is that of all further ranks


def how_restored(
    expected: Any, paths: Paths | list[str], mode: Mode = "auto", **options: Any
) -> str:
    """Return how this rank reads the ``expected`` content; or "other content", or the
    error's type and text.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    place = locate(paths[min(rank, len(paths) - 1)])
    ranks = Ranks(rank, world_size)
    failed = ""
    try:
        content, how, _ = restore(place, ranks, LoadOptions(mode, **options))
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    assert ranks.gather(rank) == list(range(world_size)), "all are still in step"
    if failed:
        return failed
    return how if same(content, expected) else "other content"


def see_different_files(kind: Kind, directory: Path, files: Path) -> dict[str, str]:
    path = files / "it.ckpt"
    old = files / "old.ckpt"
    alone = files / "float.ckpt"
    float_ = kinds()["float"]
    meta = float_.to("meta")
    return {
        **{mode: how_restored(kinds(), [path], mode) for mode in MODES},
        "others have no file": how_restored(kinds(), [path, files / "no.ckpt"]),
        "others have another file": how_restored(kinds(), [path, files / "other.ckpt"]),
        "others have a copy": how_restored(kinds(), [path, files / "copy.ckpt"]),
        **{f"old format, {mode}": how_restored(float_, [old], mode) for mode in MODES},
        "old format to meta": how_restored(meta, [old], map_location="meta"),
        "broadcast to meta": how_restored(meta, [alone], "broadcast", map_location={"cpu": "meta"}),
    }


def test_every_rank_gets_the_checkpoint(tmp_path: Path) -> None:
    """Every rank maps the file, or gets it from rank 0.

    A rank without the file, or with a different one, receives rank 0's; a copy also
    serves.
    """
    saved(tmp_path / "it.ckpt", kinds())
    shutil.copy(tmp_path / "it.ckpt", tmp_path / "copy.ckpt")
    saved(tmp_path / "other.ckpt", kinds() | {"float": kinds()["float"] + 1})  # of the same size
    saved(tmp_path / "old.ckpt", kinds()["float"], _use_new_zipfile_serialization=False)
    saved(tmp_path / "float.ckpt", kinds()["float"])
    for found in on_ranks("stock", see_different_files, tmp_path, tmp_path, world_size=3):
        for case in ("others have no file", "others have another file"):
            assert found.pop(case).startswith(SENT)
        assert found == {
            "auto": MAPPED,
            "map": MAPPED,
            "broadcast": REQUESTED,
            "others have a copy": MAPPED,
            "old format, auto": MAPPED,
            "old format, map": MAPPED,
            "old format, broadcast": REQUESTED,
            "old format to meta": MAPPED,
            "broadcast to meta": REQUESTED,
        }


# A place that no machine has. The error names all entries, so that a long text is sent.
NOWHERE = {"cpu": "cuda:77"} | {f"cuda:{number}": "cpu" for number in range(200)}


def use_files_that_differ(kind: Kind, directory: Path, files: Path) -> dict[str, str]:
    """Return the error if rank 0 or rank 1 has no file, if rank 1 has another file, and
    if no rank can place the tensors.
    """
    content = {"a": numbers(6000)}
    whole, other, missing = (files / name for name in ("whole.ckpt", "other.ckpt", "no.ckpt"))
    return {
        **{f"0 has none, {mode}": how_restored(content, [missing, whole], mode) for mode in MODES},
        "1 has none": how_restored(content, [whole, missing], "map"),
        "1 has another": how_restored(content, [whole, other], "map"),
        **{
            f"no place, {mode}": how_restored(content, [whole], mode, map_location=NOWHERE)
            for mode in MODES
        },
    }


def test_all_ranks_raise_the_error_in_a_bad_file(tmp_path: Path) -> None:
    """All ranks raise rank 0's error.

    With ``restore="map"`` they also raise that of a rank without the file, or with
    another one.
    """
    saved(tmp_path / "whole.ckpt", {"a": numbers(6000)})
    saved(tmp_path / "other.ckpt", numbers(5))
    found, of_rank_1 = on_ranks("stock", use_files_that_differ, tmp_path, tmp_path)
    # Each rank's error names the path that this rank was given.
    of_rank_1["1 has another"] = of_rank_1["1 has another"].replace(
        "/other.ckpt on rank 1", "/whole.ckpt on rank 1"
    )
    assert found == of_rank_1
    missing = f"CheckpointNotFoundError: checkpoint {tmp_path}/no.ckpt does not exist"
    for mode in MODES:
        assert found[f"0 has none, {mode}"].startswith(missing)
        assert "cannot place a tensor saved from cpu: RuntimeError: " in found[f"no place, {mode}"]
    assert found["1 has none"].startswith("CheckpointNotFoundError: rank 1 (host ")
    assert found["1 has none"].endswith("pass the path of a file; or use restore='auto'")
    assert "differs from rank 0's file" in found["1 has another"]


LARGE = 17 << 20  # numbers


def receive(kind: Kind, directory: Path, path: Path) -> tuple[bool, list[float]]:
    """Whether the large tensor has arrived, and what the generator then draws."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    content, *_ = restore(locate(path), ranks, LoadOptions("broadcast", weights_only=False))
    return (
        same(content["large"], numbers(LARGE)),
        torch.rand(2, generator=content["generator"]).tolist(),
    )


@pytest.mark.nightly
def test_a_file_that_is_sent_in_pieces_arrives(tmp_path: Path) -> None:
    """All content arrives, also objects beside tensors, such as a generator."""
    path = tmp_path / "it.ckpt"
    generator = torch.Generator().manual_seed(7)
    saved(path, {"large": numbers(LARGE), "generator": generator})
    drawn = torch.rand(2, generator=generator).tolist()
    assert on_ranks("stock", receive, tmp_path, path) == [(True, drawn)] * 2


URL = "memory://bucket/it.ckpt"


def from_memory(kind: Kind, directory: Path) -> dict[str, str]:
    """Read from the object store in each rank's memory: without the file, with it in
    rank 0's store, with it in each, and from a store of rank 0 that fails.
    """
    modes: tuple[Mode, ...] = ("auto", "broadcast")
    found = {f"missing, {mode}": how_restored(kinds(), [URL], mode) for mode in modes}
    if dist.get_rank() == 0:
        write(kinds(), URL)
    found |= {mode: how_restored(kinds(), [URL], mode) for mode in modes}
    write(kinds(), URL)
    found["map"] = how_restored(kinds(), [URL], "map")
    if dist.get_rank() == 0:
        MemoryFileSystem._open = hang_up
    return found | {f"failing, {mode}": how_restored(kinds(), [URL], mode) for mode in MODES}


def hang_up(*_: Any, **__: Any) -> Any:
    raise ConnectionResetError("the store has hung up")


def test_an_object_store_is_read(tmp_path: Path) -> None:
    """Rank 0 reads an object store, or each rank does with ``map``.

    All ranks raise if the object is missing or the store fails.
    """
    found, of_rank_1 = on_ranks("stock", from_memory, tmp_path)
    assert found == of_rank_1
    missing = f"CheckpointNotFoundError: checkpoint {URL} does not exist; pass the path of a file"
    failing = (
        f"CheckpointError: checkpoint {URL} cannot be fetched: ConnectionResetError: the store"
        " has hung up"
    )
    for mode in ("auto", "broadcast"):
        assert found.pop(mode).startswith(SENT)
    assert found == {
        "missing, auto": missing,
        "missing, broadcast": missing,
        "map": MAPPED,
        "failing, auto": failing,
        "failing, map": failing,
        "failing, broadcast": failing,
    }
