"""Runs that something happens to, anywhere: all end in time, no checkpoint is lost, and the right rank is named.

``make soak`` tries as many seeds as one likes.
"""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.training import SIGNALS, STATUS, train
from tests.harness.network import Network
from tests.harness.outcomes import Outcome, name_of_status, stories
from tests.harness.ranks import RankProcesses, free_port, run_ranks

# Each kind and each stage; of those that take long (two hosts, a stopped rank, a rank that never connects) one each.
SEEDS = (201, 202, 207, 212, 215, 217, 218, 222, 241, 945)
FIRST, COUNT = int(os.environ.get("SOAK_SEED", 0)), int(os.environ.get("SOAK_COUNT", 0))

Weights = list[float]
# By world size: the weights at the end of a run that nothing happens to, and a checkpoint of its second step.
References = Callable[[int], tuple[Weights, Path]]


# What happens to which rank, and when: drawn from a seed, so that each can be done again.

KINDS = ("kill", "stop", "slow", "vanish", "exit", "raise", "cut", "term", "interrupt")
IN_A_STEP = (
    *("on_train_batch_start", "on_before_backward", "backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)
IN_A_VALIDATION = (
    *("on_validation_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
)
# When no rank needs another one any more.
LATE = ("on_fit_end", "teardown", "after_fit")
# By stage: moments that a rank comes through there, and how many times it does so at least.
MOMENTS: dict[str, dict[str, int]] = {
    "start": dict.fromkeys(("begin", "setup", "on_fit_start", "on_train_start"), 1),
    "step": dict.fromkeys(IN_A_STEP, 8),
    "validation": dict.fromkeys(IN_A_VALIDATION, 3),
    "save": {"on_save_checkpoint": 4, "writing": 40, "removing": 3},
    "restore": {"setup": 1, "reading": 1, "on_load_checkpoint": 1, "on_train_start": 1, "on_train_batch_start": 2},
    "end": {"on_train_epoch_end": 3, "on_train_end": 1, **dict.fromkeys(LATE, 1)},
}
# What rank 0 does for all: there it strikes whichever rank is to be struck, which only signals and cuts do to others.
ON_RANK_ZERO = ("writing", "removing", "reading")


@dataclass(frozen=True)
class Injection:
    """One run, and what happens to one of its ranks when it comes to a moment for the ``number``-th time, from 0 on."""

    seed: int
    kind: str
    stage: str
    moment: str
    number: int
    world_size: int
    culprit: int
    on_two_hosts: bool
    method: str

    def __str__(self) -> str:
        when = f"{self.stage} ({self.moment} {self.number})"
        how = f"{'two hosts' if self.on_two_hosts else 'one host'}, {self.method}"
        return f"seed {self.seed}: {self.kind} in {when}, rank {self.culprit} of {self.world_size}, {how}"

    @property
    def striker(self) -> int:
        """The rank that does it, to itself or to another one."""
        return 0 if self.moment in ON_RANK_ZERO else self.culprit

    @property
    def is_late(self) -> bool:
        """Whether the others may be done before they hear of it, or it before it hears of the others."""
        is_last_meeting = (self.moment, self.number) in (("on_train_epoch_end", 2), ("on_train_end", 0))
        return self.moment in LATE or (self.kind == "cut" and is_last_meeting)

    @property
    def is_unmet(self) -> bool:
        """Whether it happens before the ranks have met."""
        return self.moment == "begin"

    @property
    def stops_together(self) -> bool:
        """Whether it is a signal that asks all ranks to stop, in time."""
        return self.kind in ("term", "interrupt") and not self.is_unmet and not self.is_late

    @property
    def saves_when_it_stops(self) -> bool:
        """Whether there is anything to save by then."""
        return self.moment not in ("setup", "on_fit_start", "reading", "on_load_checkpoint")


def draw(seed: int) -> Injection:
    """The injection of a seed; successive seeds go through all kinds in all stages."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    stage = list(MOMENTS)[(seed % len(KINDS) + seed // len(KINDS)) % len(MOMENTS)]
    # Where a checkpoint could be lost is looked at more often.
    moment = chance.choices(list(MOMENTS[stage]), [4 if moment == "writing" else 1 for moment in MOMENTS[stage]])[0]
    world_size = chance.choice((2, 3))
    by_itself = moment in ON_RANK_ZERO and kind not in (*SIGNALS, "cut")
    return Injection(
        seed,
        kind,
        stage,
        moment,
        number=chance.randrange(MOMENTS[stage][moment]),
        world_size=world_size,
        culprit=0 if by_itself else chance.randrange(world_size),
        on_two_hosts=kind == "cut" or chance.random() < 0.1,
        method=chance.choice(("file", "tcp")),
    )


# How ranks should have ended then, and what they should have left.

STATUS_OF_CULPRIT = {
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
        if outcome.exit_code not in expected_statuses(plan, outcome.rank):
            yield f"rank {outcome.rank} has ended with {name_of_status(outcome.exit_code)}"
        is_culprit = outcome.rank == plan.culprit and plan.kind != "cut"
        has_failed = outcome.exit_code != 0 and plan.kind != "slow" and not plan.stops_together
        if has_failed and not is_culprit and not names_culprit(plan, outcome):
            yield f"rank {outcome.rank} does not say which rank is to blame"


def expected_statuses(plan: Injection, rank: int) -> set[int]:
    if plan.kind == "slow":
        return {0}
    if plan.stops_together:
        return {128 + SIGNALS[plan.kind]}
    if rank != plan.culprit or plan.kind == "cut":
        return {0, 1} if plan.is_late else {1}
    if plan.kind == "interrupt" and plan.is_late:
        return {-signal.SIGINT, 1, 130}
    return {STATUS_OF_CULPRIT[plan.kind]}


def names_culprit(plan: Injection, outcome: Outcome) -> bool:
    """Whether a rank's output names the culprit; a culprit that has lost sight of the others names one of those."""
    others = [rank for rank in range(plan.world_size) if rank != outcome.rank]
    suspects = others if outcome.rank == plan.culprit else [plan.culprit]
    return any(re.search(pattern, outcome.story()) for suspect in suspects for pattern in patterns(plan, suspect))


def patterns(plan: Injection, suspect: int) -> Iterator[str]:
    yield rf"\brank {suspect} \(host"
    if plan.moment in ON_RANK_ZERO:
        yield rf"\bon rank {suspect} during"  # what rank 0 does for all fails on all
    if plan.is_unmet:
        yield rf"\branks? (\d+, )*{suspect}(, \d+)* of \d+ did not connect"
        yield rf"\bfound no rank {suspect} at \S+ within"


def wrong_files(plan: Injection, directory: Path) -> Iterator[str]:
    """What should be otherwise in the directory of the run."""
    checkpoints = sorted(directory.glob("*.ckpt"))
    yield from (f"{path.name} is damaged" for path in checkpoints if not is_whole(path))
    if not (directory / "struck").exists():
        yield "the moment has not come"
    if len(unfinished(directory)) > 1:
        yield f"more than one rest of a save: {unfinished(directory)}"
    last_saved = max((int(path.stem) for path in directory.glob("*.saved")), default=0)
    if max(map(step_of, checkpoints), default=0) < last_saved:
        yield f"step {last_saved} had been saved, and is lost"
    if plan.stops_together and (directory / "last-preempted.ckpt").exists() != plan.saves_when_it_stops:
        yield "no checkpoint of the stop" if plan.saves_when_it_stops else "a checkpoint without a step"


def unfinished(directory: Path) -> list[Path]:
    """What is left of saves that were cut short."""
    return list(directory.glob(".ddpx-*"))


def step_of(path: Path) -> int:
    """The step at which a checkpoint was saved; -1 for a damaged one."""
    return int(torch.load(path, weights_only=False)["global_step"]) if is_whole(path) else -1


def is_whole(path: Path) -> bool:
    try:
        return zipfile.ZipFile(path).testzip() is None
    except zipfile.BadZipFile:
        return False


# The runs.


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Runs that nothing happens to, for comparison, each made once."""

    @functools.cache
    def reference(world_size: int) -> tuple[Weights, Path]:
        directory = tmp_path_factory.mktemp("reference")
        return learn(directory, world_size, None, keep=-1), directory / "step=2.ckpt"

    return reference


def case(seed: int) -> Any:
    plan = draw(seed)
    return pytest.param(plan, marks=[pytest.mark.netns] * plan.on_two_hosts, id=str(plan))


@pytest.mark.parametrize("plan", [case(seed) for seed in range(FIRST, FIRST + COUNT) or SEEDS])
def test_a_fault_is_survived(
    plan: Injection, references: References, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """No rank hangs, each names the culprit, and the run goes on from its newest checkpoint to the same weights."""
    hosts = request.getfixturevalue("two_hosts") if plan.on_two_hosts else None
    weights, checkpoint = references(plan.world_size)
    begin = checkpoint if plan.stage == "restore" else None
    outcomes = run(plan, tmp_path, begin, hosts)
    wrong = [*wrong_endings(plan, outcomes), *wrong_files(plan, tmp_path)]
    assert not wrong, "\n".join([*wrong, stories(outcomes)])

    for path in unfinished(tmp_path):
        os.utime(path, (0, 0))  # an hour passes
    newest = max(tmp_path.glob("*.ckpt"), key=step_of, default=begin)
    # DDP lays its buckets out anew after the first step in a process, so a resumed run may add up otherwise.
    tolerance = 0.0 if plan.world_size == 2 else 1e-5
    assert learn(tmp_path, plan.world_size, newest) == pytest.approx(weights, rel=0.0, abs=tolerance)
    assert unfinished(tmp_path) == []


def run(plan: Injection, directory: Path, begin: Path | None, hosts: Network | None) -> list[Outcome]:
    """The run, on ranks that are started by hand; on two hosts the culprit has one for itself."""
    places = None if hosts is None else [hosts[rank == plan.culprit] for rank in range(plan.world_size)]
    address = "127.0.0.1" if places is None else places[0].address
    url = f"file://{directory}/store" if plan.method == "file" else f"tcp://{address}:{free_port()}"
    arguments = (plan, directory, url, begin, 1)
    with RankProcesses(train, plan.world_size, *arguments, namespaces=places) as ranks:
        if hosts is not None and plan.kind == "cut":
            ranks.wait_for("cut", plan.striker)
            hosts.cut()
            ranks.release(plan.striker)
        if plan.kind == "stop":
            ranks.wait(*(rank for rank in range(plan.world_size) if rank != plan.culprit))
            ranks.kill(plan.culprit)
        return ranks.wait()


def learn(directory: Path, world_size: int, checkpoint: Path | None, keep: int = 1) -> Weights:
    """What a run learns that nothing happens to, from its beginning or from a checkpoint on."""
    weights: Weights
    url = f"file://{directory}/store"
    weights, *others = run_ranks(train, world_size, None, directory, url, checkpoint, keep)
    assert all(other == weights for other in others), "ranks have different weights"
    return weights


def test_each_kind_and_each_stage_is_tried() -> None:
    """By the few that are tried here; a long run goes through all of their pairs."""
    plans = [draw(seed) for seed in SEEDS]
    assert ({plan.kind for plan in plans}, {plan.stage for plan in plans}) == (set(KINDS), set(MOMENTS))
    pairs = {(plan.kind, plan.stage) for plan in map(draw, range(len(KINDS) * len(MOMENTS)))}
    assert len(pairs) == len(KINDS) * len(MOMENTS)
