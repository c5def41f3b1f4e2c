"""Read this rank's collectives, finished or not, from torch's Flight Recorders.

torch keeps the latest collectives of all NCCL groups in one ring buffer, and those of
other groups in another. An environment variable enables both; torch reads it at the
first collective of a process.
"""

from __future__ import annotations

import math
import os
import pickle
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp_ext.supervision.stacks import call_site_in
from lightning_ddp_ext.threads import start_thread

_SIZE = "2000"  # torch's default, in versions that have one
_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Collectives to keep for each group; ranks that wait for each other are a few apart.
_RECENT = 32
_DEFAULT_GROUP = "default_pg"
# The recorder of gloo and others, and that of NCCL, which builds without CUDA lack.
_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")
_DUMPED_WITHIN = 2.0  # seconds; shorter than the time in which a rank must reply to a survey
# Functions on the stack of a collective that reveal its purpose: a part of the file's
# path, and the name, if any.
_PURPOSES = (
    ("", "log_dir", "property"),
    ("/lightning_ddp_ext/reductions/", "", "logged values"),
    ("/torchmetrics/", "", "metric"),
    ("/torch/autograd/", "", "backward"),
)


@dataclass(frozen=True)
class Collective:
    """A collective that this rank entered."""

    name: str
    """The function, such as ``all_reduce``."""
    shapes: str = ""
    """The shapes of its inputs."""
    elements: int = 0
    """The number of elements of its inputs."""
    place: str = ""
    """File and line in the user's code."""
    purpose: str = ""
    """Its purpose, as far as its stack reveals it."""


@dataclass(frozen=True)
class Flight:
    """The progress of a rank in a process group.

    Its collectives are numbered from 1, in the same way on all ranks.
    """

    group: str
    """The key of the group, the same on all ranks."""
    label: str
    """Its name in messages; empty for the default group."""
    entered: int
    """The number of the last collective that this rank entered."""
    pending: int | None = None
    """The number of the first collective that this rank has entered and not finished.
    """
    recent: dict[str, Collective] = field(default_factory=dict)
    """The latest collectives, by number."""
    members: list[int] = field(default_factory=list)
    """The ranks of the group, if known."""
    seconds: float = 0.0
    """The time since it entered the first collective that is not finished, otherwise
    the last one.
    """
    limit: float = math.inf
    """The timeout of that collective, in seconds."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Flight:
        """Restore a flight from the result of ``dataclasses.asdict``."""
        recent = {number: Collective(**each) for number, each in values["recent"].items()}
        return cls(**{**values, "recent": recent})

    def is_awaited(self, number: int, rank: int, its: Flight | None) -> bool:
        """Whether a rank is a member that has not entered collective ``number``.

        ``its`` is the progress of that rank in the group, if known.
        """
        is_member = its is not None or not self.label or rank in self.members
        return is_member and (its is None or its.entered < number)

    def collective(self, number: int) -> Collective:
        """Return a collective by its number."""
        return self.recent.get(str(number), Collective("a collective"))

    def describe(self, number: int) -> str:
        """Describe a collective for messages."""
        collective = self.collective(number)
        shapes = f" {collective.shapes}" if collective.shapes else ""
        within = f" of group {self.label}" if self.label else ""
        return f"{collective.name} #{number}{shapes}{within}"


def enable() -> dict[str, str]:
    """Have torch record the collectives of groups that are formed from now on.

    Do nothing if the user has set a size.

    Returns:
        The variables that were set.
    """
    added = {} if any(name in os.environ for name in _VARIABLES) else {_VARIABLES[0]: _SIZE}
    os.environ.update(added)
    return added


def unfinished() -> list[str]:
    """Return the groups in which this rank is in a collective, each with its progress.

    This takes no time to speak of: it reads no collectives and no CUDA events.
    """
    found = []
    for recorder in _RECORDERS:
        with suppress(Exception):  # as in `_read`
            groups = _dump(recorder, False)["pg_status"]
            for group, status in groups.items():
                done = int(status["last_completed_collective"])
                # NCCL counts sends and receives apart, but reports both here.
                if int(status["last_enqueued_collective"]) != done:
                    found.append(f"{recorder} {group} {done}")
    return found


def flights() -> list[Flight]:
    """Return this rank's progress in each group, as far as torch reports it in time."""
    found: dict[str, list[Flight]] = {}
    for recorder in _RECORDERS:
        # NCCL's recorder queries CUDA for the state of events, which may block.
        if not any(thread.name == recorder for thread in threading.enumerate()):
            start_thread(recorder, _read, recorder, found).join(_DUMPED_WITHIN)
    return list(
        {flight.group: flight for recorder in list(found) for flight in found[recorder]}.values()
    )


def _read(recorder: str, found: dict[str, list[Flight]]) -> None:
    with suppress(Exception):  # missing, or in an unknown format; the report works without it
        found[recorder] = flights_in(_dump(recorder, True), _members())


def _dump(recorder: str, has_collectives: bool) -> Any:
    """Return a recorder's contents, with or without collectives and Python stacks."""
    dump = getattr(torch._C._distributed_c10d, recorder)
    return pickle.loads(dump(has_collectives, has_collectives, False))


def _members() -> dict[str, list[int]]:
    names = dist.distributed_c10d._world.pg_names
    return {name: dist.get_process_group_ranks(group) for group, name in list(names.items())}


def flights_in(trace: Mapping[str, Any], members: Mapping[str, list[int]]) -> list[Flight]:
    """Return the progress in each group from a trace, whose entries are in order.

    >>> entry = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce"}
    >>> entry |= {"input_sizes": [[4]], "state": "scheduled"}
    >>> entries = [{**entry, "collective_seq_id": n, "retired": n < 2} for n in (1, 2, 3)]
    >>> (flight,) = flights_in({"entries": entries}, {"0": [0, 1]})
    >>> flight.entered, flight.pending, flight.describe(2), flight.members
    (3, 2, 'all_reduce #2 [[4]]', [0, 1])
    """
    by_group: dict[str, dict[int, Mapping[str, Any]]] = {}
    ids: dict[str, int | None] = {}
    sent: dict[str, int | None] = {}  # the id of the last send or receive
    for entry in trace.get("entries", []):
        # A group may have several backends.
        backend, _, name = str(entry.get("profiling_name", "")).partition(":")
        group = f"{backend}:{entry['process_group'][0]}"
        if entry.get("is_p2p"):
            sent[group] = entry.get("op_id")
            continue
        if name == "coalesced" and group in sent and entry.get("op_id") == sent[group]:
            continue  # it joins sends and receives, and has the number of an earlier collective
        known = by_group.setdefault(group, {})
        if known and entry.get("pg_id") != ids[group]:
            known.clear()  # a new group with the name of a closed one
        ids[group] = entry.get("pg_id")
        known[int(entry["collective_seq_id"])] = entry  # coalesced collectives share a number
    return [_flight(group, entries, members) for group, entries in by_group.items()]


def _flight(
    group: str, entries: Mapping[int, Mapping[str, Any]], members: Mapping[str, list[int]]
) -> Flight:
    name = group.partition(":")[2]
    label = str(entries[max(entries)]["process_group"][1])
    pending = [number for number, entry in entries.items() if not _is_finished(entry)]
    latest = sorted(entries)[-_RECENT:]
    awaited = entries[min(pending, default=max(entries))]
    now = time.time_ns()
    return Flight(
        group,
        "" if label == _DEFAULT_GROUP else name if label in ("", "undefined") else label,
        max(entries),
        min(pending, default=None),
        {str(number): _collective(entries[number]) for number in latest},
        members.get(name, []),
        (now - awaited.get("time_created_ns", now)) / 1e9,
        awaited.get("timeout_ms", math.inf) / 1e3,
    )


def _is_finished(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _collective(entry: Mapping[str, Any]) -> Collective:
    name = str(entry.get("profiling_name", "")).rpartition(":")[2]
    sizes = entry.get("input_sizes") or []
    stack = entry.get("frames", [])
    return Collective(
        name,
        str(sizes) if sizes else "",
        sum(math.prod(size) for size in sizes),
        call_site_in((frame["filename"], frame["line"]) for frame in stack),
        _purpose_in(stack),
    )


def _purpose_in(stack: list[dict[str, Any]]) -> str:
    for part, function, purpose in _PURPOSES:
        if any(part in frame["filename"] and function in ("", frame["name"]) for frame in stack):
            return purpose
    return ""
