"""Runs that something happens to, anywhere: all end in time, no checkpoint is lost, and the right rank is named.

``make soak`` tries as many seeds as one likes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.judge import step_of, unfinished, wrong_endings, wrong_files
from tests.faults.plan import KINDS, MOMENTS, Injection, draw
from tests.faults.training import train
from tests.harness.network import Network
from tests.harness.outcomes import Outcome, stories
from tests.harness.ranks import RankProcesses, free_port, run_ranks

# Many sorts of faults; of those that take long (two hosts, a stopped rank, ranks that never meet) one each.
SEEDS = (201, 202, 206, 207, 211, 212, 214, 215, 217, 218, 222, 224, 225, 228, 241, 243, 247, 257, 273)
FIRST, COUNT = int(os.environ.get("SOAK_SEED", 0)), int(os.environ.get("SOAK_COUNT", 0))
# Seconds that no rank may outlive: not what is promised, but far beyond it, on a busy machine.
TIME_LIMIT = 60.0

Weights = list[float]
# By world size: the weights at the end of a run that nothing happens to, and a checkpoint of its second step.
References = Callable[[int], tuple[Weights, Path]]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Runs that nothing happens to, for comparison, each made once."""

    @functools.cache
    def reference(world_size: int) -> tuple[Weights, Path]:
        directory = tmp_path_factory.mktemp("reference")
        return learn(directory, world_size, None, keep=-1), directory / "step=2.ckpt"

    return reference


def case(plan: Injection) -> Any:
    return pytest.param(plan, marks=[pytest.mark.netns] if plan.on_two_hosts else [], id=str(plan))


@pytest.mark.parametrize("plan", [case(draw(seed)) for seed in range(FIRST, FIRST + COUNT) or SEEDS])
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
    with RankProcesses(train, plan.world_size, *arguments, time_limit=TIME_LIMIT, namespaces=places) as ranks:
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
    weights, *others = run_ranks(train, world_size, None, directory, url, checkpoint, keep, time_limit=TIME_LIMIT)
    assert all(other == weights for other in others), "ranks have different weights"
    return weights


def test_each_kind_and_each_stage_is_tried() -> None:
    """By the few that are tried here; a long run goes through all of their pairs."""
    plans = [draw(seed) for seed in SEEDS]
    assert ({plan.kind for plan in plans}, {plan.stage for plan in plans}) == (set(KINDS), set(MOMENTS))
    pairs = {(plan.kind, plan.stage) for plan in map(draw, range(len(KINDS) * len(MOMENTS)))}
    assert len(pairs) == len(KINDS) * len(MOMENTS)
