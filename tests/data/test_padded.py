"""Index samplers that repeat their last item."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_ddp_ext.data.loader import set_index_sampler
from lightning_ddp_ext.data.padded import PaddedSampler


class Red(BatchSampler):
    """A user's batch sampler."""

    colour = "red"


def test_a_batch_sampler_keeps_its_batches_and_its_attributes() -> None:
    """What its author has added can be read, too."""
    own = Red(SequentialSampler(range(5)), 2, False)
    padded: Any = PaddedSampler(own, length=5)
    assert list(padded) == [[0, 1], [2, 3], [4], [4], [4]]
    assert (len(padded), padded.sampler, padded.batch_size, padded.colour) == (5, own.sampler, 2, "red")


def test_the_spare_item_stands_in_for_none() -> None:
    """Only where there is nothing to repeat."""
    assert list(PaddedSampler([], length=2, spare=7)) == [7, 7]
    assert list(PaddedSampler([1], length=2, spare=7)) == [1, 1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_reads_a_padded_sampler_again_and_again(num_workers: int) -> None:
    """Put into a loader that exists already, with workers too."""
    loader = DataLoader(range(3), 2, num_workers=num_workers)  # type: ignore[arg-type]
    set_index_sampler(loader, PaddedSampler(loader.batch_sampler, length=3))
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [[[0, 1], [2], [2]]] * 2
    assert len(loader) == 3
