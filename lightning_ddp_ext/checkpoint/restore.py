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

from lightning_ddp_ext.checkpoint.broadcast import broadcast
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
    with _opened(location, ranks, options) as (archive, view):
        views = ranks.gather(view)
        is_mapped, how = _choose(views, options, location)
        place = placement(options.map_location)

        def read_own() -> Any:
            assert archive is not None, "a rank without the file cannot map it"
            if options.verify:
                number, count = _position_on_host(views, ranks.rank)
                refuse_damage(archive, share_of(archive.tensor_data, number, count), threads=threads_for(count))
            mapped = map_weights and options.map_location is None
            return read(archive, place, weights_only=options.weights_only, map_weights=mapped)

        if is_mapped:
            value = ranks.on_every_rank(read_own, f"reading {location.url}")
        else:
            value = broadcast(
                archive if ranks.rank == 0 else None,
                ranks,
                place,
                name=location.url,
                weights_only=options.weights_only,
                verify=options.verify,
            )
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


def _choose(views: list[_View], options: LoadOptions, location: Location) -> tuple[bool, str]:
    """Whether every rank maps the file, and a sentence on that."""
    first = views[0]
    if first.error is not None:
        raise first.error
    blind = [rank for rank, view in enumerate(views) if view.content != first.content]
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


def _position_on_host(views: list[_View], rank: int) -> tuple[int, int]:
    """This rank's number among those of its host that see the same file, and how many these are."""
    mine = (views[rank].host, views[rank].file)
    peers = [peer for peer, view in enumerate(views) if (view.host, view.file) == mine]
    return peers.index(rank), len(peers)


def share_of(records: tuple[Record, ...], number: int, count: int) -> list[Record]:
    """One of ``count`` shares of the records, which are of about the same number of bytes."""
    return sorted(records, key=lambda record: record.size, reverse=True)[number::count]
