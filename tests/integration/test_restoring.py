"""Resuming and evaluating from files: all ranks get all of it, however it reaches them, and nothing stays there."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness.training import assert_same, make_trainer
from tests.integration.checkpointing import (
    AtStart,
    Keeper,
    Net,
    Side,
    checkpoint_callback,
    everything,
    mapped_checkpoints,
    odd_tensors,
    on_ranks,
    strategy_for,
    trainer_for,
)
from tests.integration.stopping import Signalled

SIDES = pytest.mark.parametrize("side", ["strategy", "callback"])
MODES = pytest.mark.parametrize("mode", ["map", "broadcast"])


def saved(path: Path, model: L.LightningModule, **options: Any) -> Any:
    """Train a little in this process alone, with stock Lightning, and save; what there was to be saved."""
    keeper = Keeper(odd_tensors())
    trainer = make_trainer("auto", devices=1, max_epochs=1, callbacks=[keeper], **options)
    trainer.fit(model)
    trainer.save_checkpoint(path)
    return everything(trainer, keeper)


def resumed(side: Side, directory: Path, path: Path, mode: Any, model: L.LightningModule) -> dict[str, Any]:
    keeper = Keeper()
    at_start = AtStart(keeper)
    options = {"max_epochs": 2, "devices": int(os.environ["WORLD_SIZE"])}
    trainer = trainer_for(side, directory, RankZeroCheckpointIO(restore=mode), [keeper, at_start], **options)
    trainer.fit(model, ckpt_path=path)
    return {"at start": at_start.state, "step": trainer.global_step, "mapped": mapped_checkpoints()}


@pytest.mark.lowest
@pytest.mark.parametrize(("side", "world_size"), [("strategy", 2), ("callback", 2), ("strategy", 4)])
@MODES
def test_a_run_continues_with_all_that_was_saved(side: Side, world_size: int, mode: str, tmp_path: Path) -> None:
    """Weights, optimisers, schedules, progress and every kind of tensor are on each rank what they were."""
    torch.manual_seed(1)
    before = saved(tmp_path / "it.ckpt", Net())
    results = on_ranks(resumed, side, tmp_path, tmp_path / "it.ckpt", mode, Net(), world_size=world_size)
    for result in results:
        assert_same(result["at start"] | {"epoch": 0}, before | {"epoch": 0, "mapped": []})
        assert result["step"] == before["step"] + 8 // world_size, "and training goes on from there"
        assert result["mapped"] == []


class SwapsWeights(Net):
    """Reads and changes what is about to be loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        self.seen = weights["out.weight"].clone()
        self.kept = weights["second.weight"]
        weights["out.weight"] = weights["out.weight"].flip(1)
        weights["second.weight"], weights["old"] = torch.zeros(4, 16), weights.pop("second.weight")
        del weights["old"]


def evaluated(side: Side, directory: Path, path: Any, model: L.LightningModule, **options: Any) -> dict[str, Any]:
    at_start = AtStart()
    io = RankZeroCheckpointIO(**options)
    trainer_for(side, directory, io, [at_start]).test(model, ckpt_path=path, verbose=False)
    return {**at_start.state, "seen": getattr(model, "seen", None), "kept": getattr(model, "kept", None)}


def evaluated_broadcast(side: Side, directory: Path, path: Any, model: L.LightningModule) -> dict[str, Any]:
    return evaluated(side, directory, path, model, restore="broadcast")


@SIDES
@pytest.mark.parametrize("function", [evaluated, evaluated_broadcast])
def test_hooks_see_and_change_the_files_content(side: Side, function: Any, tmp_path: Path) -> None:
    """What `on_load_checkpoint` reads is the file's, what it changes is loaded, and what it keeps is its own."""
    torch.manual_seed(1)
    before = saved(tmp_path / "it.ckpt", Net())["weights"]
    for result in on_ranks(function, side, tmp_path, tmp_path / "it.ckpt", SwapsWeights()):
        assert_same(result["seen"], before["out.weight"])
        assert_same(result["kept"], before["second.weight"])
        assert_same(result["weights"]["out.weight"], before["out.weight"].flip(1))
        assert not result["weights"]["second.weight"].any()
        assert result["mapped"] == []


def trained_with_averages(side: Side, directory: Path, path: str | None) -> dict[str, Tensor]:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    torch.manual_seed(1)
    epochs = 1 if path is None else 2
    mode = "map" if path is None else "broadcast"
    average = EMAWeightAveraging()
    trainer = trainer_for(side, directory, RankZeroCheckpointIO(restore=mode), [average], max_epochs=epochs)  # type: ignore[arg-type]
    model = Net()
    trainer.fit(model, ckpt_path=path)
    trainer.save_checkpoint(directory / f"{epochs}.ckpt")
    assert not mapped_checkpoints()
    return {name: value.clone() for name, value in model.state_dict().items()}


@SIDES
def test_averaged_weights_survive(side: Side, tmp_path: Path) -> None:
    """A callback that keeps a second model in the checkpoint, and swaps the two, gets both back on every rank."""
    on_ranks(trained_with_averages, side, tmp_path, None)
    content = torch.load(tmp_path / "1.ckpt", weights_only=True)
    ours = on_ranks(trained_with_averages, side, tmp_path, str(tmp_path / "1.ckpt"))
    assert_same(ours[0], ours[1])
    again = torch.load(tmp_path / "2.ckpt", weights_only=True)
    assert content.keys() == again.keys()
    assert content["averaging_state"] == {"n_averaged": 8} or "averaging_state" in content


class Silent(Net):
    """Logs nothing: Lightning's `log` cannot be compiled."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


def compiled(side: Side, directory: Path, path: Path) -> dict[str, Any]:
    at_start = AtStart()
    trainer = trainer_for(side, directory, None, [at_start], max_epochs=2)
    trainer.fit(torch.compile(Silent(), backend="eager"), ckpt_path=path)  # type: ignore[arg-type]
    trainer.save_checkpoint(directory / "compiled.ckpt")
    return at_start.state


def test_a_compiled_model_is_restored_and_saved(tmp_path: Path) -> None:
    """`fit(torch.compile(model))` takes the file of one that was not, and writes names without a prefix."""
    before = saved(tmp_path / "it.ckpt", Net())
    for state in on_ranks(compiled, "strategy", tmp_path, tmp_path / "it.ckpt"):
        assert_same(state["weights"], before["weights"])
    assert torch.load(tmp_path / "compiled.ckpt")["state_dict"].keys() == before["weights"].keys()


class Lenient(Net):
    """Takes what it finds, and has something that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.extra = nn.Linear(2, 2)


def test_missing_keys_are_no_error_where_the_model_allows_them(tmp_path: Path) -> None:
    """`strict_loading = False` loads what is there and leaves the rest alone."""
    torch.manual_seed(1)
    before = saved(tmp_path / "it.ckpt", Net())["weights"]
    model = Lenient()
    extra = model.extra.weight.detach().clone()
    for result in on_ranks(evaluated, "strategy", tmp_path, tmp_path / "it.ckpt", model):
        assert_same({name: result["weights"][name] for name in before}, before)
        assert_same(result["weights"]["extra.weight"], extra)


def fitted_from(side: Side, directory: Path, path: Path) -> dict[str, Any]:
    at_start = AtStart()
    trainer_for(side, directory, None, [at_start], max_epochs=1).fit(Net(), ckpt_path=path)
    by_test = evaluated(side, directory, path, Net())
    assert_same(at_start.state["weights"], by_test["weights"])
    return at_start.state


@SIDES
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_a_plain_state_dict_starts_a_run(side: Side, prefix: str, tmp_path: Path) -> None:
    """A file of `torch.save(model.state_dict())`, wrapped or compiled or not, gives `fit` and `test` its weights."""
    torch.manual_seed(1)
    weights = Net().state_dict()
    torch.save({prefix + name: value for name, value in weights.items()}, tmp_path / "plain.pt")
    for state in on_ranks(fitted_from, side, tmp_path, tmp_path / "plain.pt"):
        assert_same(state["weights"], weights)
        assert state["step"] == 0


def last_on_rank_zero(side: Side, directory: Path) -> dict[str, Any]:
    """Resume from "last" with a directory that on rank 1 is another, empty one."""
    mine = directory / os.environ["RANK"]
    at_start = AtStart()
    callback = checkpoint_callback(side, dirpath=mine, save_last=True)
    trainer_for(side, directory, None, [at_start, callback], max_epochs=2).fit(Net(), ckpt_path="last")
    return at_start.state


@pytest.mark.lowest
@SIDES
def test_last_is_what_rank_zero_finds(side: Side, tmp_path: Path) -> None:
    """A rank whose disk has no `last.ckpt` resumes all the same, from rank 0's."""
    torch.manual_seed(1)
    (tmp_path / "0").mkdir()
    (tmp_path / "1").mkdir()
    before = saved(tmp_path / "0" / "last.ckpt", Net())
    for state in on_ranks(last_on_rank_zero, side, tmp_path):
        assert_same(state["weights"], before["weights"])
        assert_same(state["optimizers"], before["optimizers"])


def with_placements(side: Side, directory: Path, path: Path, mode: Any) -> dict[str, Any]:
    seen: list[str] = []

    def by_hand(storage: Any, location: str) -> Any:
        seen.append(location)
        return storage.clone()

    choices = {"name": "cpu", "device": torch.device("cpu"), "mapping": {"cuda:0": "cpu"}, "callable": by_hand}
    found = {
        name: evaluated(side, directory, path, Net(), restore=mode, map_location=choice)["weights"]
        for name, choice in choices.items()
    }
    return {**found, "locations": sorted(set(seen))}


@MODES
def test_map_location_takes_what_torch_load_takes(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name, a device, a mapping and a callable each place a file that was saved from GPUs."""
    torch.manual_seed(1)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
    before = saved(tmp_path / "it.ckpt", Net())["weights"]
    for result in on_ranks(with_placements, "strategy", tmp_path, tmp_path / "it.ckpt", mode):
        for choice in ("name", "device", "mapping", "callable"):
            assert_same(result[choice], before)
        assert result["locations"] == ["cuda:0"]


def resumed_with_scaler(side: Side, directory: Path, path: Path) -> dict[str, Any]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    trainer = make_trainer(strategy_for(side, directory), plugins=[plugin], max_epochs=1)
    trainer.fit(Net(), ckpt_path=path)
    return plugin.state_dict()


def test_the_scaler_of_mixed_precision_is_restored(tmp_path: Path) -> None:
    """A run in half precision goes on with the scale that it had."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=12.0, growth_interval=99))
    trainer = make_trainer("auto", devices=1, max_epochs=1, plugins=[plugin])
    trainer.fit(Net())
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    for state in on_ranks(resumed_with_scaler, "strategy", tmp_path, tmp_path / "it.ckpt"):
        assert state == plugin.state_dict()
        assert state["scale"] == 12.0


def run_again(side: Side, directory: Path, signal_after: int | None) -> dict[str, Any]:
    """One and the same command line, and a SIGTERM to rank 1 after so many batches."""
    at_start = AtStart()
    callbacks: list[Any] = [at_start, ModelCheckpoint(directory / "kept", save_last=True)]
    if signal_after is not None and os.environ["RANK"] == "1":
        callbacks.append(Signalled(("on_train_batch_end", signal_after)))
    trainer = trainer_for(side, directory, None, callbacks, max_epochs=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(SystemExit):
            trainer.fit(Net(), ckpt_path="last")
    passed_over = [str(each.message) for each in caught if "passes over" in str(each.message)]
    return {"from": at_start.state["step"], "to": trainer.global_step, "passed over": passed_over}


def test_last_goes_on_after_a_preemption(tmp_path: Path) -> None:
    """The same command line, run again, resumes from the stop checkpoint, which is newer than `last.ckpt`."""
    stopped, _ = on_ranks(run_again, "strategy", tmp_path, 5)
    assert (stopped["from"], stopped["to"] > 5) == (0, True)
    resumed_, _ = on_ranks(run_again, "strategy", tmp_path, None)
    assert (resumed_["from"], resumed_["to"]) == (stopped["to"], 12)


def test_last_passes_over_a_file_that_is_not_whole(tmp_path: Path) -> None:
    """The newest whole one is taken, and the other one is named on rank 0."""
    on_ranks(run_again, "strategy", tmp_path, 5)
    stop_checkpoint = tmp_path / "kept" / "preempted.ckpt"
    os.truncate(stop_checkpoint, stop_checkpoint.stat().st_size // 2)
    again, other = on_ranks(run_again, "strategy", tmp_path, None)
    assert (again["from"], again["to"]) == (4, 12)
    [told] = again["passed over"]
    assert told.startswith(
        f"ckpt_path='last' passes over a file that is not whole: checkpoint {stop_checkpoint} is dam"
    )
    assert other["passed over"] == []
