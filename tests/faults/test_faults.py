"""Runs that something happens to, anywhere: all end in time, no checkpoint is lost, and the right rank is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.plan import HOOKS, KINDS, Injection, draw
from tests.faults.run import References, inject, references_in

# Many sorts of faults; of those that take long (two hosts, a stopped rank, ranks that never meet) one each.
SEEDS = (*range(200, 206), 207, *range(209, 213), *range(214, 222), 223)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """What is learnt where nothing happens."""
    return references_in(tmp_path_factory.mktemp("references"))


def case(plan: Injection) -> Any:
    return pytest.param(plan, marks=[pytest.mark.netns] if plan.launch == "on two hosts" else [], id=str(plan.seed))


@pytest.mark.parametrize("plan", [case(draw(seed)) for seed in SEEDS])
def test_a_fault_is_survived(
    plan: Injection, references: References, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """No rank hangs, each names the culprit, and the run goes on from its newest checkpoint to the same weights."""
    hosts = request.getfixturevalue("two_hosts") if plan.launch == "on two hosts" else None
    wrong = inject(plan, tmp_path, references, hosts)
    assert not wrong, "\n".join([str(plan), *wrong])


def test_each_kind_and_each_stage_is_tried() -> None:
    """By the few that are tried here; a long run goes through all of their pairs."""
    plans = [draw(seed) for seed in SEEDS]
    assert ({plan.kind for plan in plans}, {plan.stage for plan in plans}) == (set(KINDS), set(HOOKS))
    pairs = {(plan.kind, plan.stage) for plan in map(draw, range(len(KINDS) * len(HOOKS)))}
    assert len(pairs) == len(KINDS) * len(HOOKS)
