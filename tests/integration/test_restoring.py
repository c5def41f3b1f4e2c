"""All ranks get the whole content of a file that they resume or evaluate from, whether
it is mapped or sent.
"""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core import rank_zero
from torch import nn

from lightning_ddp_ext import CheckpointError, RankZeroCheckpointIO
from tests.harness import training
from tests.harness.training import Net as TrainedNet
from tests.integration import checkpointing
from tests.integration.checkpointing import Keeper, Net
from tests.integration.continuing import signalled

BOTH = pytest.mark.parametrize("kind", training.KINDS)


def fit_from(
    trainer: L.Trainer, path: Path | str, model: L.LightningModule | None = None
) -> dict[str, Any]:
    """Train from a checkpoint, and return the whole state at the start of training."""
    states: list[dict[str, Any]] = []
    trainer.callbacks.append(
        training.At(
            "on_train_start", lambda trainer: states.append(checkpointing.everything(trainer))
        )
    )
    trainer.fit(Net() if model is None else model, ckpt_path=path)
    return states[0]


class TwoOptimizers(Net):
    """SGD for one weight and Adam for the others, stepped by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return torch.optim.SGD([first], lr=0.01, momentum=0.9), torch.optim.Adam(others, lr=0.01)


def resumed(
    kind: training.Kind, directory: Path, path: Path, is_mapped: bool, model: Any
) -> tuple[dict[str, Any], int]:
    """Return the state at the start of training and the final step."""
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    options = {"max_epochs": 2, "devices": int(os.environ["WORLD_SIZE"]), "plugins": plugins}
    trainer = checkpointing.trainer_for(
        kind, directory, RankZeroCheckpointIO(), [Keeper()], **options
    )
    path = checkpointing.reachable(path, directory, is_mapped=is_mapped)
    return fit_from(trainer, path, model()), trainer.global_step


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("kind", "world_size", "is_mapped", "model"),
    [
        ("ours", 2, True, Net),
        ("stock", 2, True, TwoOptimizers),
        ("ours", 4, False, Net),
    ],
)
def test_a_run_continues_with_all_that_was_saved(
    kind: training.Kind, world_size: int, is_mapped: bool, model: Any, tmp_path: Path
) -> None:
    """Each rank has the same weights, optimisers, schedules, scaler, progress and every
    kind of tensor as before.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=12.0)
    before = checkpointing.train_and_save(
        tmp_path / "it.ckpt", model(), [MixedPrecision("16-mixed", "cpu", scaler)]
    )
    results = training.on_ranks(
        kind, resumed, tmp_path, tmp_path / "it.ckpt", is_mapped, model, world_size=world_size
    )
    for state, steps in results:
        training.assert_same(state, before)
        assert steps == before["step"] + len(before["optimizers"]) * 8 // world_size


class SwapsWeights(Net):
    """Reads and changes the content before it is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        loaded = checkpoint["state_dict"]
        self.seen = loaded["layers.3.weight"].clone()
        self.kept = loaded["layers.0.bias"]
        loaded["layers.3.weight"] = loaded["layers.3.weight"].flip(1)
        loaded["layers.0.bias"] = torch.zeros(8)


class Lenient(Net):
    """Loads the keys that it finds, and has a key that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.extra = nn.Linear(2, 2)


def evaluated(kind: training.Kind, directory: Path, path: Path, is_mapped: bool) -> list[Any]:
    """Return the weights of a model with a hook, what the hook has seen, and the
    weights of a lenient model.
    """
    swaps = SwapsWeights()
    lenient = Lenient()
    extra = lenient.extra.weight.detach().clone()
    path = checkpointing.reachable(path, directory, is_mapped=is_mapped)
    for model in (swaps, lenient):
        checkpointing.trainer_for(kind, directory, RankZeroCheckpointIO()).test(
            model, ckpt_path=path, verbose=False
        )
    training.assert_same(lenient.extra.weight.detach(), extra)
    return [training.weights(swaps), swaps.seen, swaps.kept, training.weights(lenient)]


@checkpointing.MAPPED_AND_SENT
def test_hooks_and_models_choose_what_is_loaded(
    kind: training.Kind, is_mapped: bool, tmp_path: Path
) -> None:
    """`on_load_checkpoint` reads, changes and keeps the file's content; with
    `strict_loading = False` keys may lack.
    """
    before = checkpointing.train_and_save(tmp_path / "it.ckpt")["weights"]
    for loaded, seen, kept, lenient in training.on_ranks(
        kind, evaluated, tmp_path, tmp_path / "it.ckpt", is_mapped
    ):
        training.assert_same([seen, kept], [before["layers.3.weight"], before["layers.0.bias"]])
        training.assert_same(loaded["layers.3.weight"], before["layers.3.weight"].flip(1))
        assert not loaded["layers.0.bias"].any()
        training.assert_same({name: lenient[name] for name in before}, before)


def from_state_dict(
    kind: training.Kind, directory: Path, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """Return the state at the start of training, and the log lines about this and the
    file's other uses.
    """
    told: list[str] = []
    rank_zero.log.addFilter(lambda record: told.append(record.getMessage()) is None)
    state = fit_from(checkpointing.trainer_for(kind, directory, max_epochs=1), path)
    for use in ("validate", "test", "predict"):
        model = Net()
        getattr(checkpointing.trainer_for(kind, directory), use)(model, ckpt_path=path)
        training.assert_same(state["weights"], training.weights(model))
    return state, [
        line
        for line in told
        if line.startswith(f"{path} is a plain state dict: its weights are loaded")
    ]


@BOTH
def test_a_plain_state_dict_starts_a_run(kind: training.Kind, tmp_path: Path) -> None:
    """A file of `torch.save(model.state_dict())`, also of a wrapped and compiled model,
    gives a run its weights.

    So it does for validation, test and predictions, and the log lists what starts from
    scratch.
    """
    torch.manual_seed(1)
    saved = training.weights(Net())
    torch.save(
        {f"module._orig_mod.{name}": value for name, value in saved.items()}, tmp_path / "plain.pt"
    )
    results = training.on_ranks(kind, from_state_dict, tmp_path, tmp_path / "plain.pt")
    for state, _ in results:
        training.assert_same(state["weights"], saved)
        assert state["step"] == 0
    assert [len(told) for _, told in results] == [4, 0]


def last_on_rank_zero(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Resume from "last" with a directory that on rank 1 is another, empty one."""
    callback = checkpointing.checkpoint_callback(
        kind, dirpath=directory / os.environ["RANK"], save_last=True
    )
    return fit_from(
        checkpointing.trainer_for(kind, directory, None, [callback, Keeper()], max_epochs=2), "last"
    )


@pytest.mark.lowest
@BOTH
def test_last_is_what_rank_zero_finds(kind: training.Kind, tmp_path: Path) -> None:
    """A rank whose disk has no `last.ckpt` resumes from rank 0's."""
    for rank in "01":
        (tmp_path / kind / rank).mkdir(parents=True)
    before = checkpointing.train_and_save(tmp_path / kind / "0" / "last.ckpt")
    for state in training.on_ranks(kind, last_on_rank_zero, tmp_path):
        training.assert_same(state, before)


class Distilled(L.Callback):
    """Knows the file of a teacher, whose weights a student learns to imitate."""

    def __init__(self, ckpt_path: Path) -> None:
        self.ckpt_path = ckpt_path


def last_with_a_teacher(kind: training.Kind, directory: Path, teacher: Path) -> tuple[int, int]:
    trainer = checkpointing.trainer_for(kind, directory, None, [Distilled(teacher)], max_epochs=1)
    return fit_from(trainer, "last")["step"], trainer.global_step


def test_last_ignores_a_file_that_a_users_callback_names(tmp_path: Path) -> None:
    """Of the callbacks that save no checkpoint, no attribute is read."""
    checkpointing.train_and_save(tmp_path / "teacher.ckpt")
    ours, stock = training.on_both(last_with_a_teacher, tmp_path, tmp_path / "teacher.ckpt")
    assert ours == stock == [(0, 4), (0, 4)]


class Resumed(NamedTuple):
    """The steps at which a run began and ended, and its warnings about files."""

    first_step: int
    last_step: int
    skipped: list[str]


def run_command(
    kind: training.Kind, directory: Path, kept: Path, *callbacks: L.Callback
) -> Resumed:
    """Run one command line, from its newest file on, for ten epochs of four steps."""
    begun: list[int] = []
    begin = training.At("on_train_start", lambda trainer: begun.append(trainer.global_step))
    saver = ModelCheckpoint(kept, save_last=True)
    io = RankZeroCheckpointIO()
    options = {"max_epochs": 10, "default_root_dir": directory}  # long enough to agree on a stop
    trainer = checkpointing.trainer_for(kind, directory, io, [begin, saver, *callbacks], **options)
    with warnings.catch_warnings(record=True) as caught, suppress(SystemExit):
        warnings.simplefilter("always")
        trainer.fit(Net(), ckpt_path="last")
    texts = [str(each.message) for each in caught]
    return Resumed(begun[0], trainer.global_step, [text for text in texts if "skips" in text])


def run_until_stopped(kind: training.Kind, directory: Path, kept: Path) -> Resumed:
    """Send SIGTERM to rank 1 after some batches."""
    return run_command(kind, directory, kept, signalled("on_train_batch_end", 5, ranks=[1]))


def test_last_continues_after_a_preemption(tmp_path: Path) -> None:
    """The same command line, run again, resumes from the stop checkpoint, which is newer
    than `last.ckpt`.
    """
    kept = tmp_path / "kept"
    stopped, _ = training.on_ranks("ours", run_until_stopped, tmp_path, kept)
    assert stopped.first_step == 0
    assert stopped.last_step > 5
    resumed, _ = training.on_ranks("ours", run_command, tmp_path, kept)
    assert resumed == Resumed(stopped.last_step, 40, [])


def test_last_is_the_file_before_one_that_is_not_whole(tmp_path: Path) -> None:
    """Rank 0 names the newest file, which is cut off."""
    kept = tmp_path / "kept"
    stopped, _ = training.on_ranks("ours", run_until_stopped, tmp_path, kept)
    newest = kept / "last-preempted.ckpt"
    os.truncate(newest, newest.stat().st_size // 2)
    (kept / "last.ckpt").rename(kept / "last-v1.ckpt")
    resumed, other = training.on_ranks("ours", run_command, tmp_path, kept)
    assert resumed.first_step in range(4, stopped.last_step + 1, 4), "an epoch's end"
    assert resumed.last_step == 40
    assert other.skipped == []
    [told] = resumed.skipped
    assert told.startswith(
        f"ckpt_path='last' skips a file that cannot be used: checkpoint {newest} is damaged"
    )


def resumed_from_a_store(kind: training.Kind, directory: Path) -> list[int]:
    """Return the steps at which two runs begin that save to the same URL."""
    begun: list[int] = []
    for epochs in (1, 2):
        saving = ModelCheckpoint("memory://bucket/run", save_last=True)
        begin = training.At("on_train_start", lambda trainer: begun.append(trainer.global_step))
        options: dict[str, Any] = {
            "callbacks": [saving, begin],
            "enable_checkpointing": True,
            "max_epochs": epochs,
        }
        training.make_trainer(training.make_strategy(kind, directory), **options).fit(
            TrainedNet(), ckpt_path="last"
        )
    return begun


def test_last_is_found_at_a_url(tmp_path: Path) -> None:
    """A file system lists files without the protocol of the URL."""
    assert training.on_ranks("ours", resumed_from_a_store, tmp_path) == [[0, 4]] * 2


def refused_last(kind: training.Kind, directory: Path, kept: Path) -> str:
    trainer = checkpointing.trainer_for(
        kind, directory, None, [ModelCheckpoint(kept, save_last=True)], max_epochs=1
    )
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(Net(), ckpt_path="last")
    return f"{caught.type.__name__}: {caught.value}"


def test_last_is_not_an_older_file_if_the_newest_cannot_be_read(tmp_path: Path) -> None:
    """The newest file may be whole: every rank raises an error with its name and the
    reason.
    """
    checkpointing.train_and_save(tmp_path / "last.ckpt")
    os.utime(tmp_path / "last.ckpt", (0, 0))
    # Where nothing is mapped, reading is an error.
    (tmp_path / "last-preempted.ckpt").symlink_to("/proc/self/mem")
    one, other = training.on_ranks("ours", refused_last, tmp_path, tmp_path)
    assert one == other
    path = tmp_path / "last-preempted.ckpt"
    assert one.startswith(
        f"CheckpointError: checkpoint {path} could not be read, but may be intact: "
    )
