"""Seeds are mixed so that no two places share one, and generators that are seeded for a while come back unharmed."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ddp_ext.data.generators import mix, seeded
from lightning_ddp_ext.errors import SamplerError


def owner() -> Any:
    return SimpleNamespace(
        generator=torch.Generator().manual_seed(1),
        numpy=np.random.default_rng(1),
        bits=np.random.Generator(np.random.Philox(1)),
        old=np.random.RandomState(1),
        python=random.Random(1),
        system=random.SystemRandom(),
        nothing=None,
    )


def draws(each: Any) -> tuple[float, ...]:
    """Numbers of the global generators, and of those that an owner has."""
    of_torch = torch.rand(()).item(), torch.rand((), generator=each.generator).item()
    of_numpy = np.random.random(), each.numpy.normal(), each.bits.normal(), each.old.normal()
    return *of_torch, *of_numpy, random.random(), each.python.random()


def test_mix_has_no_collisions_by_addition_order_or_length() -> None:
    """All pairs, their swapped forms, single words and padded ones have seeds of their own."""
    words = [*itertools.product(range(200), repeat=2), *((word,) for word in range(200)), (), (0, 0, 0), (2**32,)]
    words += [(2**64 + 5,), (5, 2**64), (2**64, 5), (1, 2**200)]
    assert len({mix(*each) for each in words}) == len(words)


def test_mix_is_64_bits_and_stays_what_it_was() -> None:
    """The seed of a checkpoint is the seed of every later version, and all 64 bits are used."""
    seeds = [mix(seed, 0) for seed in range(200)]
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert np.bitwise_or.reduce(np.array(seeds, dtype=np.uint64)) == 2**64 - 1
    assert (mix(0, 0), mix(3, 7)) == (0x8C12CC2D4FEF6D0B, 0xA3EDFBA034B99A40)


def test_mix_refuses_negative_words() -> None:
    """A negative seed is an error that shows it."""
    with pytest.raises(SamplerError, match=r"\(3, -1\)"):
        mix(3, -1)


def test_seeded_generators_draw_the_same_whatever_their_state() -> None:
    """Global and owned generators of every kind follow the seed inside the block, each its own stream."""
    first, second = owner(), owner()
    draws(second)
    with seeded(7, first):
        expected = draws(first)
    with seeded(7, second):
        assert draws(second) == expected
    with seeded(8, second):
        assert not set(expected) & {*draws(second)}
    assert len(set(expected)) == len(expected)


def test_afterwards_every_generator_is_as_it_was() -> None:
    """A block, even one that fails, leaves no trace in any generator."""
    untouched, used = owner(), owner()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = draws(untouched)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    with contextlib.suppress(KeyError), seeded(7, used):
        draws(used)
        raise KeyError
    assert draws(used) == expected


def test_a_generator_that_several_own_is_seeded_once() -> None:
    """Owners that share a generator, or own a global one, draw one sequence from it."""
    shared = torch.Generator()
    first, second = SimpleNamespace(generator=shared), SimpleNamespace(generator=shared, other=torch.default_generator)
    with seeded(7, first, second):
        assert first.generator is second.generator is not shared
        assert second.other is torch.default_generator
    assert first.generator is second.generator is shared
