"""Read a checkpoint on all ranks, from its disk once.

A rank that sees the same file as rank 0, or one of the same content, reads that; to the others rank 0 sends it. The
ranks of a host share the checking among them. Either every rank has the checkpoint in the end, or every rank raises
the error of the first rank that failed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ddp_ext.checkpoint.broadcast import received
from lightning_ddp_ext.checkpoint.collectives import Ranks
from lightning_ddp_ext.checkpoint.load import read, refuse_damage
from lightning_ddp_ext.checkpoint.location import Location, on_local_disk
from lightning_ddp_ext.checkpoint.map_location import placement
from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record, open_archive, threads_for
from lightning_ddp_ext.errors import CheckpointError

Mode = Literal["auto", "map", "broadcast"]


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is to be read; the same on every rank."""

    mode: Mode = "auto"
    map_location: Any = None
    weights_only: bool | None = None
    verify: bool = True


@dataclass(frozen=True)
class Restored:
    """What a restore gives each rank.

    Attributes:
        value: the checkpoint.
        how: how it has come here: a sentence for the log.
        is_checked: whether all of it had checksums, which were right, or nobody wanted to know.
    """

    value: Any
    how: str
    is_checked: bool


def restore(location: Location, ranks: Ranks, options: LoadOptions, *, map_weights: bool = False) -> Restored:
    """Read the checkpoint at ``location`` on every rank. Collective: every rank must call it with the same options.

    Args:
        location: where it is; the path may be one that only rank 0 sees.
        ranks: who reads.
        options: how.
        map_weights: whether the ``state_dict`` may be mapped from the file. Only for callers that copy the weights into
            a model and drop them; all else is in this process's own memory.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """
    place = placement(options.map_location)
    with _opened(location, ranks, options) as (own, view):
        views = ranks.gather(view)
        receivers = _receivers(views, options, location)
        with received(own, ranks, receivers, name=location.url) as archive:

            def check_and_read() -> Any:
                if options.verify:
                    number, count = _position(views, receivers, ranks.rank)
                    refuse_damage(archive, share_of(archive.tensor_data, number, count), threads=threads_for(count))
                mapped = map_weights and options.map_location is None
                return read(archive, place, weights_only=options.weights_only, map_weights=mapped)

            value = ranks.on_every_rank(check_and_read, f"reading {location.url}")
    how = f"sent from rank 0 to {len(receivers)} of {len(views)} ranks" if receivers else "read by every rank"
    return Restored(value, how, is_checked=views[0].has_checksums or not options.verify)


@dataclass(frozen=True)
class _View:
    """What one rank sees at the path.

    Attributes:
        host: where it is.
        file: equal for one and the same file, as seen from one host.
        content: equal for files of equal content, whatever host they are on, as far as that can be told.
        has_checksums: whether that of all of its content can be told.
        error: why it sees nothing.
    """

    host: str
    file: tuple[int, ...] = ()
    content: Any = None
    has_checksums: bool = False
    error: Exception | None = None


@contextmanager
def _opened(location: Location, ranks: Ranks, options: LoadOptions) -> Iterator[tuple[Archive | None, _View]]:
    """The checkpoint as this rank sees it; nothing on a rank that is to receive it. Errors are in the view."""
    host = socket.gethostname()
    if location.local is None and ranks.rank != 0 and options.mode != "map":
        yield None, _View(host)
        return
    with ExitStack() as stack:
        try:
            archive = open_archive(stack.enter_context(on_local_disk(location)), location.url)
            status = os.stat(archive.path)
        except (CheckpointError, OSError) as error:  # the other ranks wait to hear of it
            yield None, _View(host, error=error)
        else:
            file = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            yield archive, _View(host, file, archive.fingerprint or (host, file), archive.has_checksums)


def _receivers(views: list[_View], options: LoadOptions, location: Location) -> dict[int, str]:
    """The hosts of those ranks to which rank 0 is to send the file."""
    first = views[0]
    if first.error is not None:
        raise first.error
    others = {rank: view for rank, view in enumerate(views) if rank > 0}
    if options.mode == "broadcast":
        return {rank: view.host for rank, view in others.items()}
    blind = {rank: view for rank, view in others.items() if view.content != first.content}
    for rank, view in blind.items() if options.mode == "map" else ():
        if view.error is not None:
            raise type(view.error)(f"rank {rank} (host {view.host}): {view.error}; or use restore='auto'")
        raise CheckpointError(
            f"checkpoint {location.url} of rank {rank} (host {view.host}) is another file than that of rank 0 (host "
            f"{first.host}), and restore='map' has each rank read its own; copy it again, or use restore='auto'"
        )
    return {rank: view.host for rank, view in blind.items()}


def _position(views: list[_View], receivers: dict[int, str], rank: int) -> tuple[int, int]:
    """This rank's number among those of its host that read the same file, and how many these are."""
    files = [(view.host, None if number in receivers else view.file) for number, view in enumerate(views)]
    peers = [number for number, file in enumerate(files) if file == files[rank]]
    return peers.index(rank), len(peers)


def share_of(records: tuple[Record, ...], number: int, count: int) -> list[Record]:
    """One of ``count`` shares of the records, which are of about the same number of bytes."""
    return sorted(records, key=lambda record: record.size, reverse=True)[number::count]
