"""Files that cannot be read: every rank raises the same named error, whatever is wrong
and wherever it is found.
"""

import argparse
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.checkpoint.content import flip, without_checksums
from tests.harness import training
from tests.integration import checkpointing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The checkpoint of a short run."""
    checkpointing.train_and_save(tmp_path / "it.ckpt")
    return tmp_path / "it.ckpt"


def set_entry(path: Path, name: str, value: Any) -> None:
    torch.save({**torch.load(path, weights_only=False), name: value}, path)


class WouldRun:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.directory),)


class Fault(NamedTuple):
    """A fault of a file, and what every rank's error says about it."""

    spoil: Callable[[Path], object]
    text: str
    error: str = "DamagedCheckpointError"


MISMATCH = "is damaged: {} does not match the recorded CRC"
FAULTS = [
    # Of two records of equal size, side by side, each rank checks one.
    Fault(partial(flip, record="data/1"), MISMATCH.format("data/1")),
    Fault(partial(flip, record="data/2"), MISMATCH.format("data/2")),
    Fault(partial(flip, record="data.pkl"), MISMATCH.format("data.pkl")),
    Fault(lambda path: os.truncate(path, 999), "was probably truncated"),
    Fault(lambda path: os.truncate(path, 0), "is not a checkpoint: its 0 bytes begin with b''"),
    Fault(
        lambda path: path.write_text("anything"),
        "is not a checkpoint: its 8 bytes begin with b'anyt'",
    ),
    Fault(os.unlink, "No such file or directory", "CheckpointError"),
    Fault(
        lambda path: set_entry(path, "hyper_parameters", argparse.Namespace(lr=0.1)),
        "add_safe_globals([argparse.Namespace])",
        "CheckpointError",
    ),
    Fault(
        lambda path: set_entry(path, "state_dict", WouldRun(path.parent / "it-ran")),
        "posix.mkdir",
        "CheckpointError",
    ),
    Fault(
        lambda path: torch.save({"model": {}, "epoch": 3}, path),
        "has no entry 'state_dict'",
        "CheckpointError",
    ),
    Fault(
        lambda path: torch.save(checkpointing.Net().state_dict(), path),
        "call model.load_state_dict(torch.load('",
        "CheckpointError",
    ),
]


def refused(kind: training.Kind, directory: Path, files: list[Path], is_mapped: bool) -> list[str]:
    """Return the error of each file, one after another in one process."""
    errors = []
    weights_only = True if kind == "stock" else None  # which is torch's own default
    for file in files:
        path = checkpointing.reachable(file, directory, is_mapped=is_mapped)
        trainer = checkpointing.trainer_for(
            kind, directory, RankZeroCheckpointIO(weights_only=weights_only)
        )
        with pytest.raises(Exception) as caught:  # noqa: PT011
            trainer.test(checkpointing.Net(), ckpt_path=path, verbose=False)
        errors.append(f"{caught.type.__name__}: {caught.value}")
    return errors


@pytest.mark.lowest
@checkpointing.MAPPED_AND_SENT
def test_every_rank_names_the_fault_of_a_file(
    kind: training.Kind, is_mapped: bool, path: Path, tmp_path: Path
) -> None:
    """Damage is named by record, and refusals by class; nothing of a file is run."""
    files = [Path(shutil.copy(path, tmp_path / f"{number}.ckpt")) for number in range(len(FAULTS))]
    for file, fault in zip(files, FAULTS, strict=True):
        fault.spoil(file)
    errors, of_rank_1 = training.on_ranks(kind, refused, tmp_path, files, is_mapped)
    assert errors == of_rank_1
    for fault, message in zip(FAULTS, errors, strict=True):
        assert message.startswith(f"{fault.error}: ")
        assert fault.text in message
    assert not (tmp_path / "it-ran").exists()


def warned(kind: training.Kind, directory: Path, path: Path, is_mapped: bool) -> list[str]:
    path = checkpointing.reachable(path, directory, is_mapped=is_mapped)
    trainer = checkpointing.trainer_for(kind, directory, RankZeroCheckpointIO())
    with training.warnings_with("checksums") as told:
        trainer.test(checkpointing.Net(), ckpt_path=path, verbose=False)
    return told


@checkpointing.MAPPED_AND_SENT
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_without_checksums_is_read_with_a_warning(
    kind: training.Kind, is_mapped: bool, path: Path, tmp_path: Path
) -> None:
    """Rank 0 warns, because changes to such a file cannot be detected."""
    with without_checksums():
        torch.save(torch.load(path, weights_only=False), path)
    told, others = training.on_ranks(kind, warned, tmp_path, path, is_mapped)
    assert len(told) == 1
    shown = path if is_mapped else path.name
    assert told[0].startswith(f"checkpoint {shown} has no checksums, so damage cannot be detected")
    assert others == []
