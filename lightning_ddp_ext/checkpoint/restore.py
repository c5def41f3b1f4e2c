"""Read a checkpoint on all ranks, from its disk once: each maps the same file, or receives what rank 0 has read.

Where every rank sees the same file as rank 0, or one of the same content, each maps it, and the ranks of a host share
the checking among them. If any rank does not see it, all receive it from rank 0. Either every rank has the checkpoint
in the end, or every rank raises the error of the first rank that failed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ddp_ext.checkpoint.broadcast import ReceiveInto, broadcast
from lightning_ddp_ext.checkpoint.collectives import Ranks, Show, show_nothing
from lightning_ddp_ext.checkpoint.load import read, refuse_damage
from lightning_ddp_ext.checkpoint.location import Location, on_local_disk
from lightning_ddp_ext.checkpoint.map_location import placement
from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record, open_archive, usable_cores
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.supervision.rank_zero import side_by_side

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


def restore(
    location: Location,
    ranks: Ranks,
    options: LoadOptions,
    *,
    receive_into: ReceiveInto | None = None,
    show: Show = show_nothing,
) -> Restored:
    """Read the checkpoint at ``location`` on every rank. Collective: every rank must call it with the same options.

    Args:
        location: where it is; the path may be one that only rank 0 sees.
        ranks: who reads.
        options: how.
        receive_into: gives this rank's own tensors for names of the file's ``state_dict``: where they fit, what rank 0
            sends is written straight into them. Only for callers that copy the weights into a model and drop them,
            because they may be mapped from the file. ``None``: all is in this process's own memory.
        show: shows rank 0's progress.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """
    receive_into = receive_into if options.map_location is None else None
    with _opened(location, ranks, options) as (archive, view):
        views = ranks.gather(view)
        by_map, how = _choose(views, options, location)
        if by_map:
            assert archive is not None, "a rank without the file cannot map it"
            value = _map(archive, views, ranks, options, receive_into is not None, show)
        else:
            value = broadcast(
                archive if ranks.rank == 0 else None,
                ranks,
                placement(options.map_location),
                name=location.url,
                weights_only=options.weights_only,
                verify=options.verify,
                receive_into=receive_into,
                show=show,
            )
    return Restored(value, how, is_checked=views[0].has_checksums or not options.verify)


# Who sees what.


@dataclass(frozen=True)
class _View:
    """What one rank sees at the path; ``file`` is equal only for one and the same file, as seen from one host."""

    host: str
    file: tuple[int, ...] | None = None
    fingerprint: str | None = None
    has_checksums: bool = False
    error: Exception | None = None

    def is_same_as(self, other: _View) -> bool:
        if self.file is None or other.file is None:
            return False
        same_file = (self.host, self.file) == (other.host, other.file)
        return same_file or (self.fingerprint is not None and self.fingerprint == other.fingerprint)


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
            view = _View(host, _identity_of(archive), archive.fingerprint, archive.has_checksums)
        except (CheckpointError, OSError) as error:  # the other ranks wait to hear of it
            yield None, _View(host, error=error)
        else:
            yield archive, view


def _identity_of(archive: Archive) -> tuple[int, ...]:
    status = os.stat(archive.path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _choose(views: list[_View], options: LoadOptions, location: Location) -> tuple[bool, str]:
    """Whether every rank maps the file, and a sentence on that."""
    first = views[0]
    if first.error is not None:
        raise first.error
    blind = [rank for rank, view in enumerate(views) if not view.is_same_as(first)]
    if options.mode == "map" and blind:
        rank, view = blind[0], views[blind[0]]
        if view.error is not None:
            raise type(view.error)(f"rank {rank} (host {view.host}): {view.error}; or use restore='auto'")
        raise CheckpointError(
            f"checkpoint {location.url} of rank {rank} (host {view.host}) is another file than that of rank 0 (host "
            f"{first.host}), and restore='map' has each rank read its own; copy it again, or use restore='auto'"
        )
    if options.mode == "broadcast" or blind:
        why = f"rank {blind[0]} on host {views[blind[0]].host} does not see it" if blind else "as asked for"
        return False, f"sent from rank 0 to all ({why})"
    return True, "mapped by every rank"


# Each rank maps the file.


def _map(
    archive: Archive, views: list[_View], ranks: Ranks, options: LoadOptions, map_weights: bool, show: Show
) -> Any:
    def check_and_read() -> Any:
        if options.verify:
            share, of = _share_on_host(views, ranks.rank)
            records = shares(archive.tensor_data, of)[share]
            with show("verifying", sum(record.size for record in records)) as on_progress:
                refuse_damage(archive, records, threads=threads_for(of), on_progress=on_progress)
        place = placement(options.map_location)
        return read(archive, place, weights_only=options.weights_only, map_weights=map_weights)

    return side_by_side(check_and_read, rank=ranks.rank, gather=ranks.gather, what=f"reading {archive.name}")


def _share_on_host(views: list[_View], rank: int) -> tuple[int, int]:
    """This rank's number among those of its host that see the same file, and how many these are."""
    mine = views[rank]
    peers = [peer for peer, view in enumerate(views) if (view.host, view.file) == (mine.host, mine.file)]
    return peers.index(rank), len(peers)


def shares(records: tuple[Record, ...], count: int) -> list[list[Record]]:
    """The records in ``count`` shares of about the same number of bytes: the largest first, to the smallest share."""
    parts: list[list[Record]] = [[] for _ in range(count)]
    sizes = [0] * count
    for record in sorted(records, key=lambda record: record.size, reverse=True):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(record)
        sizes[smallest] += record.size
    return parts


def threads_for(processes: int) -> int:
    """How many threads each of so many processes of this host may keep busy."""
    return max(1, min(8, usable_cores() // processes))
