"""Read from torch's Flight Recorders which collectives this rank entered, and which of them are finished.

torch keeps the latest collectives of all NCCL groups in one ring buffer, and those of other groups in another. An
environment variable enables both; torch reads it at the first collective of a process.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

_SIZE = "2000"  # torch's default, in versions that have one
_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
# Collectives to keep for each group: ranks that wait for each other are only a few apart.
_RECENT = 32
_DEFAULT_GROUP = "default_pg"
# The recorder of gloo and other backends, and that of NCCL, which builds without CUDA lack.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
_DUMPED_WITHIN = 2.0  # seconds; shorter than the time in which a rank must reply to a survey


@dataclass(frozen=True)
class Flight:
    """The progress of a rank in a process group; its collectives are numbered from 1, in the same way on all ranks."""

    group: str
    """The key of the group, the same on all ranks."""
    label: str
    """Its name in messages; empty for the default group."""
    entered: int
    """The number of the last collective that this rank entered."""
    pending: int | None = None
    """The number of the first collective that this rank has entered and not finished."""
    recent: dict[str, str] = field(default_factory=dict)
    """The names and shapes of the latest collectives, by number."""

    def describe(self, number: int) -> str:
        """Describe a collective for messages."""
        name, _, shapes = self.recent.get(str(number), "a collective").partition(" ")
        within = f" of group {self.label}" if self.label else ""
        return f"{name} #{number}{f' {shapes}' if shapes else ''}{within}"


def enable() -> dict[str, str]:
    """Have torch record the collectives of groups formed from now on, unless the user has set a size.

    Returns:
        The variables that were set.
    """
    added = {} if any(name in os.environ for name in _VARIABLES) else {_VARIABLES[0]: _SIZE}
    os.environ.update(added)
    return added


def flights() -> list[Flight]:
    """Return this rank's progress in each process group, as far as torch records it and replies in time."""
    found: dict[str, list[Flight]] = {}
    for recorder in _RECORDERS:
        # NCCL's recorder queries CUDA for the state of events, which may block.
        if not any(thread.name == recorder for thread in threading.enumerate()):
            reader = threading.Thread(target=_read, args=[recorder, found], name=recorder, daemon=True)
            reader.start()
            reader.join(_DUMPED_WITHIN)
    return list({flight.group: flight for recorder in list(found) for flight in found[recorder]}.values())


def _read(recorder: str, found: dict[str, list[Flight]]) -> None:
    with suppress(Exception):  # missing, or in an unknown format; the report works without it
        dump = getattr(torch._C._distributed_c10d, recorder)
        found[recorder] = flights_in(json.loads(dump()))


def flights_in(trace: Mapping[str, Any]) -> list[Flight]:
    """Return the progress in each group from a recorder's trace, whose entries are in order.

    >>> entry = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:all_reduce", "input_sizes": [[4]]}
    >>> entries = [{**entry, "collective_seq_id": n, "retired": n < 2, "state": "scheduled"} for n in (1, 2, 3)]
    >>> (flight,) = flights_in({"entries": entries})
    >>> flight.entered, flight.pending, flight.describe(2)
    (3, 2, 'all_reduce #2 [[4]]')
    """
    by_group: dict[str, dict[int, Mapping[str, Any]]] = {}
    for entry in trace.get("entries", []):
        if not entry.get("is_p2p"):
            backend = str(entry.get("profiling_name", "")).partition(":")[0]  # a group may have several backends
            known = by_group.setdefault(f"{backend}:{entry['process_group'][0]}", {})
            number = int(entry["collective_seq_id"])
            same = known.get(number)
            is_coalesced = same is not None and same.get("op_id") == entry.get("op_id")
            if number <= max(known, default=0) and not is_coalesced:
                known.clear()  # a new group with the name of a closed one
            known[number] = entry
    return [_flight(group, entries) for group, entries in by_group.items()]


def _flight(group: str, entries: Mapping[int, Mapping[str, Any]]) -> Flight:
    label = str(entries[max(entries)]["process_group"][1])
    pending = [number for number, entry in entries.items() if not _is_finished(entry)]
    latest = sorted(entries)[-_RECENT:]
    return Flight(
        group,
        "" if label == _DEFAULT_GROUP else group.partition(":")[2] if label in ("", "undefined") else label,
        max(entries),
        min(pending, default=None),
        {str(number): _described(entries[number]) for number in latest},
    )


def _is_finished(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _described(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "")).rpartition(":")[2]
    return f"{name} {entry.get('input_sizes') or ''}".strip()
