"""Digests of batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ddp_ext.data.digest import digest

ONE = torch.ones(1)
BATCHES: list[Any] = [
    torch.zeros(2, 3),
    torch.zeros(3, 2),
    torch.zeros(2, 3, dtype=torch.int32),
    np.zeros((2, 3), dtype=np.int16),
    [torch.zeros(1), ONE],
    [ONE, torch.zeros(1)],
    [ONE, "text"],
    [ONE, b"text"],
]


def test_batches_that_differ_have_other_digests() -> None:
    """In shape, type or order; equal ones have the same."""
    digests = [digest(batch) for batch in BATCHES]
    assert None not in digests
    assert len(set(digests)) == len(BATCHES)
    assert [digest(copy.deepcopy(batch)) for batch in BATCHES] == digests


@pytest.mark.parametrize("make", [lambda: torch.ones(2, device="meta"), lambda: torch.eye(2).to_sparse()])
def test_batches_with_something_unreadable_have_none(make: Callable[[], Any]) -> None:
    """Two batches may differ in it, so that they are not called the same; and nothing is raised."""
    assert digest([ONE, make()]) is None
