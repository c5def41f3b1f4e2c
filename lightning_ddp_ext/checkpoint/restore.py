"""Read a checkpoint on all ranks, from its disk once: each maps the same file, or receives what rank 0 has read.

Where every rank sees the same file as rank 0, or one of the same content, each maps it: no memory is taken, and the
pages are shared. If any rank does not see it, all receive it from rank 0, see
:mod:`~lightning_ddp_ext.checkpoint.transfer`.

Each step ends alike on every rank: with what it is for, or with the error of the first rank that failed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

from lightning_ddp_ext.checkpoint.archive import Archive, Record, open_archive
from lightning_ddp_ext.checkpoint.device_map import placement
from lightning_ddp_ext.checkpoint.memory_file import memory_file
from lightning_ddp_ext.checkpoint.ranks import Ranks, Show, show_nothing
from lightning_ddp_ext.checkpoint.reader import Content, read, refuse_damage
from lightning_ddp_ext.checkpoint.transfer import ReceiveInto, nowhere, transfer
from lightning_ddp_ext.checkpoint.writer import Place
from lightning_ddp_ext.errors import CheckpointError, CheckpointNotFoundError
from lightning_ddp_ext.supervision.rank_zero import side_by_side

Mode = Literal["auto", "map", "broadcast"]

_PIECE = 16 << 20


@dataclass(frozen=True)
class Wishes:
    """How a checkpoint is to be read; the same on every rank."""

    mode: Mode = "auto"
    map_location: Any = None
    weights_only: bool | None = None
    verify: bool = True


@dataclass(frozen=True)
class Restored:
    """What a restore gives each rank, and how: a sentence for the log."""

    content: Content
    how: str


def restore(
    place: Place,
    ranks: Ranks,
    wishes: Wishes,
    *,
    receive_into: ReceiveInto = nowhere,
    show: Show = show_nothing,
) -> Restored:
    """Read the checkpoint at ``place`` on every rank. Collective: every rank must call it with the same wishes.

    Args:
        place: where it is; the path may be one that only rank 0 sees.
        ranks: who reads.
        wishes: how.
        receive_into: gives this rank's own tensors for names of the file's ``state_dict``; where they fit, what rank 0
            sends is written straight into them. Called on ranks that receive, at most once.
        show: shows rank 0's progress.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """
    with _opened(place, ranks, wishes) as (archive, view):
        views = ranks.gather(view)
        how = _choose(views, wishes, place)
        if how.by_map:
            assert archive is not None, "a rank without the file cannot map it"
            content = _map(archive, views, ranks, wishes, show)
        else:
            content = _send(archive if ranks.rank == 0 else None, place, ranks, wishes, receive_into, show)
    return Restored(content, how.sentence)


# Who sees what.


@dataclass(frozen=True)
class _View:
    """What one rank sees at the path."""

    host: str
    file: tuple[int, ...] | None = None
    """Device, inode, size and time of change: equal only for one and the same file, as seen from one host."""
    fingerprint: str | None = None
    error: Exception | None = None

    def is_same_as(self, other: _View) -> bool:
        if self.file is None or other.file is None:
            return False
        same_file = self.host == other.host and self.file == other.file
        return same_file or (self.fingerprint is not None and self.fingerprint == other.fingerprint)


@contextmanager
def _opened(place: Place, ranks: Ranks, wishes: Wishes) -> Iterator[tuple[Archive | None, _View]]:
    """The checkpoint as this rank sees it; nothing on a rank that is to receive it. Errors are in the view."""
    if place.local is not None:
        yield _looked(str(place.local), place)
    elif ranks.rank != 0 and wishes.mode != "map":
        yield None, _View(socket.gethostname())
    else:
        with memory_file() as (file, path):
            try:
                _fetch(place, file)
            except Exception as error:  # of whatever kind: the other ranks wait to hear of it
                yield None, _View(socket.gethostname(), error=_fetch_error(error, place))
            else:
                yield _looked(path, place)


def _fetch(place: Place, file: BinaryIO) -> None:
    """Copy an object of a store elsewhere."""
    with place.fs.open(place.path, "rb") as remote:
        while piece := remote.read(_PIECE):
            file.write(piece)


def _fetch_error(error: Exception, place: Place) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointNotFoundError(f"checkpoint {place.url} does not exist; give the path of a file")
    return CheckpointError(f"checkpoint {place.url} cannot be fetched: {type(error).__name__}: {error}")


def _looked(source: str, place: Place) -> tuple[Archive | None, _View]:
    host = socket.gethostname()
    try:
        archive = open_archive(source, place.url)
        status = os.stat(source)
    except (CheckpointError, OSError) as error:
        return None, _View(host, error=error)
    identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return archive, _View(host, identity, archive.fingerprint)


@dataclass(frozen=True)
class _How:
    by_map: bool
    sentence: str


def _choose(views: list[_View], wishes: Wishes, place: Place) -> _How:
    first = views[0]
    if first.error is not None:
        raise first.error
    blind = [rank for rank, view in enumerate(views) if not view.is_same_as(first)]
    if wishes.mode == "map" and blind:
        rank, view = blind[0], views[blind[0]]
        if view.error is not None:
            raise type(view.error)(f"rank {rank} (host {view.host}): {view.error}; or use restore='auto'")
        raise CheckpointError(
            f"checkpoint {place.url} of rank {rank} (host {view.host}) is another file than that of rank 0 (host "
            f"{first.host}), and restore='map' has each rank read its own; copy it again, or use restore='auto'"
        )
    if wishes.mode == "broadcast" or blind:
        why = f"rank {blind[0]} on host {views[blind[0]].host} does not see it" if blind else "as asked for"
        return _How(False, f"sent from rank 0 to all ({why})")
    return _How(True, "mapped by every rank")


# Each rank maps the file.


def _map(archive: Archive, views: list[_View], ranks: Ranks, wishes: Wishes, show: Show) -> Content:
    """Every rank unpickles; those of a host share the checking of the tensors among them."""

    def read_and_check() -> Content:
        content = read(archive, placement(wishes.map_location), weights_only=wishes.weights_only, verify=wishes.verify)
        if wishes.verify:
            share, of = _place_on_host(views, ranks.rank)
            records = shares(archive.tensor_data, of)[share]
            with show("verifying", sum(record.size for record in records)) as on_progress:
                refuse_damage(content, records, threads=threads_for(of), on_progress=on_progress)
        return content

    return side_by_side(read_and_check, rank=ranks.rank, gather=ranks.gather, what=f"reading {archive.name}")


def _place_on_host(views: list[_View], rank: int) -> tuple[int, int]:
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
    return max(1, min(8, len(os.sched_getaffinity(0)) // processes))


# Rank 0 sends it.


def _send(
    archive: Archive | None, place: Place, ranks: Ranks, wishes: Wishes, receive_into: ReceiveInto, show: Show
) -> Content:
    return transfer(
        archive,
        ranks,
        name=place.url,
        place=placement(wishes.map_location),
        weights_only=wishes.weights_only,
        verify=wishes.verify,
        threads=threads_for(2),
        receive_into=nowhere if wishes.map_location is not None else receive_into,
        show=show,
    )
