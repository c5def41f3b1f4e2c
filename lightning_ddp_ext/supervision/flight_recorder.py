"""Read this rank's collectives, finished or not, from torch's Flight Recorders.

torch keeps the latest collectives of all NCCL groups in one ring buffer, and those of
other groups in another. Both are on by default since torch 2.11; before, they need
``TORCH_FR_BUFFER_SIZE``, which torch reads when a process forms its first group.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp_ext.supervision.stacks import call_site_in
from lightning_ddp_ext.threads import start_thread

# Functions whose inputs must have the same number of elements on all ranks.
_OF_SAME_SIZE = ("all_reduce", "broadcast", "reduce")
# Collectives to keep for each group; ranks that wait for each other are a few apart.
_RECENT = 32
_DEFAULT_GROUP = "default_pg"
# The recorder of gloo and others, and that of NCCL, which builds without CUDA lack.
_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
_DUMPED_WITHIN = 2.0  # seconds; shorter than the time in which a rank must push its status
# The share of its timeout after which a collective counts as timed out. A rank may have
# entered its last collective a little after the one that timed out.
_SHARE_OF_TIMEOUT = 0.9

_Entry = Mapping[str, Any]  # of a collective, send or receive, in a recorder's contents


@dataclass(frozen=True)
class Collective:
    """A collective that this rank entered."""

    text: str
    """Its function, number, shapes and group, for messages."""
    signature: str = ""
    """What must be the same on all ranks: its function, and for some the number of elements."""
    place: str = ""
    """File and line in the user's code."""


@dataclass(frozen=True)
class GroupProgress:
    """The collectives of a rank in a process group.

    They are numbered from 1, in the same way on all ranks.
    """

    group: str
    """The key of the group, the same on all ranks."""
    label: str
    """Its name in messages; empty for the default group."""
    entered: int
    """The number of the last collective that this rank entered."""
    pending: int = 0
    """The number of the first collective that this rank entered and has not finished; 0
    if it has finished all.
    """
    recent: dict[int, Collective] = field(default_factory=dict)
    """The latest collectives that this rank entered, by number."""
    members: list[int] = field(default_factory=list)
    """The ranks of the group, if known."""
    entered_at: float = 0.0
    """When this rank entered the pending collective, otherwise the last one, in seconds
    since the epoch.
    """
    limit: float = math.inf
    """The timeout of that collective, in seconds."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> GroupProgress:
        """Restore the progress from the result of ``dataclasses.asdict``."""
        # JSON has turned the numbers into text.
        recent = {int(number): Collective(**each) for number, each in values["recent"].items()}
        return cls(**{**values, "recent": recent})

    def collective(self, number: int) -> Collective:
        """Return a collective by its number."""
        return self.recent.get(number, Collective(f"a collective #{number}"))

    def has_member(self, rank: int) -> bool:
        """Whether a rank is in the group; every rank is in the default group."""
        return not self.label or rank in self.members


def groups_in_collectives() -> list[str]:
    """Return the groups in which this rank is in a collective, each with its progress.

    This is fast, since it reads neither collectives nor CUDA events.
    """
    groups = []
    for recorder in _RECORDERS:
        with suppress(Exception):  # as in `_read_into`
            statuses = _dump(recorder, with_collectives=False).get("pg_status", {})
            groups += [
                f"{recorder} {group} {number}"
                for group, number in last_completed_of_unfinished(statuses).items()
            ]
    return groups


def last_completed_of_unfinished(statuses: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of the last completed collective of each group with a later one.

    The numbers are only compared for equality: NCCL counts sends and receives apart, but
    reports the number of the last of all.

    >>> status = {"last_enqueued_collective": 60, "last_completed_collective": 59}
    >>> finished = {**status, "last_completed_collective": 60}
    >>> last_completed_of_unfinished({"0": status, "1": finished})
    {'0': 59}
    """
    return {
        group: int(status["last_completed_collective"])
        for group, status in statuses.items()
        if int(status["last_completed_collective"]) != int(status["last_enqueued_collective"])
    }


def read_progress() -> list[GroupProgress]:
    """Return this rank's progress in each group, as far as torch reports it in time."""
    progress: list[GroupProgress] = []
    for recorder in _RECORDERS:
        # NCCL's recorder queries CUDA for the state of events, which may block. Its thread
        # then stays, and only fills a list that is not read again.
        is_blocked = any(thread.name == recorder for thread in threading.enumerate())
        if not is_blocked:
            found: list[GroupProgress] = []
            start_thread(recorder, _read_into, found, recorder).join(_DUMPED_WITHIN)
            progress += found
    return progress


def has_timed_out(groups: Collection[GroupProgress], timeout: timedelta) -> bool:
    """Whether this rank has waited for the timeout in a collective.

    Also true if torch has not recorded any collective.
    """
    if not groups:
        return True
    now = time.time()
    # Torch may count a collective that has timed out as finished. It is then the last
    # one that this rank entered in any group.
    latest = max(groups, key=lambda progress: progress.entered_at)
    awaited = [progress for progress in groups if progress.pending or progress is latest]
    return any(
        now - progress.entered_at
        >= _SHARE_OF_TIMEOUT * min(timeout.total_seconds(), progress.limit)
        for progress in awaited
    )


def _read_into(found: list[GroupProgress], recorder: str) -> None:
    # The format is private to torch. If it changes, reports lack collectives, which tests of
    # deadlocks notice.
    with suppress(Exception):
        found.extend(progress_in(_dump(recorder, with_collectives=True), _members()))


def _dump(recorder: str, *, with_collectives: bool) -> dict[str, Any]:
    """Return a recorder's contents, with or without collectives and Python stacks.

    They are empty if this build of torch lacks the recorder.
    """
    dump = getattr(torch._C._distributed_c10d, recorder, None)
    return {} if dump is None else pickle.loads(dump(with_collectives, with_collectives, False))


def _members() -> dict[str, list[int]]:
    """Return the ranks of each process group, by its name."""
    groups = list(dist.distributed_c10d._world.pg_names.items())  # another thread may form one
    return {name: dist.get_process_group_ranks(group) for group, name in groups}


def progress_in(trace: Mapping[str, Any], members: Mapping[str, list[int]]) -> list[GroupProgress]:
    """Return the progress in each group from a recorder's contents.

    >>> entry = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce"}
    >>> entry |= {"input_sizes": [[4]], "state": "scheduled"}
    >>> entries = [{**entry, "collective_seq_id": n, "retired": n < 2} for n in (1, 2, 3)]
    >>> (progress,) = progress_in({"entries": entries}, {"0": [0, 1]})
    >>> progress.entered, progress.pending, progress.collective(2).text, progress.members
    (3, 2, 'all_reduce #2 [[4]]', [0, 1])
    """
    groups: dict[str, list[_Entry]] = {}
    for entry in trace.get("entries", []):
        # A group may have several backends.
        backend = str(entry.get("profiling_name", "")).partition(":")[0]
        groups.setdefault(f"{backend}:{entry['process_group'][0]}", []).append(entry)
    collectives = {group: _collectives_in(entries) for group, entries in groups.items()}
    return [_progress(group, each, members) for group, each in collectives.items() if each]


def _collectives_in(entries: Sequence[_Entry]) -> dict[int, _Entry]:
    """Return the collectives of a group by number, without its sends and receives.

    Coalesced collectives share a number; the last one counts.
    """
    # Earlier ones may be of a closed group that had the same name.
    own = [entry for entry in entries if entry.get("pg_id") == entries[-1].get("pg_id")]
    sends = {entry.get("op_id") for entry in own if entry.get("is_p2p")} - {None}
    return {
        int(entry["collective_seq_id"]): entry
        for entry in own
        if not entry.get("is_p2p")
        # The entry that ends coalesced sends has their operation, and the number of an
        # earlier collective.
        and not (entry.get("op_id") in sends and _function_of(entry) == "coalesced")
    }


def _progress(
    group: str, entries: Mapping[int, _Entry], members: Mapping[str, list[int]]
) -> GroupProgress:
    name = group.partition(":")[2]  # without the backend
    last = max(entries)
    unfinished = (
        number
        for number, entry in entries.items()
        if not entry.get("retired") and entry.get("state") != "completed"
    )
    pending = min(unfinished, default=0)
    current = entries[pending or last]
    label = _label_of(name, str(entries[last]["process_group"][1]))
    return GroupProgress(
        group,
        label=label,
        entered=last,
        pending=pending,
        recent={
            number: _collective(entries[number], number, label)
            for number in sorted(entries)[-_RECENT:]
        },
        members=members.get(name, []),
        entered_at=current.get("time_created_ns", time.time_ns()) / 1e9,
        limit=current.get("timeout_ms", math.inf) / 1e3,
    )


def _label_of(name: str, description: str) -> str:
    """Return how messages name a group, by the description that ``new_group`` got."""
    if description == _DEFAULT_GROUP:
        return ""
    return name if description in ("", "undefined") else description  # without a description


def _function_of(entry: _Entry) -> str:
    return str(entry.get("profiling_name", "")).rpartition(":")[2]


def _collective(entry: _Entry, number: int, label: str) -> Collective:
    name = _function_of(entry)
    sizes = entry.get("input_sizes") or []
    shapes = f" {sizes}" if sizes else ""
    group = f" of group {label}" if label else ""
    elements = sum(math.prod(size) for size in sizes)
    return Collective(
        f"{name} #{number}{shapes}{group}",
        f"{name} of {elements} elements" if name in _OF_SAME_SIZE else name,
        call_site_in((frame["filename"], frame["line"]) for frame in entry.get("frames", [])),
    )
