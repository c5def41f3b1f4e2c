"""Read a checkpoint once for all ranks, from a file that all see or through rank 0.

If every rank sees rank 0's file, each rank maps it, and the ranks of a host divide the
checking among themselves. Otherwise all ranks receive the tensors from rank 0. Either
every rank gets the checkpoint, or every rank raises the error of the first rank that
failed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from zipfile import ZipInfo

from torch import Tensor, UntypedStorage

from lightning_ddp_ext.checkpoint.archive import Archive, reading
from lightning_ddp_ext.checkpoint.load import LoadOptions, load, placement, read
from lightning_ddp_ext.checkpoint.location import Location, on_local_disk
from lightning_ddp_ext.checkpoint.snapshot import (
    aligned,
    bytes_of,
    identity_of,
    join,
    slices_of,
    split,
)
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.ranks import Ranks

# Small tensors are sent together in blocks of this size: each broadcast has a delay.
_BLOCK_BYTES = 1 << 20


def restore(
    location: Location, ranks: Ranks, options: LoadOptions, *, map_weights: bool = False
) -> tuple[Any, str, bool]:
    """Read the checkpoint at ``location`` on every rank.

    Collective: every rank must call it with the same options.

    Args:
        location: its path or URL, which may exist on rank 0 only.
        ranks: the ranks that read.
        options: how to read it.
        map_weights: whether the ``state_dict`` may be mapped from the file, for callers
            that copy the weights into a model and drop them. Everything else is copied
            into this process's own memory.

    Returns:
        The checkpoint; how it was read, for the log; and whether all was checked (also
        true if ``verify`` is off).

    Raises:
        CheckpointError: the checkpoint cannot be read; the same error on every rank.
    """
    with ExitStack() as stack:
        archive, view = _open(stack, location, ranks)
        views = ranks.gather(view)
        if views[0].error is not None:
            raise views[0].error
        without_file = [rank for rank, each in enumerate(views) if each.file != views[0].file]
        if without_file:
            rank = without_file[0]
            reason = f"rank {rank} on host {views[rank].host} does not see it"
            how = f"sent from rank 0 to all ranks ({reason})"
            content = _send(stack, archive, ranks, options, location.url)
        else:
            assert archive is not None, "this rank sees the file"
            how = "mapped by every rank"
            on_this_host = [rank for rank, each in enumerate(views) if each.host == view.host]
            records = _shard(archive, on_this_host.index(ranks.rank), len(on_this_host))

            def check_and_read() -> Any:
                if options.verify:
                    archive.check(records)
                return read(archive, options, map_weights=map_weights)

            content = ranks.on_every_rank(check_and_read, f"reading {location.url}")
    return content, how, views[0].has_checksums or not options.verify


@dataclass(frozen=True)
class _View:
    """The file that one rank sees at the path.

    Attributes:
        host: the name of the rank's host.
        file: the inode, size and modification time; equal for ranks that see the same
            file, also on different hosts. Empty if the rank sees none.
        has_checksums: whether every record has a checksum.
        error: the reason why the rank cannot read the file.
    """

    host: str
    file: tuple[int, ...] = ()
    has_checksums: bool = False
    error: Exception | None = None


def _open(stack: ExitStack, location: Location, ranks: Ranks) -> tuple[Archive | None, _View]:
    """Open the checkpoint on this rank, if it can, and return its view of it.

    Only rank 0 fetches a file from an object store.
    """
    host = socket.gethostname()
    if location.local is None and ranks.rank != 0:
        return None, _View(host)
    try:
        with reading(location.url):
            archive = Archive.open(stack.enter_context(on_local_disk(location)), location.url)
            status = os.stat(archive.path)
    except CheckpointError as error:  # the other ranks are waiting for the view
        return None, _View(host, error=error)
    file = (status.st_ino, status.st_size, status.st_mtime_ns)
    return archive, _View(host, file, archive.has_checksums)


def _send(
    stack: ExitStack, archive: Archive | None, ranks: Ranks, options: LoadOptions, name: str
) -> Any:
    """Return the content of rank 0's file.

    Rank 0 checks it while sending the tensors. Collective.
    """
    what = f"reading {name}"
    threads = ThreadPoolExecutor(1)
    stack.callback(threads.shutdown, wait=False)  # after an error, do not wait for the check
    storages: list[UntypedStorage] = []  # of rank 0's tensors, mapped from the file

    def split_on_rank_zero() -> Any:
        if archive is None or ranks.rank != 0:
            return None
        if options.verify:
            archive.check(())
        devices: dict[object, str] = {}  # from which tensors were saved; generators have none

        def record_device(storage: UntypedStorage, device: str) -> UntypedStorage:
            devices[identity_of(storage)] = device
            return storage

        content = load(archive, record_device, options.weights_only, mmap=True)
        pickled, storages[:] = split(content)
        checking = threads.submit(archive.check if options.verify else lambda: None)
        metadata = [(each.nbytes(), devices.get(identity_of(each))) for each in storages]
        return checking, (pickled, metadata)

    checking, header = ranks.on_every_rank(split_on_rank_zero, what) or (None, None)
    pickled, metadata = ranks.from_rank_zero(header)
    received: list[UntypedStorage] = []

    def make_blocks() -> Iterator[Tensor]:
        for sizes in _blocks([size for size, _ in metadata]):
            block = UntypedStorage(sum(map(aligned, sizes)))
            for slice_ in slices_of(block, sizes):
                if ranks.rank == 0:
                    slice_.copy_(storages[len(received)])
                received.append(slice_)
            yield bytes_of(block)

    ranks.broadcast(make_blocks())

    def place_and_join() -> Any:
        if checking is not None:
            checking.result()
        place = placement(options.map_location)
        for index, (_, device) in enumerate(metadata):
            if device is not None:
                received[index] = place(received[index], device)
        with reading(name):
            return join(pickled, received)

    return ranks.on_every_rank(place_and_join, what)


def _blocks(sizes: list[int]) -> Iterator[list[int]]:
    """Split sizes into blocks of tensors that are sent together."""
    block: list[int] = []
    for size in sizes:
        if block and sum(block) + size > _BLOCK_BYTES:
            yield block
            block = []
        block.append(size)
    yield block


def _shard(archive: Archive, index: int, count: int) -> list[ZipInfo]:
    """Return the tensors that one of ``count`` ranks with the same file must check."""
    return sorted(archive.tensors, key=lambda record: record.file_size, reverse=True)[index::count]
