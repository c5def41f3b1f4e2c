"""Files that cannot be read: every rank raises the same named error, whatever is wrong and wherever it is found."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness.damage import flip
from tests.harness.network import Network
from tests.harness.ranks import announce, by_hand_env, launch_ranks, run_ranks
from tests.harness.training import assert_same, make_trainer
from tests.integration.checkpointing import AtStart, Net, Side, on_ranks, strategy_for, trainer_for

SIDES = pytest.mark.parametrize("side", ["strategy", "callback"])
MODES = pytest.mark.parametrize("mode", ["map", "broadcast"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The checkpoint of a short run."""
    torch.manual_seed(1)
    trainer = make_trainer("auto", devices=1, max_epochs=1)
    trainer.fit(Net(width=64))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    return tmp_path / "it.ckpt"


class WouldRun:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def flipped_weight(path: Path) -> None:
    flip(path, "data/1")  # data/0 is a buffer of the module itself


def flipped_pickle(path: Path) -> None:
    flip(path, "data.pkl")


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_text("not a checkpoint")


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def missing(path: Path) -> None:
    path.unlink()


def hyper_parameters(path: Path) -> None:
    content = torch.load(path)
    torch.save({**content, "hyper_parameters": argparse.Namespace(lr=0.1)}, path)


def dangerous(path: Path) -> None:
    torch.save({"state_dict": WouldRun(f"touch {path.parent}/it-ran")}, path)


def other_shape(path: Path) -> None:
    content = torch.load(path)
    content["state_dict"]["out.weight"] = torch.zeros(2, 3)
    torch.save(content, path)


def missing_key(path: Path) -> None:
    content = torch.load(path)
    del content["state_dict"]["out.weight"]
    torch.save(content, path)


def no_weights(path: Path) -> None:
    torch.save({"model": {}, "epoch": 3}, path)


WRONG: list[tuple[Callable[[Path], None], str, str]] = [
    (flipped_weight, "DamagedCheckpointError", "is damaged: state_dict.first.weight, state_dict.back.weight differ"),
    (flipped_pickle, "DamagedCheckpointError", "is damaged: data.pkl differs"),
    (truncated, "DamagedCheckpointError", "was probably cut off"),
    (empty, "DamagedCheckpointError", "is empty"),
    (foreign, "DamagedCheckpointError", "is not a checkpoint"),
    (directory, "DamagedCheckpointError", "is a directory"),
    (missing, "CheckpointNotFoundError", "does not exist"),
    (hyper_parameters, "UnsafeCheckpointError", "add_safe_globals([argparse.Namespace])"),
    (dangerous, "UnsafeCheckpointError", "holds posix.system"),
    (other_shape, "CheckpointMismatchError", "size mismatch for out.weight"),
    (missing_key, "CheckpointMismatchError", 'Missing key(s) in state_dict: "out.weight"'),
    (no_weights, "CheckpointError", "has no entry 'state_dict' (it has 'model', 'epoch')"),
]


def refused(side: Side, directory: Path, files: list[Path], mode: Any) -> list[str]:
    """What each file is refused with, one after another in one process."""
    found = []
    for path in files:
        trainer = trainer_for(side, directory, RankZeroCheckpointIO(restore=mode))
        try:
            trainer.test(Net(width=64), ckpt_path=path, verbose=False)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("no error")
    return found


@pytest.mark.lowest
@SIDES
@MODES
def test_every_rank_says_what_is_wrong_with_a_file(side: Side, mode: str, path: Path, tmp_path: Path) -> None:
    """Damage is named by tensor, refusals by class, differences by parameter; nothing of a file is run."""
    files = []
    for spoil, _, _ in WRONG:
        files.append(Path(shutil.copy(path, tmp_path / f"{spoil.__name__}.ckpt")))
        spoil(files[-1])
    results = on_ranks(refused, side, tmp_path, files, mode)
    assert results[0] == results[1]
    for (_, kind, says), message in zip(WRONG, results[0], strict=True):
        assert message.startswith(f"{kind}: ")
        assert says in message, message
    assert not (tmp_path / "it-ran").exists()


def fitted_from_disk_of_rank_zero(rank: int, world_size: int, directory: Path, init_method: str) -> Any:
    """Each host has a directory of its own; only rank 0's has the file, under a path that the others do not have."""
    from lightning_ddp_ext import DDPExtStrategy

    at_start = AtStart()
    strategy = DDPExtStrategy(init_method=init_method)
    trainer = make_trainer(strategy, callbacks=[at_start], devices=1, num_nodes=2, max_epochs=2)
    trainer.fit(Net(width=64), ckpt_path=directory / str(rank) / "it.ckpt")
    return {name: at_start.state[name] for name in ("weights", "optimizers", "step")}


@pytest.mark.netns
def test_a_file_that_only_one_host_has_restores_all(two_hosts: Network, path: Path, tmp_path: Path) -> None:
    """Two machines with separate disks: the second receives weights, optimisers and progress from the first."""
    for rank in "01":
        (tmp_path / rank).mkdir()
    path.rename(tmp_path / "0" / "it.ckpt")
    env = {"RANK": str, "WORLD_SIZE": "2", "LOCAL_RANK": "0", "NODE_RANK": str}
    init_method = f"tcp://{two_hosts.address(0)}:29871"
    results = run_ranks(fitted_from_disk_of_rank_zero, 2, tmp_path, init_method, env=env, namespaces=list(two_hosts))
    content = torch.load(tmp_path / "0" / "it.ckpt")
    for state in results:
        assert_same(state["weights"], content["state_dict"])
        assert_same(state["optimizers"], content["optimizer_states"])
        assert state["step"] == content["global_step"]


def fails_while_restoring(rank: int, world_size: int, directory: Path, path: Path, moment: str, victim: int) -> None:
    """Ranks that read together; one of them raises, or is killed, at a moment of its own."""
    from lightning_ddp_ext.checkpoint import restore

    def strike() -> None:
        announce("struck")
        if moment.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError("the disk is gone")

    def striking(function: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        def replaced(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs) if after else None
            strike()
            return result

        return replaced

    if rank == victim and "before" in moment:
        restore.open_archive = striking(restore.open_archive)  # type: ignore[attr-defined]
    elif rank == victim and "during" in moment:
        restore.send = striking(restore.send)
    elif rank == victim and "after" in moment:
        restore.send = striking(restore.send, after=True)
    elif rank == victim and "unpacking" in moment:
        restore.UntypedStorage = striking(restore.UntypedStorage)  # type: ignore[attr-defined]
    trainer = make_trainer(
        strategy_for("strategy", directory), plugins=[RankZeroCheckpointIO(restore="broadcast")], devices=3
    )
    trainer.test(Net(width=64), ckpt_path=path, verbose=False)


@pytest.mark.parametrize(
    ("moment", "victim"),
    [
        ("raises before", 0),
        ("raises during", 0),
        ("raises after", 0),
        ("killed during", 0),
        ("killed after", 0),
        ("raises unpacking", 2),
        ("raises during", 1),
        ("killed during", 1),
    ],
)
def test_a_rank_that_fails_while_others_restore_ends_all(moment: str, victim: int, path: Path, tmp_path: Path) -> None:
    """Whoever fails, at whatever moment: all end within seconds, and say because of whom."""
    outcomes = launch_ranks(fails_while_restoring, 3, tmp_path, path, moment, victim, env=by_hand_env(3), time_limit=25)
    for rank, outcome in enumerate(outcomes):
        story = outcome.story()
        if rank == victim:
            assert "the disk is gone" in story or outcome.exit_code == -signal.SIGKILL
        else:
            assert "the disk is gone" in story or f"rank {victim} " in story, story


def from_shared_files(side: Side, directory: Path, path: Path) -> list[str]:
    """A model from a file, as users do it without a Trainer, and a Trainer with the plugin alone."""
    model = Net.load_from_checkpoint(path, width=64)
    assert isinstance(model, nn.Module)
    alone = make_trainer(strategy_for("callback", directory), plugins=[RankZeroCheckpointIO()])
    alone.test(Net(width=64), ckpt_path=path, verbose=False)
    alone.save_checkpoint(directory / "alone.ckpt")
    remote = make_trainer(strategy_for("callback", directory), plugins=[RankZeroCheckpointIO()])
    remote.fit(Net(width=64))
    remote.save_checkpoint("memory://checkpoints/it.ckpt")
    return sorted(model.state_dict())


def test_the_plugin_serves_a_stock_strategy_alone(path: Path, tmp_path: Path) -> None:
    """`Trainer(strategy="ddp", plugins=[RankZeroCheckpointIO()])` tests, trains and saves, also to other stores."""
    names = on_ranks(from_shared_files, "callback", tmp_path, path)
    content = torch.load(tmp_path / "alone.ckpt")
    assert names[0] == sorted(content["state_dict"])
    assert_same(content["state_dict"], torch.load(path)["state_dict"])
