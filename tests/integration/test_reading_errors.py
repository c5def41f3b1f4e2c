"""Files that cannot be read: every rank raises the same named error, whatever is wrong
and wherever it is found.
"""

import argparse
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.checkpoint.content import WouldRun, flip, without_checksums
from tests.harness import training
from tests.harness.ranks import launch_ranks
from tests.integration import checkpointing
from tests.integration.checkpointing import Net


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The checkpoint of a short run."""
    checkpointing.train_and_save(tmp_path / "it.ckpt")
    return tmp_path / "it.ckpt"


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def set_entry(path: Path, name: str, value: Any) -> None:
    torch.save({**torch.load(path, weights_only=False), name: value}, path)


def replace_weight(path: Path, *shape: int) -> None:
    weights = torch.load(path, weights_only=False)["state_dict"]
    set_entry(path, "state_dict", {**weights, "layers.3.bias": torch.zeros(shape)})


def drop_weight(path: Path) -> None:
    weights = torch.load(path, weights_only=False)["state_dict"]
    del weights["layers.3.bias"]
    set_entry(path, "state_dict", weights)


def truncate_to_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


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
    Fault(truncate_to_half, "was probably truncated"),
    Fault(lambda path: os.truncate(path, 0), "is empty"),
    Fault(lambda path: path.write_text("anything"), "is not a checkpoint: it begins with b'anyt'"),
    Fault(replace_by_directory, "is a directory"),
    Fault(os.unlink, "does not exist", "CheckpointNotFoundError"),
    Fault(
        lambda path: set_entry(path, "hyper_parameters", argparse.Namespace(lr=0.1)),
        "add_safe_globals([argparse.Namespace])",
        "UnsafeCheckpointError",
    ),
    Fault(
        lambda path: set_entry(path, "state_dict", WouldRun(path.parent / "it-ran")),
        "contains posix.mkdir",
        "UnsafeCheckpointError",
    ),
    Fault(
        lambda path: replace_weight(path, 2, 3), "size mismatch for layers.3.bias", "RuntimeError"
    ),
    Fault(drop_weight, 'Missing key(s) in state_dict: "layers.3.bias"', "RuntimeError"),
    Fault(
        lambda path: torch.save({"model": {}, "epoch": 3}, path),
        "has no state dict in an entry 'state_dict' (got 'model': dict, 'epoch': int)",
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
            trainer.test(Net(), ckpt_path=path, verbose=False)
        errors.append(f"{caught.type.__name__}: {caught.value}")
    return errors


@pytest.mark.lowest
@checkpointing.MAPPED_AND_SENT
def test_every_rank_names_the_fault_of_a_file(
    kind: training.Kind, is_mapped: bool, path: Path, tmp_path: Path
) -> None:
    """Damage is named by record, refusals by class, differences by parameter; nothing
    of a file is run.
    """
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
        trainer.test(Net(), ckpt_path=path, verbose=False)
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


class Strikes:
    """Raises on one rank, or kills it, when it is unpickled there."""

    def __init__(self, victim: int, is_killed: bool) -> None:
        self.state = victim, is_killed

    def __setstate__(self, state: dict[str, tuple[int, bool]]) -> None:
        victim, is_killed = self.state = state["state"]
        if os.environ.get("RANK") != str(victim):
            return
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk failed")


def read_together(rank: int, world_size: int, directory: Path, path: Path, moment: str) -> None:
    if rank == 0 and moment == "sent":
        dist.broadcast = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    os.chdir(path.parent if rank == 0 else directory / "elsewhere")  # so that rank 0 sends it
    trainer = training.make_trainer(training.make_strategy("ours", directory), devices=3)
    trainer.test(Net(), ckpt_path=path.name, verbose=False, weights_only=False)


@pytest.mark.parametrize(
    ("victim", "is_killed", "moment"),
    [(0, True, "sent"), (0, False, "unpickled"), (2, True, "unpickled")],
)
def test_a_rank_that_fails_while_others_restore_ends_all(
    victim: int, is_killed: bool, moment: str, path: Path, tmp_path: Path
) -> None:
    """While the file is sent or unpickled: all exit within seconds, and name the rank
    that failed.
    """
    set_entry(path, "strikes", Strikes(victim if moment == "unpickled" else -1, is_killed))
    (tmp_path / "elsewhere").mkdir()
    outcomes = launch_ranks(read_together, 3, tmp_path, path, moment)
    cause = f"rank {victim} " if is_killed else "the disk failed"
    for rank, outcome in enumerate(outcomes):
        if is_killed and rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert outcome.exit_code != 0
            assert cause in outcome.story()
