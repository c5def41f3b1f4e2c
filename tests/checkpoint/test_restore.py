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
SENT = "sent from rank 0 to all ranks (rank 1 on host "
Paths = list[Path]  # by rank; the last one is that of all further ranks


def outcome(expected: Any, paths: Paths | list[str], mode: Mode = "auto", **options: Any) -> str:
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


def see_different_files(kind: Kind, directory: Path, files: Path) -> list[str]:
    path = files / "it.ckpt"
    old = files / "old.ckpt"
    missing, other, copied = (
        [path, files / name] for name in ("no.ckpt", "other.ckpt", "copy.ckpt")
    )
    return [
        *(outcome(kinds(), [path], mode) for mode in MODES),
        *(outcome(kinds(), paths) for paths in (missing, other, copied)),
        *(outcome(kinds()["float"], [old], mode) for mode in MODES),
        outcome(kinds()["float"].to("meta"), [old], map_location="meta"),
        outcome(
            kinds()["float"].to("meta"),
            [files / "no-device.ckpt"],
            "broadcast",
            map_location={"cpu": "meta"},
        ),
    ]


def test_every_rank_gets_the_checkpoint(tmp_path: Path) -> None:
    """The file is mapped or sent; a rank without it, or with a different one, receives
    rank 0's; a copy also serves.
    """
    saved(tmp_path / "it.ckpt", kinds())
    shutil.copy(tmp_path / "it.ckpt", tmp_path / "copy.ckpt")
    saved(tmp_path / "other.ckpt", kinds() | {"float": kinds()["float"] + 1})  # of the same size
    saved(tmp_path / "old.ckpt", kinds()["float"], _use_new_zipfile_serialization=False)
    saved(tmp_path / "no-device.ckpt", kinds()["float"])
    asked = "sent from rank 0 to all ranks (as requested)"
    for found in on_ranks("stock", see_different_files, tmp_path, tmp_path, world_size=3):
        assert found[:3] == [MAPPED, MAPPED, asked]
        assert [found[3].startswith(SENT), found[4].startswith(SENT), found[5]] == [
            True,
            True,
            MAPPED,
        ]
        assert found[6:] == [MAPPED, MAPPED, asked, MAPPED, asked]


NOWHERE = {"cpu": "cuda:77"} | {f"cuda:{number}": "cpu" for number in range(200)}  # a long error


def use_files_that_differ(kind: Kind, directory: Path, files: Path) -> list[str]:
    """Each rank has its own directory with the file; the files of ranks 0 and 1 have
    different faults.
    """
    content = {"a": numbers(6000)}
    whole, other, missing = (files / name for name in ("whole.ckpt", "other.ckpt", "no.ckpt"))
    return [
        *(outcome(content, [missing, whole], mode) for mode in MODES),
        *(outcome(content, [whole, bad], "map") for bad in (missing, other)),
        *(outcome(content, [whole], mode, map_location=NOWHERE) for mode in MODES),
    ]


def test_all_ranks_raise_the_error_in_a_bad_file(tmp_path: Path) -> None:
    """All raise rank 0's error; with ``restore="map"`` also that of a rank without the
    file, or with another one.
    """
    saved(tmp_path / "whole.ckpt", {"a": numbers(6000)})
    saved(tmp_path / "other.ckpt", numbers(5))
    one, other = on_ranks("stock", use_files_that_differ, tmp_path, tmp_path)
    assert one == [text.replace("/other.ckpt on rank 1", "/whole.ckpt on rank 1") for text in other]
    missing = f"CheckpointNotFoundError: checkpoint {tmp_path}/no.ckpt does not exist"
    assert [text.startswith(missing) for text in one[:3]] == [True] * 3
    assert one[3].startswith("CheckpointNotFoundError: rank 1 (host ")
    assert one[3].endswith("pass the path of a file; or use restore='auto'")
    assert "differs from rank 0's file" in one[4]
    assert ["cannot place a tensor saved from cpu: RuntimeError: " in text for text in one[5:]] == [
        True
    ] * 3


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


def from_memory(kind: Kind, directory: Path) -> list[str]:
    """Each rank has its own object store in memory; first only rank 0's has the file,
    then all, then it fails.
    """
    modes: tuple[Mode, ...] = ("auto", "broadcast")
    found = [outcome(kinds(), [URL], mode) for mode in modes]
    if dist.get_rank() == 0:
        write(kinds(), URL)
    found += [outcome(kinds(), [URL], mode) for mode in modes]
    write(kinds(), URL)
    found.append(outcome(kinds(), [URL], "map"))
    if dist.get_rank() == 0:
        MemoryFileSystem._open = hang_up
    return found + [outcome(kinds(), [URL], mode) for mode in MODES]


def hang_up(*_: Any, **__: Any) -> Any:
    raise ConnectionResetError("the store has hung up")


def test_an_object_store_is_read(tmp_path: Path) -> None:
    """Rank 0 reads it, or each rank with ``map``; all ranks raise if the object is
    missing or the store fails.
    """
    one, other = on_ranks("stock", from_memory, tmp_path)
    assert one == other
    assert (
        one[:2]
        == [f"CheckpointNotFoundError: checkpoint {URL} does not exist; pass the path of a file"]
        * 2
    )
    assert one[2].startswith(SENT)
    assert one[4] == MAPPED
    assert (
        one[5:]
        == [
            f"CheckpointError: checkpoint {URL} cannot be fetched: ConnectionResetError: the store"
            " has hung up"
        ]
        * 3
    )
