"""Random states as bytes, which are those that the libraries return."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_ddp_ext.data.random_state import (
    preserve_random_state,
    random_state_bytes,
    random_state_in,
    record_random_state,
)

pytestmark = pytest.mark.unit


def draw_gauss() -> None:
    random.gauss(0, 1)


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, np.random.randn, random.random, draw_gauss])
def test_a_drawn_number_changes_the_bytes(draw: Callable[..., object]) -> None:
    """Also the second of two normal numbers that were made together."""
    generator = torch.Generator()
    with preserve_random_state():
        for seed in (0, 0, 1):
            np.random.seed(seed)
            random.seed(seed)
            for _ in range(3):
                draw(1) if draw is torch.rand else draw()
                read = random_state_in(b"".join(random_state_bytes([generator])))
                assert str(read) == str(record_random_state([generator]))
