"""``map_location`` in each form puts memory where it says, and what is none is refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.checkpoint.load import placement
from lightning_ddp_ext.errors import CheckpointError, OptionError
from tests.checkpoint.content import numbers

META = torch.device("meta")


@pytest.mark.parametrize(
    ("map_location", "says"),
    [
        ("gpu", "names 'gpu', which is no device; write 'cpu', 'cuda:0', ..."),
        ({"cuda:0": "cuda:1", "gpu": "cpu"}, "names 'gpu'"),
        ({"cuda:0": None}, "names None"),
        (0, r"must be a device, its name, a mapping .* \(got 0\)"),
    ],
)
def test_what_is_none_is_refused(map_location: Any, says: str) -> None:
    """The error names what is wrong, what would be right and what was received."""
    with pytest.raises(OptionError, match=f"map_location {says}"):
        RankZeroCheckpointIO(map_location)


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


def test_a_checkpoint_io_reads_to_its_own_device_or_to_the_callers(tmp_path: Path) -> None:
    """What is passed to ``load_checkpoint`` comes first."""
    checkpoint_io = RankZeroCheckpointIO("meta")
    checkpoint_io.save_checkpoint({"x": numbers(3)}, tmp_path / "it.ckpt")
    assert checkpoint_io.load_checkpoint(tmp_path / "it.ckpt")["x"].device == META
    assert checkpoint_io.load_checkpoint(tmp_path / "it.ckpt", map_location="cpu")["x"].tolist() == [0, 1, 2]


def fails(storage: Any, location: str) -> Any:
    raise KeyError(location)


def test_a_place_that_cannot_be_had_is_named() -> None:
    """The error says what was asked for, for which tensors, and why it cannot be had."""
    with pytest.raises(CheckpointError, match=r"<function fails at .* place a tensor from cpu: KeyError: 'cpu'; pass"):
        placement(fails)(numbers(3).untyped_storage(), "cpu")
