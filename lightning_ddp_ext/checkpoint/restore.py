"""Read a checkpoint once for all ranks: each maps the same file, or receives what rank 0 read.

If every rank sees the same file as rank 0, or one of the same content, each maps it, and the ranks of a host share the
checking among them. If any rank does not see it, all receive it from rank 0. Either every rank gets the checkpoint, or
every rank raises the error of the first rank that failed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_ddp_ext.checkpoint.load import LoadOptions, load, placement, read, refuse_damage
from lightning_ddp_ext.checkpoint.location import Location, on_local_disk
from lightning_ddp_ext.checkpoint.snapshot import bytes_of, identity_of, join, split
from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record, open_archive, reading
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.ranks import Ranks

# Bytes: small tensors travel together up to this size.
_TOGETHER = 4 << 20


def restore(
    location: Location, ranks: Ranks, options: LoadOptions, *, map_weights: bool = False
) -> tuple[Any, str, bool]:
    """Read the checkpoint at ``location`` on every rank. Collective: every rank must call it with the same options.

    Args:
        location: where it is; the path may be one that only rank 0 sees.
        ranks: who reads.
        options: how.
        map_weights: whether the ``state_dict`` may be mapped from the file. Only for callers that copy the weights into
            a model and drop them; all else is in this process's own memory.

    Returns:
        The checkpoint; how it was read, in words for the log; and whether all of it was checked, unless ``verify`` is
        off.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """
    with ExitStack() as stack:
        archive, view = _open(stack, location, ranks, options)
        views = ranks.gather(view)
        missing = _ranks_without_file(views, options, location)

        def read_own() -> Any:
            assert archive is not None, "a rank without the file cannot map it"
            if options.verify:
                refuse_damage(archive, _own_shard(archive, views, ranks.rank))
            return read(archive, options, map_weights=map_weights)

        if options.mode == "broadcast" or missing:
            why = f"rank {missing[0]} on host {views[missing[0]].host} does not see it" if missing else "as asked for"
            how = f"sent from rank 0 to all ({why})"
            value = broadcast(archive if ranks.rank == 0 else None, ranks, options, name=location.url)
        else:
            how = "mapped by every rank"
            value = ranks.on_every_rank(read_own, f"reading {location.url}")
    return value, how, views[0].has_checksums or not options.verify


@dataclass(frozen=True)
class _View:
    """The file that one rank sees at the path.

    Attributes:
        host: where it is.
        file: equal for one and the same file, as seen from one host.
        content: equal for files of equal content, whatever host they are on, as far as that can be told.
        has_checksums: whether that of all of its content can be told.
        error: why it sees none.
    """

    host: str
    file: tuple[int, ...] = ()
    content: Any = None
    has_checksums: bool = False
    error: Exception | None = None


def _open(stack: ExitStack, location: Location, ranks: Ranks, options: LoadOptions) -> tuple[Archive | None, _View]:
    """Open the checkpoint, unless this rank is to receive it; an error is part of the view."""
    host = socket.gethostname()
    if location.local is None and ranks.rank != 0 and options.mode != "map":
        return None, _View(host)
    try:
        with reading(location.url):
            archive = open_archive(stack.enter_context(on_local_disk(location)), location.url)
            status = os.stat(archive.path)
    except CheckpointError as error:  # the other ranks wait for the view
        return None, _View(host, error=error)
    file = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return archive, _View(host, file, archive.fingerprint or (host, file), archive.has_checksums)


def _ranks_without_file(views: list[_View], options: LoadOptions, location: Location) -> list[int]:
    """Return the ranks that do not see rank 0's file; refuse a file that cannot be read in the requested mode."""
    first = views[0]
    if first.error is not None:
        raise first.error
    without_file = [rank for rank, view in enumerate(views) if view.content != first.content]
    if options.mode == "map" and without_file:
        rank, view = without_file[0], views[without_file[0]]
        if view.error is not None:
            raise type(view.error)(f"rank {rank} (host {view.host}): {view.error}; or use restore='auto'")
        raise CheckpointError(
            f"checkpoint {location.url} of rank {rank} (host {view.host}) is another file than that of rank 0 (host "
            f"{first.host}), and restore='map' has each rank read its own; copy it again, or use restore='auto'"
        )
    return without_file


def _own_shard(archive: Archive, views: list[_View], rank: int) -> list[Record]:
    """Return the records that this rank checks: the ranks of a host that see the same file share them out."""
    mine = (views[rank].host, views[rank].file)
    peers = [peer for peer, view in enumerate(views) if (view.host, view.file) == mine]
    largest_first = sorted(archive.tensor_data, key=lambda record: record.size, reverse=True)
    return largest_first[peers.index(rank) :: len(peers)]


def broadcast(archive: Archive | None, ranks: Ranks, options: LoadOptions, *, name: str) -> Any:
    """Read the checkpoint on rank 0 and give it to every rank. Collective: every rank must call it.

    Rank 0 checks what it sends while it sends it.

    Args:
        archive: the file, on rank 0 alone.
        ranks: who reads.
        options: how.
        name: what the user calls the file.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """

    def flatten() -> tuple[Any, list[UntypedStorage]]:
        return (None, []) if archive is None else _flatten(archive, options)

    manifest, storages = ranks.on_every_rank(flatten, f"reading {name}")
    pickled, pieces = ranks.from_rank_zero(manifest)

    def allocate() -> list[UntypedStorage]:
        with reading(name):
            return [UntypedStorage(size) for size, _ in pieces] if archive is None else storages

    storages = ranks.on_every_rank(allocate, f"reading {name}")
    check = None
    with ThreadPoolExecutor(1, thread_name_prefix="ddpx-verify") as pool:
        if archive is not None and options.verify:
            check = pool.submit(refuse_damage, archive, archive.tensor_data)
        send([bytes_of(storage) for storage in storages], ranks)

    def unflatten() -> Any:
        if check is not None:
            check.result()
        place = placement(options.map_location)
        with reading(name):
            own = storages if archive is None else [storage.clone() for storage in storages]  # they are in the file
            return join(pickled, [place(storage, device) for storage, (_, device) in zip(own, pieces, strict=True)])

    return ranks.on_every_rank(unflatten, f"reading {name}")


def _flatten(archive: Archive, options: LoadOptions) -> tuple[Any, list[UntypedStorage]]:
    """Return what other ranks need before the first tensor arrives, and the memory of tensors, in the file.

    They need the pickled rest, and for each piece of memory its size in bytes and the device that it was saved from.
    """
    if options.verify:
        refuse_damage(archive, ())  # tensors are checked while they are sent
    devices: dict[tuple[str, int, int], str] = {}

    def noted(storage: UntypedStorage, location: str) -> UntypedStorage:
        devices[identity_of(storage)] = location
        return storage

    content = load(archive, noted, options.weights_only, mmap=True)
    try:
        pickled, storages = split(content)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {archive.name} cannot be sent to other ranks: {type(error).__name__}: {error}; put it where "
            "every rank sees it"
        ) from error
    pieces = [(storage.nbytes(), devices.get(identity_of(storage), "cpu")) for storage in storages]
    return (pickled, pieces), storages


def send(pieces: list[Tensor], ranks: Ranks) -> None:
    """Broadcast rank 0's bytes into those of the other ranks. Collective."""
    for group in _groups([piece for piece in pieces if piece.numel()]):
        joined = torch.cat(group) if len(group) > 1 else group[0]
        ranks.broadcast(joined)
        if len(group) > 1 and ranks.rank != 0:
            for piece, arrived in zip(group, joined.split([piece.numel() for piece in group]), strict=True):
                piece.copy_(arrived)


def _groups(pieces: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that travel together, because they are small."""
    group: list[Tensor] = []
    size = 0
    for piece in pieces:
        if group and size + piece.numel() > _TOGETHER:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.numel()
    if group:
        yield group
