"""Read a checkpoint once for all ranks, from a file that all see or through rank 0.

If every rank sees rank 0's file, or a file with the same content, each rank maps it,
and the ranks of a host divide the checking among themselves. Otherwise all ranks
receive the tensors from rank 0. Either every rank gets the checkpoint, or every rank
raises the error of the first rank that failed.
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

# Small tensors are sent together in blocks of at most this many bytes.
_TOGETHER = 1 << 20


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
        path, view = _open(stack, location, ranks, options)
        views = ranks.gather(view)
        missing = _ranks_without_file(views, options, location)
        if ranks.world_size > 1 and (options.mode == "broadcast" or missing):
            why = (
                f"rank {missing[0]} on host {views[missing[0]].host} does not see it"
                if missing
                else "as requested"
            )
            how = f"sent from rank 0 to all ranks ({why})"
            value = _send(stack, path, ranks, options, location.url)
        else:
            how = "mapped by every rank"
            peers = [
                peer
                for peer, each in enumerate(views)
                if (each.host, each.file) == (view.host, view.file)
            ]

            def read_own() -> Any:
                archive = Archive.open(path, location.url)
                if options.verify:
                    archive.check(_shard(archive, peers.index(ranks.rank), len(peers)))
                return read(archive, options, map_weights=map_weights)

            value = ranks.on_every_rank(read_own, f"reading {location.url}")
    return value, how, views[0].has_checksums or not options.verify


@dataclass(frozen=True)
class _View:
    """The file that one rank sees at the path.

    Attributes:
        host: the name of the rank's host.
        file: equal for ranks of the same host that see the same file.
        content: equal for files with the same content, as far as that is known.
        size: the size of the file in bytes.
        has_checksums: whether every record has a checksum.
        error: the reason why the rank cannot read the file.
    """

    host: str
    file: tuple[int, ...] = ()
    content: Any = None
    size: int = 0
    has_checksums: bool = False
    error: Exception | None = None


def _open(
    stack: ExitStack, location: Location, ranks: Ranks, options: LoadOptions
) -> tuple[str, _View]:
    """Return the path at which this rank can open the checkpoint, and its view.

    The view includes the error if the rank cannot open it.
    """
    host = socket.gethostname()
    if location.local is None and ranks.rank != 0 and options.mode != "map":
        return "", _View(host)
    try:
        with reading(location.url):
            archive = Archive.open(stack.enter_context(on_local_disk(location)), location.url)
            status = os.stat(archive.path)
    except CheckpointError as error:  # the other ranks are waiting for the view
        return "", _View(host, error=error)
    file = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    view = _View(
        host, file, archive.fingerprint or (host, file), archive.size, archive.has_checksums
    )
    return archive.path, view


def _ranks_without_file(views: list[_View], options: LoadOptions, location: Location) -> list[int]:
    """Return the ranks that do not see rank 0's file.

    Raise if the file cannot be read in the requested mode.
    """
    first = views[0]
    if first.error is not None:
        raise first.error
    without_file = [rank for rank, view in enumerate(views) if view.content != first.content]
    if options.mode == "map" and without_file:
        rank = without_file[0]
        view = views[without_file[0]]
        if view.error is not None:
            raise type(view.error)(
                f"rank {rank} (host {view.host}): {view.error}; or use restore='auto'"
            )
        raise CheckpointError(
            f"checkpoint {location.url} on rank {rank} (host {view.host}) differs from rank 0's"
            f" file (host {first.host}), but restore='map' needs identical files; copy the file"
            " again, or use restore='auto'"
        )
    return without_file


def _send(stack: ExitStack, path: str, ranks: Ranks, options: LoadOptions, name: str) -> Any:
    """Return the content of rank 0's file.

    Rank 0 checks it while sending the tensors. Collective.
    """
    what = f"reading {name}"
    threads = ThreadPoolExecutor(1)
    stack.callback(threads.shutdown, wait=False)  # after an error, do not wait for the check
    storages: list[UntypedStorage] = []
    # the devices of the saved tensors; a generator's state has none
    devices: dict[object, str] = {}

    def note_device(storage: UntypedStorage, device: str) -> UntypedStorage:
        devices[identity_of(storage)] = device
        return storage

    def open_on_rank_zero() -> Any:
        if ranks.rank != 0:
            return None
        archive = Archive.open(path, name)
        if options.verify:
            archive.check(())
        pickled, storages[:] = split(load(archive, note_device, options.weights_only, mmap=True))
        checking = threads.submit(archive.check if options.verify else lambda: None)
        return checking, (
            pickled,
            [(each.nbytes(), devices.get(identity_of(each))) for each in storages],
        )

    checking, header = ranks.on_every_rank(open_on_rank_zero, what) or (None, None)
    pickled, kinds = ranks.from_rank_zero(header)
    own: list[UntypedStorage] = []

    def make_blocks() -> Iterator[Tensor]:
        for sizes in _blocks([size for size, _ in kinds]):
            block = UntypedStorage(sum(map(aligned, sizes)))
            for slice_ in slices_of(block, sizes):
                if ranks.rank == 0:
                    slice_.copy_(storages[len(own)])
                own.append(slice_)
            yield bytes_of(block)

    ranks.broadcast(make_blocks())

    def place_and_join() -> Any:
        if checking is not None:
            checking.result()
        place = placement(options.map_location)
        pairs = zip(own, kinds, strict=True)
        with reading(name):
            return join(
                pickled,
                [place(storage, device) if device else storage for storage, (_, device) in pairs],
            )

    return ranks.on_every_rank(place_and_join, what)


def _blocks(sizes: list[int]) -> Iterator[list[int]]:
    """Split sizes into blocks of tensors that are sent together.

    Each broadcast has a delay.
    """
    block: list[int] = []
    for size in sizes:
        if block and sum(block) + size > _TOGETHER:
            yield block
            block = []
        block.append(size)
    yield block


def _shard(archive: Archive, index: int, count: int) -> list[ZipInfo]:
    """Return the tensors that one of ``count`` ranks with the same file must check."""
    return sorted(archive.tensors, key=lambda record: record.file_size, reverse=True)[index::count]
