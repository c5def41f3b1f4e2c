"""``map_location`` in each form puts memory where it says, and what is none is refused before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_ddp_ext.checkpoint.load import placement
from lightning_ddp_ext.errors import CheckpointError, OptionError
from tests.checkpoint.content import numbers

META = torch.device("meta")


@pytest.mark.parametrize(
    ("map_location", "says"),
    [
        ("gpu", "names 'gpu', which is no device; write 'cpu', 'cuda:0', ..."),
        ("", "names ''"),
        ({"cuda:0": "cuda:1", "gpu": "cpu"}, "names 'gpu'"),
        ({"cuda:0": None}, "names None"),
        (0, r"must be a device, its name, a mapping .* \(got 0\)"),
        (["cpu"], r"must be a device"),
    ],
)
def test_what_is_none_is_refused(map_location: Any, says: str) -> None:
    """The error names what is wrong, what would be right and what was received."""
    with pytest.raises(OptionError, match=f"map_location {says}"):
        placement(map_location)


@pytest.mark.parametrize(
    ("map_location", "location", "device"),
    [
        (None, "cuda:0", "cpu"),
        ("meta", "cpu", "meta"),
        (META, "cuda:0", "meta"),
        ("cpu", "cuda:0", "cpu"),
        ({"cuda:0": "meta"}, "cuda:0", "meta"),
        ({torch.device("cuda:0"): META}, "cuda:0", "meta"),
        ({"cuda:0": "meta"}, "cpu", "cpu"),
        (lambda storage, location: torch.UntypedStorage(storage.nbytes(), device="meta"), "cpu", "meta"),
        (lambda storage, location: None, "cpu", "cpu"),
    ],
)
def test_memory_goes_where_it_says(map_location: Any, location: str, device: str) -> None:
    """By the device that it was saved from; memory that stays is not copied."""
    storage = numbers(3).untyped_storage()
    placed = placement(map_location)(storage, location)
    assert placed.device.type == device
    assert device == "meta" or placed.data_ptr() == storage.data_ptr()


def fails(storage: Any, location: str) -> Any:
    raise KeyError(location)


@pytest.mark.parametrize(
    ("map_location", "says"),
    [
        ("cuda:77", "map_location='cuda:77' cannot place a tensor from cpu: RuntimeError: .* CUDA"),
        ({"cpu": "cuda:77"}, "map_location={'cpu': 'cuda:77'} cannot place a tensor from cpu"),
        (fails, "<function fails at .* cannot place a tensor from cpu: KeyError: 'cpu'; pass another one"),
    ],
)
def test_a_place_that_cannot_be_had_is_named(map_location: Any, says: str) -> None:
    """The error says what was asked for, for which tensors, and why it cannot be had."""
    with pytest.raises(CheckpointError, match=says):
        placement(map_location)(numbers(3).untyped_storage(), "cpu")
