"""With ``each_sample=True``, each sample of a dataset has its own random numbers."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from torch.utils.data import Dataset

from lightning_ddp_ext.data.seeding import seed_each_sample


class Draws(Dataset[float]):
    def __getitem__(self, index: int) -> float:
        return random.random()


@dataclass(frozen=True)
class Frozen(Draws):
    folder: str = "data"


class WithSlots:
    """Has no ``__dict__``."""

    __slots__ = ()

    __getitem__ = Draws.__getitem__


@pytest.mark.parametrize("kind", [Draws, Frozen, WithSlots])
def test_a_sample_draws_the_same_whenever_it_is_read(kind: Any) -> None:
    """Frozen datasets and those without attributes are no exception."""
    dataset = kind()
    seed_each_sample(dataset, 7)
    first = dataset[0]
    second = dataset[1]
    assert first != second
    assert (dataset[1], dataset[0]) == (second, first)
    assert isinstance(dataset, kind)
