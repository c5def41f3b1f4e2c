"""Files that cannot be read: every rank raises the same named error, whatever is wrong
and wherever it is found.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import signal
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.checkpoint.content import WouldRun, flip, without_checksums
from tests.harness.ranks import launch_ranks
from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_ranks, weights
from tests.integration.checkpointing import (
    MAPPED_AND_SENT,
    Net,
    reachable,
    train_and_save,
    trainer_for,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The checkpoint of a short run."""
    train_and_save(tmp_path / "it.ckpt")
    return tmp_path / "it.ckpt"


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def with_entry(path: Path, name: str, value: Any) -> None:
    torch.save({**torch.load(path, weights_only=False), name: value}, path)


def with_weight(path: Path, *shape: int) -> None:
    """With a weight of another shape, or without it."""
    weights = torch.load(path, weights_only=False)["state_dict"]
    del weights["layers.3.bias"]
    with_entry(
        path, "state_dict", {**weights, **({"layers.3.bias": torch.zeros(shape)} if shape else {})}
    )


def with_overlapping_records(path: Path, claims: int) -> Path:
    """Have the file's directory list each record of a tensor ``times`` more times,
    under other names.
    """
    with zipfile.ZipFile(path, "a") as archive:
        for entry in [each for each in archive.infolist() if "/data/" in each.filename]:
            for number in range(claims):
                again = copy.copy(entry)
                again.filename = f"{entry.filename}-{number}"
                archive.filelist.append(again)
        archive._didModify = True
    return path


WRONG: list[tuple[Callable[[Path], Any], str, str]] = [
    # Of two records of equal size, side by side, each rank checks one.
    (
        lambda path: flip(path, "data/1"),
        "DamagedCheckpointError",
        "is damaged: data/1 does not match the recorded CRC",
    ),
    (
        lambda path: flip(path, "data/2"),
        "DamagedCheckpointError",
        "is damaged: data/2 does not match the recorded CRC",
    ),
    (
        lambda path: flip(path, "data.pkl"),
        "DamagedCheckpointError",
        "is damaged: data.pkl does not match",
    ),
    (
        lambda path: with_overlapping_records(path, 30),
        "DamagedCheckpointError",
        "is damaged: records data/",
    ),
    (
        lambda path: os.truncate(path, path.stat().st_size // 2),
        "DamagedCheckpointError",
        "was probably truncated",
    ),
    (lambda path: os.truncate(path, 0), "DamagedCheckpointError", "is empty"),
    (
        lambda path: path.write_text("anything"),
        "DamagedCheckpointError",
        "is not a checkpoint: it begins with b'anyt'",
    ),
    (directory, "DamagedCheckpointError", "is a directory"),
    (os.unlink, "CheckpointNotFoundError", "does not exist"),
    (
        lambda path: with_entry(path, "hyper_parameters", argparse.Namespace(lr=0.1)),
        "UnsafeCheckpointError",
        "add_safe_globals([argparse.Namespace])",
    ),
    (
        lambda path: with_entry(path, "state_dict", WouldRun(path.parent / "it-ran")),
        "UnsafeCheckpointError",
        "contains posix.mkdir",
    ),
    (lambda path: with_weight(path, 2, 3), "RuntimeError", "size mismatch for layers.3.bias"),
    (with_weight, "RuntimeError", 'Missing key(s) in state_dict: "layers.3.bias"'),
    (
        lambda path: torch.save({"model": {}, "epoch": 3}, path),
        "CheckpointError",
        "has no entry 'state_dict' (got 'model', 'epoch')",
    ),
]


def refused(kind: Kind, directory: Path, files: list[Path], is_mapped: bool) -> list[str]:
    """Return the error of each file, one after another in one process."""
    found = []
    weights_only = True if kind == "stock" else None  # which is torch's own default
    for file in files:
        path = reachable(file, directory, is_mapped=is_mapped)
        trainer = trainer_for(kind, directory, RankZeroCheckpointIO(weights_only=weights_only))
        with pytest.raises(Exception) as caught:  # noqa: PT011
            trainer.test(Net(), ckpt_path=path, verbose=False)
        found.append(f"{caught.type.__name__}: {caught.value}")
    return found


@pytest.mark.lowest
@MAPPED_AND_SENT
def test_every_rank_names_the_fault_of_a_file(
    kind: Kind, is_mapped: bool, path: Path, tmp_path: Path
) -> None:
    """Damage is named by record, refusals by class, differences by parameter; nothing
    of a file is run.
    """
    files = [Path(shutil.copy(path, tmp_path / f"{number}.ckpt")) for number in range(len(WRONG))]
    for file, (spoil, _, _) in zip(files, WRONG, strict=True):
        spoil(file)
    one, other = on_ranks(kind, refused, tmp_path, files, is_mapped)
    assert one == other
    for (_, kind, says), message in zip(WRONG, one, strict=True):
        assert message.startswith(f"{kind}: ")
        assert says in message, message
    assert not (tmp_path / "it-ran").exists()


def warned(kind: Kind, directory: Path, path: Path, is_mapped: bool) -> list[str]:
    path = reachable(path, directory, is_mapped=is_mapped)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_for(kind, directory, RankZeroCheckpointIO()).test(
            Net(), ckpt_path=path, verbose=False
        )
    return [str(each.message) for each in caught if "checksums" in str(each.message)]


@MAPPED_AND_SENT
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_without_checksums_is_read_with_a_warning(
    kind: Kind, is_mapped: bool, path: Path, tmp_path: Path
) -> None:
    """Rank 0 warns, because changes to such a file cannot be detected."""
    with without_checksums():
        torch.save(torch.load(path, weights_only=False), path)
    told, others = on_ranks(kind, warned, tmp_path, path, is_mapped)
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
    trainer = make_trainer(make_strategy("ours", directory), devices=3)
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
    with_entry(path, "strikes", Strikes(victim if moment == "unpickled" else -1, is_killed))
    (tmp_path / "elsewhere").mkdir()
    outcomes = launch_ranks(read_together, 3, tmp_path, path, moment)
    for rank, outcome in enumerate(outcomes):
        assert outcome.exit_code != 0
        if is_killed and rank == victim:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert (f"rank {victim} " if is_killed else "the disk failed") in outcome.story(), (
                outcome.story()
            )


def use_the_plugin_alone(kind: Kind, directory: Path, path: Path) -> None:
    """Have a Trainer with only the plugin test, save to a file, train, and save to
    another store.
    """
    alone, remote = (
        make_trainer(make_strategy(kind, directory), plugins=[RankZeroCheckpointIO()])
        for _ in range(2)
    )
    alone.test(Net(), ckpt_path=path, verbose=False)
    alone.save_checkpoint(directory / "alone.ckpt")
    remote.fit(Net())
    remote.save_checkpoint("memory://checkpoints/it.ckpt")


def test_the_plugin_serves_a_stock_strategy_alone(path: Path, tmp_path: Path) -> None:
    """`Trainer(strategy="ddp", plugins=[RankZeroCheckpointIO()])` tests, trains and
    saves, also to other stores.

    What it saves is what `load_from_checkpoint` takes.
    """
    on_ranks("stock", use_the_plugin_alone, tmp_path, path)
    alone = Net.load_from_checkpoint(tmp_path / "stock" / "alone.ckpt")
    assert_same(weights(alone), torch.load(path)["state_dict"])
