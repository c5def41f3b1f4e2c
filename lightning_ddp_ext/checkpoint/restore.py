"""Read a checkpoint once for all ranks, from a file that all see or through rank 0.

If every rank sees rank 0's file, each rank maps it, and the ranks of a host divide the
checking among themselves. Otherwise all ranks receive the tensors from rank 0. Either
every rank gets the checkpoint, or every rank raises the error of the first rank that
failed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
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
        CheckpointError: the checkpoint cannot be read; the same error on every rank.
    """
    with ExitStack() as stack:
        archive, view = _open(stack, location, ranks)
        views = ranks.gather(view)
        of_rank_zero = views[0]
        if of_rank_zero.error is not None:
            raise of_rank_zero.error
        without_file = [rank for rank, each in enumerate(views) if each.file != of_rank_zero.file]
        if without_file:
            rank = without_file[0]
            reason = f"rank {rank} on host {views[rank].host} does not see it"
            how = f"sent from rank 0 to all ranks ({reason})"
            content = _send(
                stack, archive if ranks.rank == 0 else None, ranks, options, location.url
            )
        else:
            assert archive is not None, "this rank sees the file"
            how = "mapped by every rank"
            on_this_host = [rank for rank, each in enumerate(views) if each.host == view.host]
            shard = _shard(archive, on_this_host.index(ranks.rank), len(on_this_host))
            check_and_read = partial(_check_and_read, archive, shard, options, map_weights)
            content = ranks.on_every_rank(check_and_read, f"reading {location.url}")
    return Restored(content, how, options.verify and not of_rank_zero.has_checksums)


def _check_and_read(
    archive: Archive, shard: list[ZipInfo], options: LoadOptions, map_weights: bool
) -> Any:
    if options.verify:
        archive.check(shard)
    return read(archive, options, map_weights=map_weights)


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
    except CheckpointError as error:  # the other ranks are waiting for the view
        return None, _View(host, error=error)
    status = archive.status
    file = (status.st_ino, status.st_size, status.st_mtime_ns)
    return archive, _View(host, file, archive.has_checksums)


class _StorageInfo(NamedTuple):
    """The size of a storage, and the device from which it was saved.

    The storage of a generator has no device.
    """

    size: int
    device: str | None


class _Header(NamedTuple):
    """A checkpoint without the bytes of its storages."""

    pickled: bytes
    storages: list[_StorageInfo]


@dataclass(frozen=True)
class _Source:
    """The checkpoint on rank 0.

    Attributes:
        header: what rank 0 sends first.
        storages: what it sends then, mapped from the file.
        check: the running check of the file.
    """

    header: _Header
    storages: list[UntypedStorage]
    check: Future[None]


def _send(
    stack: ExitStack, archive: Archive | None, ranks: Ranks, options: LoadOptions, name: str
) -> Any:
    """Return the content of rank 0's file; other ranks pass no archive.

    Rank 0 checks it while sending the tensors. Collective.
    """
    what = f"reading {name}"
    threads = ThreadPoolExecutor(1)
    stack.callback(threads.shutdown, wait=False)  # after an error, do not wait for the check
    source = ranks.on_every_rank(
        lambda: None if archive is None else _split_file(archive, options, threads), what
    )
    header: _Header = ranks.from_rank_zero(None if source is None else source.header)
    received: list[UntypedStorage] = []
    ranks.broadcast(_make_blocks(header, source, received))
    return ranks.on_every_rank(lambda: _join(header, source, received, options, name), what)


def _split_file(archive: Archive, options: LoadOptions, threads: ThreadPoolExecutor) -> _Source:
    """Split rank 0's file into a header and storages, and start to check the latter."""
    if options.verify:
        archive.check(())
    devices: dict[object, str] = {}

    def record_device(storage: UntypedStorage, device: str) -> UntypedStorage:
        devices[identity_of(storage)] = device
        return storage

    content = load(archive, record_device, options.weights_only, mmap=True)
    pickled, storages = split(content)
    check = threads.submit(archive.check if options.verify else lambda: None)
    infos = [_StorageInfo(each.nbytes(), devices.get(identity_of(each))) for each in storages]
    return _Source(_Header(pickled, infos), storages, check)


def _make_blocks(
    header: _Header, source: _Source | None, received: list[UntypedStorage]
) -> Iterator[Tensor]:
    """Yield the memory of storages to broadcast, and add its slices to ``received``.

    Rank 0 copies its storages there.
    """
    for sizes in _blocks([info.size for info in header.storages]):
        block = UntypedStorage(sum(map(aligned, sizes)))
        for slice_ in slices_of(block, sizes):
            if source is not None:
                slice_.copy_(source.storages[len(received)])
            received.append(slice_)
        yield bytes_of(block)


def _join(
    header: _Header,
    source: _Source | None,
    received: list[UntypedStorage],
    options: LoadOptions,
    name: str,
) -> Any:
    """Return the checkpoint with its storages on their devices, if the file is intact."""
    if source is not None:
        source.check.result()
    place = placement(options.map_location)
    storages = [
        storage if info.device is None else place(storage, info.device)
        for storage, info in zip(received, header.storages, strict=True)
    ]
    with reading(name):
        return join(header.pickled, storages)


def _blocks(sizes: list[int]) -> Iterator[list[int]]:
    """Split sizes into blocks of tensors that are sent together."""
    block: list[int] = []
    total = 0
    for size in sizes:
        if block and total + aligned(size) > _BLOCK_BYTES:
            yield block
            block = []
            total = 0
        block.append(size)
        total += aligned(size)
    yield block


def _shard(archive: Archive, index: int, count: int) -> list[ZipInfo]:
    """Return the tensors that one of ``count`` ranks with the same file must check."""
    return sorted(archive.tensors, key=lambda record: record.file_size, reverse=True)[index::count]
