"""Every rank gets the checkpoint, however it sees the file, or every rank raises the
same error.
"""

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from lightning_ddp_ext.checkpoint.load import LoadOptions
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.restore import Restored, restore
from lightning_ddp_ext.checkpoint.save import write
from lightning_ddp_ext.ranks import Ranks
from tests.checkpoint.content import kinds, numbers, same
from tests.harness.training import Kind, on_ranks

MAPPED = "mapped by every rank"
SENT = "sent from rank 0 to all ranks (rank 1 on host "
Paths = list[Path]  # by rank; the last one is that of all further ranks


def how_restored(expected: Any, paths: Paths | list[str], **options: Any) -> str:
    """Return how this rank reads the ``expected`` content; or "other content", or the
    error's type and text.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    place = locate(paths[min(rank, len(paths) - 1)])
    ranks = Ranks(rank, world_size)
    try:
        restored = restore(place, ranks, LoadOptions(**options))
        how = restored.how if same(restored.content, expected) else "other content"
    except Exception as error:
        how = f"{type(error).__name__}: {error}"
    assert ranks.gather(rank) == list(range(world_size)), "the ranks are still in step"
    return how


class SeenFiles(NamedTuple):
    """How files were restored that all ranks see, and others."""

    on_all_ranks: dict[str, str]
    on_rank_zero: dict[str, str]


def see_different_files(kind: Kind, directory: Path, files: Path) -> SeenFiles:
    path = files / "it.ckpt"
    old = files / "old.ckpt"
    alone = files / "float.ckpt"
    missing = files / "no.ckpt"
    float_ = kinds()["float"]
    meta = float_.to("meta")
    on_all_ranks = {
        "same path": how_restored(kinds(), [path]),
        "another path": how_restored(kinds(), [path, files / "linked.ckpt"]),
        "old format": how_restored(float_, [old]),
        "old format to meta": how_restored(meta, [old], map_location="meta"),
    }
    on_rank_zero = {
        "no file": how_restored(kinds(), [path, missing]),
        "another file": how_restored(kinds(), [path, files / "other.ckpt"]),
        "old format": how_restored(float_, [old, missing]),
        "to meta": how_restored(meta, [alone, missing], map_location={"cpu": "meta"}),
    }
    return SeenFiles(on_all_ranks, on_rank_zero)


def test_every_rank_gets_the_checkpoint(tmp_path: Path) -> None:
    """Every rank maps the file.

    If a rank has no file, or another one, every rank receives rank 0's.
    """
    torch.save(kinds(), tmp_path / "it.ckpt")
    os.link(tmp_path / "it.ckpt", tmp_path / "linked.ckpt")
    of_same_size = kinds() | {"float": kinds()["float"] + 1}
    torch.save(of_same_size, tmp_path / "other.ckpt")
    torch.save(kinds()["float"], tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    torch.save(kinds()["float"], tmp_path / "float.ckpt")
    for seen in on_ranks("stock", see_different_files, tmp_path, tmp_path, world_size=3):
        assert set(seen.on_all_ranks.values()) == {MAPPED}
        assert all(how.startswith(SENT) for how in seen.on_rank_zero.values()), seen.on_rank_zero


# A place that no machine has. The error names all entries, so that a long text is sent.
NOWHERE = {"cpu": "cuda:77"} | {f"cuda:{number}": "cpu" for number in range(200)}


def use_files_that_fail(kind: Kind, directory: Path, files: Path) -> dict[str, str]:
    """Return the error if rank 0 has no file, and if no rank can place the tensors."""
    content = {"a": numbers(6000)}
    whole = files / "whole.ckpt"
    missing = files / "no.ckpt"
    return {
        "missing": how_restored(content, [missing, whole]),
        "mapped nowhere": how_restored(content, [whole], map_location=NOWHERE),
        "sent nowhere": how_restored(content, [whole, missing], map_location=NOWHERE),
    }


def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    """It is raised on all ranks if rank 0 does not find the file, or if the tensors
    cannot be placed.
    """
    torch.save({"a": numbers(6000)}, tmp_path / "whole.ckpt")
    found, of_rank_1 = on_ranks("stock", use_files_that_fail, tmp_path, tmp_path)
    assert found == of_rank_1
    missing = f"CheckpointError: checkpoint {tmp_path}/no.ckpt could not be read: FileNotFoundError"
    assert found["missing"].startswith(missing)
    for case in ("mapped nowhere", "sent nowhere"):
        assert "could not be read: RuntimeError: " in found[case]


LARGE = 17 << 20  # numbers, of more bytes than Ranks broadcasts at a time


def receive(path: Path, **how: bool) -> Restored:
    """Restore a file that only rank 0 sees."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    location = locate(path if ranks.rank == 0 else path.with_name("no.ckpt"))
    return restore(location, ranks, LoadOptions(), **how)


def receive_weights(kind: Kind, directory: Path, path: Path) -> bool:
    """Return whether weights arrive that are larger than one broadcast."""
    content = receive(path, map_weights=True).content
    return same(content, {"state_dict": {"large": numbers(LARGE)}})


@pytest.mark.nightly
def test_a_file_that_is_sent_in_pieces_arrives(tmp_path: Path) -> None:
    """The weights stay in memory, although the copy of the file is closed."""
    torch.save({"state_dict": {"large": numbers(LARGE)}}, tmp_path / "it.ckpt")
    assert on_ranks("stock", receive_weights, tmp_path, tmp_path / "it.ckpt") == [True, True]


def memory_for_a_file(kind: Kind, directory: Path, path: Path) -> float:
    """Return how many bytes this process allocates while it has the file's content, in
    sizes of the file.
    """
    before = allocated_bytes()
    restored = receive(path)
    used = allocated_bytes() - before
    assert restored.how.startswith(SENT)
    return used / path.stat().st_size


def allocated_bytes() -> int:
    """Return the memory of this process that belongs to no file."""
    [size] = re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(size) * 1024


def test_a_file_that_is_sent_is_in_memory_once(tmp_path: Path) -> None:
    """The tensors use the memory into which the file was received."""
    torch.save({"optimizer_states": [numbers(LARGE)]}, tmp_path / "it.ckpt")
    _, receiver = on_ranks("stock", memory_for_a_file, tmp_path, tmp_path / "it.ckpt")
    assert receiver < 0.5


URL = "memory://bucket/it.ckpt"


def from_memory(kind: Kind, directory: Path) -> dict[str, str]:
    """Read from the object store in rank 0's memory: without the file, with it, and
    from a store that fails.
    """
    found = {"missing": how_restored(kinds(), [URL])}
    if dist.get_rank() == 0:
        write(kinds(), URL)
    found["present"] = how_restored(kinds(), [URL])
    if dist.get_rank() == 0:
        MemoryFileSystem._open = hang_up
    found["failing"] = how_restored(kinds(), [URL])
    return found


def hang_up(*_: Any, **__: Any) -> Any:
    raise ConnectionResetError("the store has hung up")


def test_an_object_store_is_read(tmp_path: Path) -> None:
    """Rank 0 reads an object store; all ranks raise if the object is missing or the
    store fails.
    """
    found, of_rank_1 = on_ranks("stock", from_memory, tmp_path)
    assert found == of_rank_1
    assert found.pop("present").startswith(SENT)
    assert found == {
        "missing": (
            f"CheckpointError: checkpoint {URL} could not be read: FileNotFoundError:"
            " /bucket/it.ckpt"
        ),
        "failing": (
            f"CheckpointError: checkpoint {URL} could not be read: ConnectionResetError: the store"
            " has hung up"
        ),
    }
