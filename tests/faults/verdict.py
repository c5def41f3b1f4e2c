"""The judge: how ranks should have ended after what has happened to one of them, and what they should have left."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ddp_ext.checkpoint.atomic_file import find_leftovers
from lightning_ddp_ext.checkpoint.zip_crc import find_damage, open_archive
from lightning_ddp_ext.errors import DamagedCheckpointError
from tests.faults.plan import ON_RANK_ZERO, SIGNALS, Injection
from tests.faults.training import JOURNAL, STATUS
from tests.harness.outcomes import name_of_status

_STATUS_OF_CULPRIT = {
    "kill": -signal.SIGKILL,
    "stop": -signal.SIGKILL,  # at last
    "vanish": 0,
    "exit": STATUS,
    "raise": 1,
    "term": -signal.SIGTERM,
    "interrupt": -signal.SIGINT,
}


@dataclass(frozen=True)
class Ending:
    """How ranks have ended: exit statuses, as far as known, and what each has written, or all of them together."""

    statuses: dict[int, int]
    stories: dict[int, str]

    def wrong_with(self, plan: Injection) -> list[str]:
        """What should be otherwise: exit statuses, and which rank has not said which one is to blame."""
        wrong = []
        for rank, status in self.statuses.items():
            if status not in _expected_statuses(plan, rank):
                wrong.append(f"rank {rank} has ended with {name_of_status(status)}")
        for rank, story in self.stories.items():
            if _must_name(plan, rank, self.statuses.get(rank)) and not _names(plan, rank, story):
                wrong.append(f"rank {rank} does not say which rank is to blame")
        return wrong


def _expected_statuses(plan: Injection, rank: int) -> set[int]:
    if plan.kind == "slow":
        return {0}
    if plan.stops_together:
        return {128 + SIGNALS[plan.kind]}
    if rank != plan.culprit or plan.kind == "cut":
        return {0, 1} if plan.is_late else {1}
    if plan.kind == "interrupt" and plan.is_late:
        return {-signal.SIGINT, 1, 130}
    if plan.kind == "interrupt" and plan.hook == "handshake":
        return {1}  # Lightning's, for Ctrl-C in a Trainer
    return {_STATUS_OF_CULPRIT[plan.kind]}


def _must_name(plan: Injection, rank: int, status: int | None) -> bool:
    """Whether a rank must say which one is to blame, as a failure of another one has ended it."""
    if plan.kind == "slow" or plan.stops_together:
        return False
    if (plan.launch, plan.hook, plan.culprit) == ("script", "begin", 0):  # the script had not started the others yet
        return False
    has_failed = not plan.is_late if status is None else status != 0
    return has_failed and (rank != plan.culprit or plan.kind == "cut")


def _names(plan: Injection, rank: int, story: str) -> bool:
    """Whether a rank's output names the culprit; a culprit that has lost sight of the others names one of those."""
    suspects = [plan.culprit] if rank != plan.culprit else [each for each in range(plan.world_size) if each != rank]
    return any(re.search(pattern, story) for suspect in suspects for pattern in _patterns(plan, suspect))


def _patterns(plan: Injection, suspect: int) -> Iterator[str]:
    yield rf"\brank {suspect} \(host"
    if plan.hook in ON_RANK_ZERO:
        yield rf"\bon rank {suspect} during"  # what rank 0 does for all fails on all
    if plan.is_unmet:
        yield rf"\branks? (\d+, )*{suspect}(, \d+)* of \d+ did not come"
        if suspect == 0:  # where the others have not found its store, or not for long
            yield r"\bfound no rank 0 at \S+ within|\brank 0 (at \S+|or its host) has gone away"
            yield r"\brank 0's process is stopped"


@dataclass(frozen=True)
class Remains:
    """Files of a run: the step of each whole checkpoint, damaged ones, what is left of saves that were cut short.

    The ``journal`` has what the ranks have written down.
    """

    steps: dict[Path, int]
    damaged: list[str]
    partial: list[str]
    journal: list[str]

    @classmethod
    def in_directory(cls, directory: Path) -> Remains:
        files = sorted(directory.glob("*.ckpt"))
        whole = [path for path in files if _is_whole(path)]
        return cls(
            {path: int(torch.load(path, weights_only=False)["global_step"]) for path in whole},
            [path.name for path in files if path not in whole],
            [leftover.path.name for leftover in find_leftovers(directory)],
            (directory / JOURNAL).read_text().splitlines(),
        )

    @property
    def newest(self) -> Path | None:
        """The checkpoint to go on from."""
        return max(self.steps, key=lambda path: self.steps[path], default=None)

    def wrong_with(self, plan: Injection) -> list[str]:
        """What should be otherwise."""
        wrong = [f"{name} is damaged" for name in self.damaged]
        if "struck" not in self.journal:
            wrong.append("the moment has not come")
        if len(self.partial) > 1:
            wrong.append(f"more than one rest of a save: {self.partial}")
        last_saved = max((int(line.split()[1]) for line in self.journal if line.startswith("saved ")), default=0)
        if max(self.steps.values(), default=0) < last_saved:
            wrong.append(f"step {last_saved} had been saved, and is lost")
        is_preempted = any(path.name == "preempted.ckpt" for path in self.steps)
        if plan.stops_together and is_preempted != plan.saves_when_it_stops:
            wrong.append("no checkpoint of the stop" if plan.saves_when_it_stops else "a checkpoint without a step")
        return wrong


def _is_whole(path: Path) -> bool:
    try:
        archive = open_archive(path)
    except DamagedCheckpointError:
        return False
    return archive.records is not None and not find_damage(archive, archive.records)
