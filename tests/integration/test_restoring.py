"""All ranks get the whole content of a file that they resume or evaluate from, whether
it is mapped or sent.
"""

from __future__ import annotations

import os
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core import rank_zero
from torch import Tensor, nn

from lightning_ddp_ext import CheckpointError, RankZeroCheckpointIO
from tests.harness.training import (
    KINDS,
    At,
    Kind,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
    weights,
)
from tests.harness.training import Net as TrainedNet
from tests.integration.checkpointing import (
    MAPPED_AND_SENT,
    Keeper,
    Net,
    checkpoint_callback,
    everything,
    reachable,
    train_and_save,
    trainer_for,
)
from tests.integration.continuing import signalled

BOTH = pytest.mark.parametrize("kind", KINDS)


def fit_from(
    trainer: L.Trainer, path: Path | str, model: L.LightningModule | None = None
) -> dict[str, Any]:
    """Train from a checkpoint, and return the whole state at the start of training."""
    states: list[dict[str, Any]] = []
    trainer.callbacks.append(
        At("on_train_start", lambda trainer: states.append(everything(trainer)))
    )  # type: ignore[attr-defined]
    trainer.fit(Net() if model is None else model, ckpt_path=path)
    return states[0]


class TwoOptimizers(Net):
    """SGD for one weight and Adam for the others, stepped by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        self.manual_backward(self.loss(batch))
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return torch.optim.SGD([first], lr=0.01, momentum=0.9), torch.optim.Adam(others, lr=0.01)


def resumed(
    kind: Kind, directory: Path, path: Path, is_mapped: bool, model: Any
) -> tuple[dict[str, Any], int]:
    """Return the state at the start of training and the final step."""
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]
    options = {"max_epochs": 2, "devices": int(os.environ["WORLD_SIZE"]), "plugins": plugins}
    trainer = trainer_for(kind, directory, RankZeroCheckpointIO(), [Keeper()], **options)
    path = reachable(path, directory, is_mapped=is_mapped)
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
    kind: Kind, world_size: int, is_mapped: bool, model: Any, tmp_path: Path
) -> None:
    """Each rank has the same weights, optimisers, schedules, scaler, progress and every
    kind of tensor as before.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=12.0)
    before = train_and_save(
        tmp_path / "it.ckpt", model(), [MixedPrecision("16-mixed", "cpu", scaler)]
    )
    results = on_ranks(
        kind, resumed, tmp_path, tmp_path / "it.ckpt", is_mapped, model, world_size=world_size
    )
    for state, steps in results:
        assert_same(state, before)
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


def evaluated(kind: Kind, directory: Path, path: Path, is_mapped: bool) -> list[Any]:
    """Return the weights of a model with a hook, what the hook has seen, and the
    weights of a lenient model.
    """
    swaps = SwapsWeights()
    lenient = Lenient()
    extra = lenient.extra.weight.detach().clone()
    path = reachable(path, directory, is_mapped=is_mapped)
    for model in (swaps, lenient):
        trainer_for(kind, directory, RankZeroCheckpointIO()).test(
            model, ckpt_path=path, verbose=False
        )
    assert_same(lenient.extra.weight.detach(), extra)
    return [weights(swaps), swaps.seen, swaps.kept, weights(lenient)]


@MAPPED_AND_SENT
def test_hooks_and_models_choose_what_is_loaded(
    kind: Kind, is_mapped: bool, tmp_path: Path
) -> None:
    """`on_load_checkpoint` reads, changes and keeps the file's content; with
    `strict_loading = False` keys may lack.
    """
    before = train_and_save(tmp_path / "it.ckpt")["weights"]
    for loaded, seen, kept, lenient in on_ranks(
        kind, evaluated, tmp_path, tmp_path / "it.ckpt", is_mapped
    ):
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


@pytest.mark.nightly
def test_a_compiled_model_is_restored_and_saved(tmp_path: Path) -> None:
    """`fit(torch.compile(model))` takes the file of one that was not, and writes names
    without a prefix.
    """
    before = train_and_save(tmp_path / "it.ckpt")
    for state in on_ranks("ours", compiled, tmp_path, tmp_path / "it.ckpt"):
        assert_same(state["weights"], before["weights"])
    assert (
        torch.load(tmp_path / "ours" / "compiled.ckpt")["state_dict"].keys()
        == before["weights"].keys()
    )


def from_state_dict(kind: Kind, directory: Path, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the state at the start of training, and the log lines about this and the
    file's other uses.
    """
    told: list[str] = []
    rank_zero.log.addFilter(lambda record: told.append(record.getMessage()) is None)
    state = fit_from(trainer_for(kind, directory, max_epochs=1), path)
    for use in ("validate", "test", "predict"):
        model = Net()
        getattr(trainer_for(kind, directory), use)(model, ckpt_path=path)
        assert_same(state["weights"], weights(model))
    return state, [
        line
        for line in told
        if line.startswith(f"{path} is a plain state dict: its weights are loaded")
    ]


@BOTH
def test_a_plain_state_dict_starts_a_run(kind: Kind, tmp_path: Path) -> None:
    """A file of `torch.save(model.state_dict())`, also of a wrapped and compiled model,
    gives a run its weights.

    So it does for validation, test and predictions, and the log lists what starts from
    scratch.
    """
    torch.manual_seed(1)
    saved = weights(Net())
    torch.save(
        {f"module._orig_mod.{name}": value for name, value in saved.items()}, tmp_path / "plain.pt"
    )
    results = on_ranks(kind, from_state_dict, tmp_path, tmp_path / "plain.pt")
    for state, _ in results:
        assert_same(state["weights"], saved)
        assert state["step"] == 0
    assert [len(told) for _, told in results] == [4, 0]


def last_on_rank_zero(kind: Kind, directory: Path) -> dict[str, Any]:
    """Resume from "last" with a directory that on rank 1 is another, empty one."""
    callback = checkpoint_callback(kind, dirpath=directory / os.environ["RANK"], save_last=True)
    return fit_from(trainer_for(kind, directory, None, [callback, Keeper()], max_epochs=2), "last")


@pytest.mark.lowest
@BOTH
def test_last_is_what_rank_zero_finds(kind: Kind, tmp_path: Path) -> None:
    """A rank whose disk has no `last.ckpt` resumes from rank 0's."""
    for rank in "01":
        (tmp_path / kind / rank).mkdir(parents=True)
    before = train_and_save(tmp_path / kind / "0" / "last.ckpt")
    for state in on_ranks(kind, last_on_rank_zero, tmp_path):
        assert_same(state, before)


class Distilled(L.Callback):
    """Knows the file of a teacher, whose weights a student learns to imitate."""

    def __init__(self, ckpt_path: Path) -> None:
        self.ckpt_path = ckpt_path


def last_with_a_teacher(kind: Kind, directory: Path, teacher: Path) -> tuple[int, int]:
    trainer = trainer_for(kind, directory, None, [Distilled(teacher)], max_epochs=1)
    return fit_from(trainer, "last")["step"], trainer.global_step


def test_last_ignores_a_file_that_a_users_callback_names(tmp_path: Path) -> None:
    """Of the callbacks that save no checkpoint, no attribute is read."""
    train_and_save(tmp_path / "teacher.ckpt")
    ours, stock = on_both(last_with_a_teacher, tmp_path, tmp_path / "teacher.ckpt")
    assert ours == stock == [(0, 4), (0, 4)]


def run_again(kind: Kind, directory: Path, kept: Path, is_stopped: bool) -> dict[str, Any]:
    """Run one command line; in the first run rank 1 gets SIGTERM after some batches."""
    states: list[dict[str, Any]] = []
    callbacks: list[Any] = [
        At("on_train_start", lambda trainer: states.append(everything(trainer))),
        ModelCheckpoint(kept, save_last=True),
    ]
    if os.environ["RANK"] == "1" and is_stopped:
        callbacks.append(signalled("on_train_batch_end", 5))
    io = RankZeroCheckpointIO()
    options = {"max_epochs": 10, "default_root_dir": directory}  # long enough to agree on a stop
    trainer = trainer_for(kind, directory, io, callbacks, **options)
    with warnings.catch_warnings(record=True) as caught, suppress(SystemExit):
        warnings.simplefilter("always")
        trainer.fit(Net(), ckpt_path="last")
    passed_over = [str(each.message) for each in caught if "skips" in str(each.message)]
    return {"from": states[0]["step"], "to": trainer.global_step, "passed over": passed_over}


def test_last_continues_after_a_preemption(tmp_path: Path) -> None:
    """The same command line, run again, resumes from the newest whole file, and rank 0
    names one that is not whole.

    The stop checkpoint is newer than `last.ckpt`.
    """
    kept = tmp_path / "kept"
    cut_off = tmp_path / "cut off"
    stopped, _ = on_ranks("ours", run_again, tmp_path, kept, True)
    assert (stopped["from"], stopped["to"] > 5) == (0, True)
    shutil.copytree(kept, cut_off)
    (cut_off / "last.ckpt").rename(cut_off / "last-v1.ckpt")
    os.truncate(cut_off / "last-preempted.ckpt", (kept / "last-preempted.ckpt").stat().st_size // 2)
    resumed, _ = on_ranks("ours", run_again, tmp_path, kept, False)
    assert resumed == {"from": stopped["to"], "to": 40, "passed over": []}
    again, other = on_ranks("ours", run_again, tmp_path, cut_off, False)
    assert (again["from"] % 4, 0 < again["from"] <= stopped["to"]) == (
        0,
        True,
    ), "last-v1.ckpt is of an epoch's end"
    assert (again["to"], other["passed over"]) == (40, [])
    [told] = again["passed over"]
    path = cut_off / "last-preempted.ckpt"
    assert told.startswith(
        f"ckpt_path='last' skips a file that cannot be used: checkpoint {path} is damaged"
    )


def resumed_from_a_store(kind: Kind, directory: Path) -> list[int]:
    """Return the steps at which two runs begin that save to the same URL."""
    begun: list[int] = []
    for epochs in (1, 2):
        saving = ModelCheckpoint("memory://bucket/run", save_last=True)
        begin = At("on_train_start", lambda trainer: begun.append(trainer.global_step))
        options: dict[str, Any] = {
            "callbacks": [saving, begin],
            "enable_checkpointing": True,
            "max_epochs": epochs,
        }
        make_trainer(make_strategy(kind, directory), **options).fit(TrainedNet(), ckpt_path="last")
    return begun


def test_last_is_found_at_a_url(tmp_path: Path) -> None:
    """A file system lists files without the protocol of the URL."""
    assert on_ranks("ours", resumed_from_a_store, tmp_path) == [[0, 4]] * 2


def refused_last(kind: Kind, directory: Path, kept: Path) -> str:
    trainer = trainer_for(
        kind, directory, None, [ModelCheckpoint(kept, save_last=True)], max_epochs=1
    )
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(Net(), ckpt_path="last")
    return f"{caught.type.__name__}: {caught.value}"


def test_last_is_not_an_older_file_if_the_newest_cannot_be_read(tmp_path: Path) -> None:
    """The newest file may be whole: every rank raises an error with its name and the
    reason.
    """
    train_and_save(tmp_path / "last.ckpt")
    os.utime(tmp_path / "last.ckpt", (0, 0))
    # Where nothing is mapped, reading is an error.
    (tmp_path / "last-preempted.ckpt").symlink_to("/proc/self/mem")
    one, other = on_ranks("ours", refused_last, tmp_path, tmp_path)
    assert one == other
    path = tmp_path / "last-preempted.ckpt"
    assert one.startswith(
        f"CheckpointError: checkpoint {path} could not be read, but may be intact: "
    )
