"""Read a checkpoint once for all ranks, from a file that all see or through rank 0.

If every rank sees rank 0's file, each rank maps it, and the ranks of a host divide the
checking among themselves. Otherwise all ranks receive a copy from rank 0, and divide the
checking. Either every rank gets the checkpoint, or every rank raises the error of the
first rank that failed.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ddp_ext.checkpoint.load import Archive, LoadOptions, load, path_of, reading
from lightning_ddp_ext.checkpoint.location import Location
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.ranks import Ranks


class Restored(NamedTuple):
    """A checkpoint that was read.

    Attributes:
        content: the checkpoint.
        how: how it was read, for the log.
        lacks_checksums: whether records had to be checked, but have no checksum.
    """

    content: Any
    how: str
    lacks_checksums: bool


def restore(
    location: Location, ranks: Ranks, options: LoadOptions, *, map_weights: bool = False
) -> Restored:
    """Read the checkpoint at ``location`` on every rank.

    Collective: every rank must call it with the same options.

    Args:
        location: its path or URL, which may exist on rank 0 only.
        ranks: the ranks that read.
        options: how to read it.
        map_weights: whether the ``state_dict`` may be mapped from the file, for callers
            that copy the weights into a model and drop them. Everything else is copied
            into this process's own memory.

    Raises:
        FileNotFoundError: the checkpoint does not exist for rank 0.
        CheckpointError: it cannot be read; the same error on every rank.
    """
    with ExitStack() as stack:
        archive, view = _open(stack, location, ranks)
        views = ranks.gather(view)
        rank_zero = views[0]
        if rank_zero.error is not None:
            raise rank_zero.error
        # All ranks have the same views, so they decide the same: how to read, and who checks.
        without_file = [rank for rank, each in enumerate(views) if each.file != rank_zero.file]
        if without_file:
            rank = without_file[0]
            how = (
                f"sent from rank 0 to all ranks (rank {rank} on host {views[rank].host} does not"
                " see it)"
            )
            archive = _copy_from_rank_zero(stack, archive, rank_zero.size, ranks, location.url)
            checkers = list(range(ranks.world_size))
        else:
            how = "mapped by every rank"
            checkers = [rank for rank, each in enumerate(views) if each.host == view.host]
        assert archive is not None, "this rank sees the file, or has a copy"

        def check_and_load() -> Any:
            with reading(location.url):
                if options.verify:
                    archive.check(checkers.index(ranks.rank), len(checkers))
                return load(
                    archive,
                    options,
                    ranks.device,
                    map_weights=map_weights,
                    is_own_copy=bool(without_file) and ranks.rank != 0,
                )

        content = ranks.on_every_rank(check_and_load, f"reading {location.url}")
    return Restored(content, how, options.verify and not rank_zero.has_checksums)


@dataclass(frozen=True)
class _View:
    """The file that one rank sees at the path: a file, or the error of opening it.

    At a URL, ranks other than 0 have neither.

    Attributes:
        host: the name of the rank's host.
        file: the inode, size and modification time; equal for ranks that see the same
            file, also on different hosts. Empty if the rank sees none.
        size: the size of the file.
        has_checksums: whether every record has a checksum.
        error: the reason why the rank cannot read the file.
    """

    host: str
    file: tuple[int, ...] = ()
    size: int = 0
    has_checksums: bool = False
    error: Exception | None = None


def _open(stack: ExitStack, location: Location, ranks: Ranks) -> tuple[Archive | None, _View]:
    """Open the checkpoint on this rank, if it can, and return its view of it.

    The file stays open as long as ``stack``. Only rank 0 fetches a file from an object store.
    """
    host = socket.gethostname()
    if location.local is None and ranks.rank != 0:
        return None, _View(host)
    try:
        with reading(location.url):
            archive = _open_existing(stack, location)
    except CheckpointError as error:  # the other ranks are waiting for the view
        return None, _View(host, error=error)
    if archive is None:  # the same error as with stock
        missing = f"checkpoint {location.url} does not exist for rank {ranks.rank} on host {host}"
        return None, _View(host, error=FileNotFoundError(missing))
    status = archive.status
    file = (status.st_ino, status.st_size, status.st_mtime_ns)
    return archive, _View(host, file, status.st_size, archive.has_checksums)


def _open_existing(stack: ExitStack, location: Location) -> Archive | None:
    """Open the checkpoint, after fetching it from a store; ``None`` if it does not exist."""
    path = location.path
    is_stored = location.local is None
    if is_stored:
        path = os.path.join(stack.enter_context(TemporaryDirectory()), "checkpoint")
    try:
        if is_stored:
            location.fs.get_file(location.path, path)
        return _open_archive(stack, path, location.url)
    except FileNotFoundError:
        return None


def _copy_from_rank_zero(
    stack: ExitStack, archive: Archive | None, size: int, ranks: Ranks, name: str
) -> Archive:
    """Return rank 0's archive, of which the other ranks get a copy in memory.

    The copy is open as long as ``stack``. Collective.
    """
    what = f"reading {name}"
    is_copy = ranks.rank != 0

    def map_file() -> tuple[str, Tensor]:
        with reading(name):
            if is_copy:
                descriptor = os.memfd_create("checkpoint")
                stack.callback(os.close, descriptor)
                path = path_of(descriptor)
            else:
                assert archive is not None, "rank 0 has opened the file"
                path = archive.path
            return path, torch.from_file(path, shared=is_copy, size=size, dtype=torch.uint8)

    path, content = ranks.on_every_rank(map_file, what)
    ranks.broadcast(content)
    return ranks.on_every_rank(lambda: _open_archive(stack, path, name), what)


def _open_archive(stack: ExitStack, path: str, name: str) -> Archive:
    return Archive(stack.enter_context(open(path, "rb")), name)
