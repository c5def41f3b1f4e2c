"""Every rank gets the checkpoint, however it sees the file."""

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp_ext.checkpoint.load import LoadOptions
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.restore import restore
from lightning_ddp_ext.ranks import Ranks
from tests.checkpoint.content import kinds, numbers, same
from tests.harness.training import Kind, on_ranks

MAPPED = "mapped by every rank"
SENT = "sent from rank 0 to all ranks (rank 1 on host "


def how_restored(expected: Any, paths: list[Path], **options: Any) -> str:
    """Return how this rank reads the ``expected`` content; or "other content".

    The last path is that of all further ranks.
    """
    rank = dist.get_rank()
    ranks = Ranks(rank, dist.get_world_size())
    location = locate(paths[min(rank, len(paths) - 1)])
    restored = restore(location, ranks, LoadOptions(**options))
    return restored.how if same(restored.content, expected) else "other content"


def see_different_files(kind: Kind, directory: Path, files: Path) -> dict[str, str]:
    path = files / "it.ckpt"
    old = files / "old.ckpt"
    missing = files / "no.ckpt"
    float_ = kinds()["float"]
    to_meta = {"map_location": {"cpu": "meta"}}
    return {
        "same path": how_restored(kinds(), [path]),
        "another path": how_restored(kinds(), [path, files / "linked.ckpt"]),
        "old format": how_restored(float_, [old]),
        "no file": how_restored(kinds(), [path, missing]),
        "another file": how_restored(kinds(), [path, files / "at.ckpt"]),
        "no file of the old format": how_restored(float_, [old, missing]),
        "to meta": how_restored(float_.to("meta"), [files / "float.ckpt", missing], **to_meta),
    }


def test_every_rank_gets_the_checkpoint(tmp_path: Path) -> None:
    """Every rank maps the file.

    If a rank has no file, or another one, every rank receives rank 0's.
    """
    torch.save(kinds(), tmp_path / "it.ckpt")
    os.link(tmp_path / "it.ckpt", tmp_path / "linked.ckpt")
    of_same_size = kinds() | {"float": kinds()["float"] + 1}
    torch.save(of_same_size, tmp_path / "at.ckpt")  # torch writes the name into the file
    assert (tmp_path / "at.ckpt").stat().st_size == (tmp_path / "it.ckpt").stat().st_size
    torch.save(kinds()["float"], tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    torch.save(kinds()["float"], tmp_path / "float.ckpt")
    for seen in on_ranks("stock", see_different_files, tmp_path, tmp_path, world_size=3):
        mapped = [case for case, how in seen.items() if how == MAPPED]
        sent = [case for case, how in seen.items() if how.startswith(SENT)]
        assert mapped == ["same path", "another path", "old format"], seen
        assert sent == ["no file", "another file", "no file of the old format", "to meta"], seen


LARGE = 17 << 20  # numbers, of more bytes than Ranks broadcasts at a time


def allocated_bytes() -> int:
    """Return the memory of this process that belongs to no file."""
    [size] = re.findall(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(size) * 1024


def receive(kind: Kind, directory: Path, path: Path) -> float:
    """Restore a file that only rank 0 sees; return how many bytes this process allocates
    for its content, in sizes of the file.
    """
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    location = locate(path if ranks.rank == 0 else path.with_name("no.ckpt"))
    before = allocated_bytes()
    content = restore(location, ranks, LoadOptions()).content
    allocated = allocated_bytes() - before
    assert same(content, {"large": numbers(LARGE)})
    return allocated / path.stat().st_size


def test_a_file_that_is_sent_in_pieces_is_in_memory_once(tmp_path: Path) -> None:
    """The tensors use the memory into which the file was received."""
    torch.save({"large": numbers(LARGE)}, tmp_path / "it.ckpt")
    _, receiver = on_ranks("stock", receive, tmp_path, tmp_path / "it.ckpt")
    assert receiver < 0.5
