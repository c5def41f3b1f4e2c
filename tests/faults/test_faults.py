"""Runs that something happens to, anywhere: all end in time, no checkpoint is lost, and the right rank is named."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.plan import HOOKS, KINDS, Injection, draw
from tests.faults.references import References
from tests.faults.run import inject

FIRST, COUNT = 200, 20  # from here on there are many sorts of them, and few that take long


def plans() -> Iterator[Injection]:
    """Those of one seed after another, but of what takes long only one of each sort, and no scripts."""
    waits = {"script"}
    for seed in range(FIRST, FIRST + COUNT * len(KINDS)):
        plan = draw(seed)
        if plan.long_wait not in waits:
            yield plan
        if plan.long_wait is not None:
            waits.add(plan.long_wait)


PLANS = list(itertools.islice(plans(), COUNT))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """What is learnt where nothing happens."""
    return References(tmp_path_factory.mktemp("references"))


def marks(plan: Injection) -> list[pytest.MarkDecorator]:
    return [pytest.mark.netns] if plan.launch == "on two hosts" else []


@pytest.mark.parametrize("plan", [pytest.param(plan, marks=marks(plan), id=f"{plan.seed}") for plan in PLANS])
def test_a_fault_is_survived(
    plan: Injection, references: References, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Nobody hangs, each rank names the culprit, and the run goes on from its newest checkpoint to the same weights."""
    hosts = request.getfixturevalue("two_hosts") if plan.launch == "on two hosts" else None
    wrong = inject(plan, tmp_path, references, hosts)
    assert not wrong, "\n".join([str(plan), *wrong])


def test_each_kind_and_each_stage_is_tried() -> None:
    """By the few that are tried here; a long run goes through all of their pairs."""
    assert len(PLANS) == COUNT
    assert {plan.kind for plan in PLANS} == set(KINDS)
    assert {plan.stage for plan in PLANS} == set(HOOKS)
    pairs = {(plan.kind, plan.stage) for plan in map(draw, range(len(KINDS) * len(HOOKS)))}
    assert len(pairs) == len(KINDS) * len(HOOKS)
