"""Digests of batches, by which ranks find that they read the same data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_ddp_ext.data.digest import digest

META = torch.ones(2, device="meta")


@pytest.mark.parametrize("batch", [None, torch.zeros(0), ["text", 1], object(), [torch.ones(1), META]])
def test_a_batch_that_says_nothing_has_no_digest(batch: Any) -> None:
    """Ranks whose first batches are empty, text or unreadable are not warned of equal data."""
    assert digest(batch) is None
