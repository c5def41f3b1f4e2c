"""Send a file that rank 0 sees to ranks that do not see it: one of each host keeps a copy while they read it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.checkpoint.atomic_file import scratch_file
from lightning_ddp_ext.checkpoint.collectives import Ranks
from lightning_ddp_ext.checkpoint.zip_crc import Archive, open_archive
from lightning_ddp_ext.errors import CheckpointError

_PIECE = 16 << 20


@contextmanager
def received(archive: Archive | None, ranks: Ranks, receivers: dict[int, str], *, name: str) -> Iterator[Archive]:
    """What each rank is to read: a copy of rank 0's file on those that receive it, else the file that it sees.

    Collective: every rank must call it, and may leave it when all have read.

    Args:
        archive: the file that this rank sees; not needed where it receives one.
        ranks: who reads.
        receivers: the hosts of the ranks that receive, by rank.
        name: what the user calls the file.

    Raises:
        CheckpointError: the same on every rank.
    """
    if not receivers:
        assert archive is not None, "a rank that does not receive sees the file"
        yield archive
        return
    keepers = {host: rank for rank, host in sorted(receivers.items(), reverse=True)}  # the first rank of each host
    what = f"reading {name}"
    with ExitStack() as stack:
        path: Path | None = None
        file: Any = None
        error: OSError | None = None
        try:
            if ranks.rank == 0 and archive is not None:
                file = stack.enter_context(open(archive.path, "rb"))
            elif ranks.rank in keepers.values():
                path, file = stack.enter_context(scratch_file())
        except OSError as problem:
            error = problem
        paths = ranks.gather(path)
        error = send(file, ranks.from_rank_zero(archive and archive.size), ranks) or error
        ranks.on_every_rank(lambda: _refuse(error, name), what)

        def opened() -> Archive:
            if archive is not None and ranks.rank not in receivers:
                return archive
            return open_archive(paths[keepers[receivers[ranks.rank]]], name)

        yield ranks.on_every_rank(opened, what)


def _refuse(error: OSError | None, name: str) -> None:
    if error is not None:
        raise CheckpointError(
            f"checkpoint {name} cannot be sent to ranks that do not see it: {error.strerror or error} (host "
            f"{socket.gethostname()}, copies in {gettempdir()}); put it where every rank sees it, or set TMPDIR to a "
            "directory with room for it"
        )


def send(file: Any, size: int, ranks: Ranks) -> OSError | None:
    """Copy rank 0's file into those of other ranks. Collective: every rank must call it, with a file or none.

    Returns:
        The first error of this rank's file; the other ranks go on.
    """
    piece = torch.empty(min(size, _PIECE), dtype=torch.uint8)
    error: OSError | None = None
    for start in range(0, size, _PIECE):
        part = piece[: size - start]
        if ranks.rank == 0 and file is not None:
            error = error or _attempt(file.readinto, part)
        ranks.broadcast(part)
        if ranks.rank != 0 and file is not None:
            error = error or _attempt(file.write, part)
    return error


def _attempt(work: Callable[[memoryview], Any], part: Tensor) -> OSError | None:
    try:
        work(part.numpy().data)
    except OSError as error:
        return error
    return None
