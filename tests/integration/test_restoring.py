"""Resuming and evaluating from files: all ranks get all of it, however it reaches them."""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness.training import KINDS, At, Kind, assert_same, on_ranks, weights
from tests.integration.checkpointing import (
    Keeper,
    Net,
    checkpoint_callback,
    everything,
    fit_from,
    train_and_save,
    trainer_for,
)
from tests.integration.stopping import signalled

BOTH = pytest.mark.parametrize("kind", KINDS)
MODES = pytest.mark.parametrize(("kind", "mode"), [("ours", "map"), ("stock", "broadcast")])


def resumed(kind: Kind, directory: Path, path: Path, mode: Any) -> tuple[dict[str, Any], int]:
    """Everything when training begins, and the steps at its end."""
    options = {"max_epochs": 2, "devices": int(os.environ["WORLD_SIZE"])}
    trainer = trainer_for(kind, directory, RankZeroCheckpointIO(restore=mode), [Keeper()], **options)
    return fit_from(trainer, path), trainer.global_step


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("kind", "world_size", "mode"),
    [("ours", 2, "map"), ("stock", 2, "map"), ("ours", 4, "broadcast")],
)
def test_a_run_continues_with_all_that_was_saved(kind: Kind, world_size: int, mode: str, tmp_path: Path) -> None:
    """Weights, optimisers, schedules, progress and every kind of tensor are on each rank what they were."""
    before = train_and_save(tmp_path / "it.ckpt")
    results = on_ranks(kind, resumed, tmp_path, tmp_path / "it.ckpt", mode, world_size=world_size)
    for state, steps in results:
        assert_same(state, before)
        assert steps == before["step"] + 8 // world_size


class SwapsWeights(Net):
    """Reads and changes what is about to be loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        loaded = checkpoint["state_dict"]
        self.seen = loaded["layers.3.weight"].clone()
        self.kept = loaded["layers.0.bias"]
        loaded["layers.3.weight"] = loaded["layers.3.weight"].flip(1)
        loaded["layers.0.bias"] = torch.zeros(8)


class Lenient(Net):
    """Takes what it finds, and has something that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.extra = nn.Linear(2, 2)


def evaluated(kind: Kind, directory: Path, path: Any, mode: Any) -> list[Any]:
    """The weights of a model with a hook, what the hook has seen, and the weights of a lenient model."""
    swaps, lenient = SwapsWeights(), Lenient()
    extra = lenient.extra.weight.detach().clone()
    for model in (swaps, lenient):
        trainer_for(kind, directory, RankZeroCheckpointIO(restore=mode)).test(model, ckpt_path=path, verbose=False)
    assert_same(lenient.extra.weight.detach(), extra)
    return [weights(swaps), swaps.seen, swaps.kept, weights(lenient)]


@MODES
def test_hooks_and_models_choose_what_is_loaded(kind: Kind, mode: str, tmp_path: Path) -> None:
    """`on_load_checkpoint` reads, changes and keeps the file's content; with `strict_loading = False` keys may lack."""
    before = train_and_save(tmp_path / "it.ckpt")["weights"]
    for loaded, seen, kept, lenient in on_ranks(kind, evaluated, tmp_path, tmp_path / "it.ckpt", mode):
        assert_same([seen, kept], [before["layers.3.weight"], before["layers.0.bias"]])
        assert_same(loaded["layers.3.weight"], before["layers.3.weight"].flip(1))
        assert not loaded["layers.0.bias"].any()
        assert_same({name: lenient[name] for name in before}, before)


class Silent(Net):
    """Logs nothing: Lightning's `log` cannot be compiled."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(batch)


def compiled(kind: Kind, directory: Path, path: Path) -> dict[str, Any]:
    trainer = trainer_for(kind, directory, max_epochs=2)
    state = fit_from(trainer, path, torch.compile(Silent(), backend="eager"))  # type: ignore[arg-type]
    trainer.save_checkpoint(directory / "compiled.ckpt")
    return state


def test_a_compiled_model_is_restored_and_saved(tmp_path: Path) -> None:
    """`fit(torch.compile(model))` takes the file of one that was not, and writes names without a prefix."""
    before = train_and_save(tmp_path / "it.ckpt")
    for state in on_ranks("ours", compiled, tmp_path, tmp_path / "it.ckpt"):
        assert_same(state["weights"], before["weights"])
    assert torch.load(tmp_path / "ours" / "compiled.ckpt")["state_dict"].keys() == before["weights"].keys()


def from_state_dict(kind: Kind, directory: Path, path: Path) -> dict[str, Any]:
    state = fit_from(trainer_for(kind, directory, max_epochs=1), path)
    model = Net()
    trainer_for(kind, directory).test(model, ckpt_path=path, verbose=False)
    assert_same(state["weights"], weights(model))
    return state


@BOTH
def test_a_plain_state_dict_starts_a_run(kind: Kind, tmp_path: Path) -> None:
    """A file of `torch.save(model.state_dict())`, also of a wrapped and compiled model, gives a run its weights."""
    torch.manual_seed(1)
    saved = weights(Net())
    torch.save({f"module._orig_mod.{name}": value for name, value in saved.items()}, tmp_path / "plain.pt")
    for state in on_ranks(kind, from_state_dict, tmp_path, tmp_path / "plain.pt"):
        assert_same(state["weights"], saved)
        assert state["step"] == 0


def last_on_rank_zero(kind: Kind, directory: Path) -> dict[str, Any]:
    """Resume from "last" with a directory that on rank 1 is another, empty one."""
    callback = checkpoint_callback(kind, dirpath=directory / os.environ["RANK"], save_last=True)
    return fit_from(trainer_for(kind, directory, None, [callback, Keeper()], max_epochs=2), "last")


@pytest.mark.lowest
@BOTH
def test_last_is_what_rank_zero_finds(kind: Kind, tmp_path: Path) -> None:
    """A rank whose disk has no `last.ckpt` resumes all the same, from rank 0's."""
    for rank in "01":
        (tmp_path / kind / rank).mkdir(parents=True)
    before = train_and_save(tmp_path / kind / "0" / "last.ckpt")
    for state in on_ranks(kind, last_on_rank_zero, tmp_path):
        assert_same(state, before)


def run_again(kind: Kind, directory: Path, kept: Path, is_stopped: bool) -> dict[str, Any]:
    """One and the same command line; the first time, rank 1 gets a SIGTERM after some batches."""
    states: list[dict[str, Any]] = []
    callbacks: list[Any] = [
        At("on_train_start", lambda trainer: states.append(everything(trainer))),
        ModelCheckpoint(kept, save_last=True),
    ]
    if is_stopped and os.environ["RANK"] == "1":
        callbacks.append(signalled("on_train_batch_end", 5))
    trainer = trainer_for(kind, directory, None, callbacks, max_epochs=10)  # long enough to agree on a stop
    with warnings.catch_warnings(record=True) as caught, suppress(SystemExit):
        warnings.simplefilter("always")
        trainer.fit(Net(), ckpt_path="last")
    passed_over = [str(each.message) for each in caught if "passes over" in str(each.message)]
    return {"from": states[0]["step"], "to": trainer.global_step, "passed over": passed_over}


def test_last_goes_on_after_a_preemption(tmp_path: Path) -> None:
    """The same command line, run again, resumes from the newest whole file, and rank 0 names one that is not whole.

    The stop checkpoint is newer than `last.ckpt`.
    """
    kept, cut_off = tmp_path / "kept", tmp_path / "cut off"
    stopped, _ = on_ranks("ours", run_again, tmp_path, kept, True)
    assert (stopped["from"], stopped["to"] > 5) == (0, True)
    shutil.copytree(kept, cut_off)
    os.truncate(cut_off / "preempted.ckpt", (kept / "preempted.ckpt").stat().st_size // 2)
    resumed, _ = on_ranks("ours", run_again, tmp_path, kept, False)
    assert resumed == {"from": stopped["to"], "to": 40, "passed over": []}
    again, other = on_ranks("ours", run_again, tmp_path, cut_off, False)
    assert (again["from"] % 4, 0 < again["from"] <= stopped["to"]) == (0, True), "last.ckpt is of the end of an epoch"
    assert (again["to"], other["passed over"]) == (40, [])
    [told] = again["passed over"]
    path = cut_off / "preempted.ckpt"
    assert told.startswith(f"ckpt_path='last' passes over a file that is not whole: checkpoint {path} is damaged")
