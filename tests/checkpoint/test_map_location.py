"""``map_location`` in each form puts memory where it says, and what is none is refused before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_ddp_ext.checkpoint.map_location import placement
from lightning_ddp_ext.errors import CheckpointError, OptionError
from tests.checkpoint.content import numbers

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize(
    "map_location",
    [None, "cpu", "cuda", "cuda:3", CPU, META, {}, {"cuda:0": "cuda:1"}, {"cuda:0": CPU}, lambda *_: None],
)  # fmt: skip
def test_what_torch_takes_is_taken(map_location: Any) -> None:
    """A device, its name, a mapping of names or a function, whether this machine has the device or not."""
    placement(map_location)


@pytest.mark.parametrize(
    ("map_location", "says"),
    [
        ("gpu", "names 'gpu', which is no device; write 'cpu', 'cuda:0', ..."),
        ("cuda:x", "names 'cuda:x'"),
        ("", "names ''"),
        ({"cuda:0": "cuda:1", "gpu": "cpu"}, "names 'gpu'"),
        ({"cuda:0": None}, "names None"),
        (0, r"must be a device, its name, a mapping .* \(got 0\)"),
        (["cpu"], r"must be a device"),
        (b"cpu", r"must be a device"),
    ],
)
def test_what_is_none_is_refused(map_location: Any, says: str) -> None:
    """The error names what is wrong, what would be right and what was received; it is a TypeError and a ValueError."""
    with pytest.raises(OptionError, match=f"map_location {says}"):
        placement(map_location)


@pytest.mark.parametrize(
    ("map_location", "location", "device"),
    [
        (None, "cuda:0", "cpu"),
        (None, "cpu", "cpu"),
        ("meta", "cpu", "meta"),
        (META, "cuda:0", "meta"),
        ("cpu", "cuda:0", "cpu"),
        ({"cuda:0": "meta"}, "cuda:0", "meta"),
        ({"cuda:0": META}, "cuda:0", "meta"),
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


def test_a_device_that_is_not_there_is_named() -> None:
    """The error says which tensor's device cannot be had, whoever has asked for it."""
    storage = numbers(3).untyped_storage()
    for map_location in ("cuda:77", {"cpu": "cuda:77"}, lambda storage, location: None):
        location = "cuda:77" if callable(map_location) else "cpu"
        with pytest.raises(CheckpointError, match=rf"a tensor from {location} cannot be put on cuda:77: .*; pass"):
            placement(map_location)(storage, location)


def test_a_function_that_raises_is_named() -> None:
    """The error says that it was ``map_location``, and what it raised."""

    def refuse(storage: Any, location: str) -> Any:
        raise KeyError(location)

    with pytest.raises(CheckpointError, match=r"map_location failed for a tensor from cpu: KeyError\('cpu'\)"):
        placement(refuse)(numbers(3).untyped_storage(), "cpu")
