"""How ranks should have ended after what has happened to one of them, and what they should have left."""

from __future__ import annotations

import re
import signal
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.faults.plan import ON_RANK_ZERO, SIGNALS, Injection
from tests.faults.training import STATUS
from tests.harness.outcomes import Outcome, name_of_status

_STATUS_OF_CULPRIT = {
    "kill": -signal.SIGKILL,
    "stop": -signal.SIGKILL,  # at last
    "vanish": 0,
    "exit": STATUS,
    "raise": 1,
    "term": -signal.SIGTERM,
    "interrupt": -signal.SIGINT,
}


def wrong_endings(plan: Injection, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What should be otherwise: exit statuses, and which rank has not said which one is to blame."""
    for outcome in outcomes:
        if outcome.exit_code not in _expected_statuses(plan, outcome.rank):
            yield f"rank {outcome.rank} has ended with {name_of_status(outcome.exit_code)}"
        is_culprit = outcome.rank == plan.culprit and plan.kind != "cut"
        has_failed = outcome.exit_code != 0 and plan.kind != "slow" and not plan.stops_together
        if has_failed and not is_culprit and not _names_culprit(plan, outcome):
            yield f"rank {outcome.rank} does not say which rank is to blame"


def _expected_statuses(plan: Injection, rank: int) -> set[int]:
    if plan.kind == "slow":
        return {0}
    if plan.stops_together:
        return {128 + SIGNALS[plan.kind]}
    if rank != plan.culprit or plan.kind == "cut":
        return {0, 1} if plan.is_late else {1}
    if plan.kind == "interrupt" and plan.is_late:
        return {-signal.SIGINT, 1, 130}
    return {_STATUS_OF_CULPRIT[plan.kind]}


def _names_culprit(plan: Injection, outcome: Outcome) -> bool:
    """Whether a rank's output names the culprit; a culprit that has lost sight of the others names one of those."""
    others = [rank for rank in range(plan.world_size) if rank != outcome.rank]
    suspects = others if outcome.rank == plan.culprit else [plan.culprit]
    return any(re.search(pattern, outcome.story()) for suspect in suspects for pattern in _patterns(plan, suspect))


def _patterns(plan: Injection, suspect: int) -> Iterator[str]:
    yield rf"\brank {suspect} \(host"
    if plan.moment in ON_RANK_ZERO:
        yield rf"\bon rank {suspect} during"  # what rank 0 does for all fails on all
    if plan.is_unmet:
        yield rf"\branks? (\d+, )*{suspect}(, \d+)* of \d+ did not come"
        yield rf"\bfound no rank {suspect} at \S+ within"


def wrong_files(plan: Injection, directory: Path) -> Iterator[str]:
    """What should be otherwise in the directory of the run."""
    checkpoints = sorted(directory.glob("*.ckpt"))
    yield from (f"{path.name} is damaged" for path in checkpoints if not _is_whole(path))
    if not (directory / "struck").exists():
        yield "the moment has not come"
    if len(unfinished(directory)) > 1:
        yield f"more than one rest of a save: {unfinished(directory)}"
    last_saved = max((int(path.stem) for path in directory.glob("*.saved")), default=0)
    if max(map(step_of, checkpoints), default=0) < last_saved:
        yield f"step {last_saved} had been saved, and is lost"
    if plan.stops_together and (directory / "preempted.ckpt").exists() != plan.saves_when_it_stops:
        yield "no checkpoint of the stop" if plan.saves_when_it_stops else "a checkpoint without a step"


def unfinished(directory: Path) -> list[Path]:
    """What is left of saves that were cut short."""
    return list(directory.glob(".ddpx-*"))


def step_of(path: Path) -> int:
    """The step at which a checkpoint was saved; -1 for a damaged one."""
    return int(torch.load(path, weights_only=False)["global_step"]) if _is_whole(path) else -1


def _is_whole(path: Path) -> bool:
    try:
        return zipfile.ZipFile(path).testzip() is None
    except zipfile.BadZipFile:
        return False
