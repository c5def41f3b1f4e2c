"""Read a checkpoint on all ranks, from its disk once: each maps the same file, or receives what rank 0 has read.

Where every rank sees the same file as rank 0, or one of the same content, each maps it, and the ranks of a host share
the checking among them. If any rank does not see it, all receive it from rank 0. Either every rank has the checkpoint
in the end, or every rank raises the error of the first rank that failed.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lightning_ddp_ext.checkpoint.broadcast import broadcast
from lightning_ddp_ext.checkpoint.collectives import Ranks
from lightning_ddp_ext.checkpoint.load import LoadOptions, read, refuse_damage
from lightning_ddp_ext.checkpoint.location import Location, on_local_disk
from lightning_ddp_ext.checkpoint.zip_crc import Archive, open_archive
from lightning_ddp_ext.errors import CheckpointError


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
        The checkpoint; how it has come here, in words for the log; and whether all of it was checked, or nobody wanted
        that.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """
    with ExitStack() as stack:
        archive, view = _open(stack, location, ranks, options)
        views = ranks.gather(view)
        blind = _without_rank_zeros_file(views, options, location)

        def read_own() -> Any:
            assert archive is not None, "a rank without the file cannot map it"
            if options.verify:
                same = [rank for rank, other in enumerate(views) if (other.host, other.file) == (view.host, view.file)]
                largest_first = sorted(archive.tensor_data, key=lambda record: record.size, reverse=True)
                own_share = largest_first[same.index(ranks.rank) :: len(same)]
                refuse_damage(archive, own_share)
            return read(archive, options, map_weights=map_weights)

        if options.mode == "broadcast" or blind:
            why = f"rank {blind[0]} on host {views[blind[0]].host} does not see it" if blind else "as asked for"
            how = f"sent from rank 0 to all ({why})"
            value = broadcast(archive if ranks.rank == 0 else None, ranks, options, name=location.url)
        else:
            how = "mapped by every rank"
            value = ranks.on_every_rank(read_own, f"reading {location.url}")
    return value, how, views[0].has_checksums or not options.verify


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


def _open(stack: ExitStack, location: Location, ranks: Ranks, options: LoadOptions) -> tuple[Archive | None, _View]:
    """The checkpoint as this rank sees it; nothing on a rank that is to receive it. An error is in the view."""
    host = socket.gethostname()
    if location.local is None and ranks.rank != 0 and options.mode != "map":
        return None, _View(host)
    try:
        archive = open_archive(stack.enter_context(on_local_disk(location)), location.url)
        status = os.stat(archive.path)
    except (CheckpointError, OSError) as error:  # the other ranks wait to hear of it
        return None, _View(host, error=error)
    file = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    return archive, _View(host, file, archive.fingerprint or (host, file), archive.has_checksums)


def _without_rank_zeros_file(views: list[_View], options: LoadOptions, location: Location) -> list[int]:
    """The ranks that do not see what rank 0 does; refuses a file that cannot be read as was asked."""
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
    return blind
