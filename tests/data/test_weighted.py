"""Weighted draws come as often as they weigh."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ddp_ext.data.weighted import DistributedWeightedSampler
from lightning_ddp_ext.errors import ConfigurationError
from tests.data.data import p_of

SMALLEST_P = 1e-4


def drawn(*arguments: Any, epoch: int = 0, **options: Any) -> list[int]:
    """What one rank draws."""
    sampler = DistributedWeightedSampler(*arguments, num_replicas=1, rank=0, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_draws_are_independent_of_their_neighbours_and_of_other_epochs() -> None:
    """Side by side, and at one place in two epochs, each pair of samples is as likely."""
    first, second = (np.array(drawn(np.ones(16), 100_001, epoch=epoch)) for epoch in range(2))
    for one, other in ((first[:-1], first[1:]), (first, second)):
        assert p_of(np.bincount(one * 16 + other, minlength=256)) > SMALLEST_P


@pytest.mark.parametrize("scale", [1.0, 1e300, 1e-300])
def test_draws_come_as_often_as_they_weigh(scale: float) -> None:
    """With replacement, frequencies are those of the weights in any scale, and what weighs nothing never comes."""
    weights = np.array([0.0, 3.0, 1.0, 0.0, 0.5, 7.5, 0.0])
    counts, possible = np.bincount(drawn(weights * scale, 100_000), minlength=7), weights > 0
    assert counts.sum() == counts[possible].sum()
    assert p_of(counts[possible], weights[possible] / weights.sum() * 100_000) > SMALLEST_P


def test_draws_of_more_than_2_to_the_24_weights() -> None:
    """Where torch refuses, every part of the weights gets its draws."""
    weights = torch.ones(2**24 + 10, dtype=torch.float32)
    indices = np.array(drawn(weights, 20_000))
    assert p_of(np.bincount(indices * 16 // len(weights), minlength=16)) > SMALLEST_P


def test_without_replacement_nothing_comes_twice_and_heavy_ones_come_first() -> None:
    """The first and second draws of many epochs have the probabilities of drawing one after another."""
    weights = np.array([1.0, 0.0, 2.0, 5.0])
    sampler, seen = DistributedWeightedSampler(weights, 3, False, num_replicas=1, rank=0), np.zeros((4, 4))
    for epoch in range(8000):
        sampler.set_epoch(epoch)
        indices = list(sampler)
        assert sorted(indices) == [0, 2, 3]
        seen[indices[0], indices[1]] += 1
    p = weights / 8
    expected = np.array([[p[one] * p[other] / (1 - p[one]) * (one != other) for other in range(4)] for one in range(4)])
    possible = expected > 0
    assert seen.sum() == seen[possible].sum()
    assert p_of(seen[possible], expected[possible] * 8000) > SMALLEST_P


def test_weights_come_in_any_form() -> None:
    """Lists, tuples, arrays and tensors of any type mean the same."""
    forms = [[0, 3, 1], (0.0, 3.0, 1.0), np.array([0, 3, 1]), torch.tensor([0, 3, 1]).bfloat16()]
    sequences = [drawn(weights, 30) for weights in forms]
    assert sequences == sequences[:1] * len(forms)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        (([0.0, 0.0], 1), {}, r"weights must have one above zero \(got 2 of them"),
        (([1.0, -0.5], 1), {}, r"weights must be finite and not negative \(got -0.5 for sample 1\)"),
        (([1.0, nan], 1), {}, r"weights must be finite .* \(got nan for sample 1\)"),
        (([-inf, 1.0], 1), {}, r"weights must be finite .* \(got -inf for sample 0\)"),
        (([[1.0, 2.0]], 1), {}, r"weights must have one dimension \(got shape \(1, 2\)\)"),
        ((["a"], 1), {}, r"weights must be numbers \(got \['a'\]"),
        (([1.0], 0), {}, r"num_samples must be .* from 1 to .* \(got 0\)"),
        (([1.0], 2.5), {}, r"num_samples must be a whole number.* \(got 2.5\)"),
        (([1.0, 0.0, 1.0], 3, False), {}, r"num_samples must be at most .*, 2, without replacement \(got 3\)"),
        (([1.0] * 5, 3), {"dataset": range(6)}, r"weights must be as many as the dataset has samples, 6 \(got 5\)"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    """The error names the field, the rule and the value."""
    with pytest.raises(ConfigurationError, match=says):
        DistributedWeightedSampler(*arguments, **options)


def test_states_of_other_draws_are_refused() -> None:
    """A place in one sequence is no place in another."""
    for other, says in ((([1.0] * 6, 3), "weights .* 5 .got 6"), (([1.0] * 5, 3, False), "replacement .* True .got F")):
        with pytest.raises(ConfigurationError, match=says):
            DistributedWeightedSampler([1.0] * 5, 3).load_state_dict(DistributedWeightedSampler(*other).state_dict())
