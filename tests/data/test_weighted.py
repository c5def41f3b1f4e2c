"""Weighted draws come as often as they weigh, and are one sequence for any number of ranks."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_ddp_ext.data.weighted import DistributedWeightedSampler, uniforms
from lightning_ddp_ext.errors import SamplerError
from tests.data.data import dealt, in_turn, stop_and_go

WEIGHTS = [0.0, 3.0, 1.0, 0.0, 0.5, 7.5, 0.0]
POSITIVE = np.flatnonzero(WEIGHTS)
SMALLEST_P = 1e-4


def weighted(*arguments: Any, **options: Any) -> Any:
    return lambda world_size, rank: DistributedWeightedSampler(
        *arguments, num_replicas=world_size, rank=rank, **options
    )


def test_uniforms_are_uniform_and_independent_of_their_neighbours() -> None:
    """Within a sequence, between neighbouring places and between keys nothing is to be seen."""
    numbers, others = uniforms(1, np.arange(100_001)), uniforms(2, np.arange(100_001))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for one, other in (
        (numbers[:-1], numbers[1:]),
        (numbers, others),
        (numbers, uniforms(1, np.arange(100_001) + 2**61)),
    ):
        cells = (one * 16).astype(int) * 16 + (other * 16).astype(int)
        assert stats.chisquare(np.bincount(cells, minlength=256)).pvalue > SMALLEST_P


@pytest.mark.parametrize("scale", [1.0, 1e300, 1e-300])
def test_draws_come_as_often_as_they_weigh(scale: float) -> None:
    """With replacement, frequencies are those of the weights in any scale, and what weighs nothing never comes."""
    weights = np.array(WEIGHTS) * scale
    drawn = np.bincount(list(DistributedWeightedSampler(weights, 100_000, num_replicas=1, rank=0)), minlength=7)
    expected = np.array(WEIGHTS)[POSITIVE] / sum(WEIGHTS) * 100_000
    assert drawn.sum() == drawn[POSITIVE].sum()
    assert stats.chisquare(drawn[POSITIVE], expected).pvalue > SMALLEST_P


def test_draws_of_more_than_2_to_the_24_weights() -> None:
    """Where torch refuses, every part of the weights gets its draws."""
    weights = torch.ones(2**24 + 10, dtype=torch.float32)
    drawn = np.array(list(DistributedWeightedSampler(weights, 20_000, num_replicas=1, rank=0)))
    assert stats.chisquare(np.bincount(drawn * 16 // len(weights), minlength=16)).pvalue > SMALLEST_P


def test_without_replacement_nothing_comes_twice_and_heavy_ones_come_first() -> None:
    """The first and second draws of many epochs have the probabilities of drawing one after another."""
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    sampler, seen = DistributedWeightedSampler(weights, 3, False, num_replicas=1, rank=0), np.zeros((4, 4))
    for epoch in range(8000):
        sampler.set_epoch(epoch)
        drawn = list(sampler)
        assert sorted(drawn) == [0, 2, 3]
        seen[drawn[0], drawn[1]] += 1
    p = weights / 8
    expected = np.array([[p[one] * p[other] / (1 - p[one]) * (one != other) for other in range(4)] for one in range(4)])
    possible = expected > 0
    assert seen.sum() == seen[possible].sum()
    assert stats.chisquare(seen[possible], expected[possible] * 8000).pvalue > SMALLEST_P


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    replacement=st.booleans(),
    count=st.integers(1, 40),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    consumed=st.integers(0, 9),
    epoch=st.integers(0, 3),
)
def test_the_sequence_does_not_depend_on_ranks_or_stops(
    replacement: bool, count: int, before: int, after: int, consumed: int, epoch: int
) -> None:
    """Dealt out, or stopped and gone on with on other ranks, the draws are one process's."""
    make = weighted(np.arange(41), count, replacement, seed=5, uneven="exact")
    one = in_turn(dealt(make, 1, epoch))
    assert len(one) == count
    assert in_turn(dealt(make, before, epoch)) == one
    assert sorted(stop_and_go(make, before, after, consumed, epoch)) == sorted(one)


def test_every_epoch_and_seed_draws_anew() -> None:
    """No two epochs or seeds have one sequence, and indices are Python integers."""
    drawn = [dealt(weighted([1.0] * 50, 20, seed=seed), 1, epoch)[0] for seed in range(5) for epoch in range(5)]
    assert len(set(map(tuple, drawn))) == 25
    assert {type(index) for index in drawn[0]} == {int}


@pytest.mark.parametrize(
    "weights",
    [[0, 3, 1], (0.0, 3.0, 1.0), np.array([0, 3, 1]), torch.tensor([0, 3, 1]), torch.tensor([0, 3, 1]).bfloat16()],
)
def test_weights_come_in_any_form(weights: Any) -> None:
    """Lists, tuples, arrays and tensors of any type mean the same."""
    assert dealt(weighted(weights, 30), 2) == dealt(weighted([0.0, 3.0, 1.0], 30), 2)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (([], 1), {}, r"weights must have one above zero \(got 0 of them"),
        (([1.0, -0.5], 1), {}, r"weights must be finite and not negative \(got -0.5 for sample 1\)"),
        (([1.0, nan], 1), {}, r"weights must be finite .* \(got nan for sample 1\)"),
        (([-inf, 1.0], 1), {}, r"weights must be finite .* \(got -inf for sample 0\)"),
        (([0.0, 0.0], 1), {}, r"weights must have one above zero \(got 2 of them"),
        (([[1.0, 2.0]], 1), {}, r"weights must have one dimension \(got shape \(1, 2\)\)"),
        ((3.0, 1), {}, r"weights must have one dimension \(got shape \(\)\)"),
        ((["a"], 1), {}, r"weights must be numbers \(got \['a'\]"),
        (([1.0], 0), {}, r"num_samples must be .* from 1 to .* \(got 0\)"),
        (([1.0], -3), {}, r"num_samples must be .* \(got -3\)"),
        (([1.0], 2.5), {}, r"num_samples must be a whole number.* \(got 2.5\)"),
        (([1.0, 0.0, 1.0], 3, False), {}, r"num_samples must be at most .*, 2, without replacement \(got 3\)"),
        (([1.0] * 5, 3), {"dataset": range(6)}, r"weights must be as many as the dataset has samples, 6 \(got 5\)"),
        (([1.0] * 5, 3), {"dataset": iter([])}, r"dataset must have a length"),
        (([1.0] * 5, 3), {"rank": 3, "num_replicas": 3}, r"rank must be below num_replicas, 3 \(got 3\)"),
        (([1.0] * 5, 3), {"seed": -1}, r"seed must be .* \(got -1\)"),
        (([1.0] * 5, 3), {"uneven": "some"}, r"uneven must be .* \(got 'some'\)"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    """The error names the field, the rule and the value."""
    with pytest.raises(SamplerError, match=says):
        DistributedWeightedSampler(*arguments, **options)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (weighted([1.0] * 6, 3), r"weights of the state must be the sampler's, 5 \(got 6\)"),
        (weighted([1.0] * 5, 3, False), r"replacement of the state must be the sampler's, True \(got False\)"),
        (weighted([1.0] * 5, 4), r"length of the state must be the sampler's, 3 \(got 4\)"),
    ],
)
def test_states_of_other_draws_are_refused(other: Any, says: str) -> None:
    """A place in one sequence is no place in another."""
    with pytest.raises(SamplerError, match=says):
        DistributedWeightedSampler([1.0] * 5, 3).load_state_dict(other(1, 0).state_dict())
