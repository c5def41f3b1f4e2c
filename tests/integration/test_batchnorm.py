"""A model that is trained with BatchNorm over all ranks learns as in one process, and is itself again afterwards."""

from __future__ import annotations

import importlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_ddp_ext.errors import ConversionError, RankFailedError
from tests.harness.ranks import by_hand_env, import_package_anew, run_ranks
from tests.harness.training import KINDS, Kind, assert_same, data, make_trainer, on_both, on_ranks, weights
from tests.integration.normalising import (
    Classifier,
    images,
    layers,
    trainer_alone,
    trainer_with,
    types_and_modes,
)

# --- the same numbers as in one process -----------------------------------------------------------


def digits() -> TensorDataset:
    from sklearn.datasets import load_digits  # slow to import, and the ranks need not

    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels))


def train_alone(rank: int, world_size: int, dataset: TensorDataset) -> dict[str, Tensor]:
    model = Classifier(dataset)
    trainer_alone().fit(model)
    assert model.trainer.global_step == 2 * 112
    return weights(model)


def train_on_all(kind: Kind, directory: Path, dataset: TensorDataset) -> dict[str, Tensor]:
    model = Classifier(dataset)
    trainer_with(kind, directory, by="flag" if kind == "ours" else "callback").fit(model)
    return weights(model)


def test_digits_are_learned_as_in_one_process(tmp_path: Path) -> None:
    """Two ranks with batches of 8 get all weights and statistics of one process with batches of 16, both ways."""
    dataset = digits()
    (alone,) = run_ranks(train_alone, 1, dataset)
    for ranks in on_both(train_on_all, tmp_path, dataset):
        for learned in ranks:
            torch.testing.assert_close(learned, alone, rtol=1e-5, atol=1e-5)


class Unused(Classifier):
    """Has a layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Manual(Classifier):
    """Optimises by hand: two losses, each with a forward and a backward pass of its own, for one step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(0.5 * self.loss([batch[0].flip(-1), batch[1]]))
        optimizer.step()


class Twice(Classifier):
    """Two forward passes for one backward pass."""

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        return self.loss(batch) + 0.5 * self.loss([batch[0].flip(-1), batch[1]])


class Lbfgs(Classifier):
    """Several forward and backward passes a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3)


class Late(Classifier):
    """Makes its layers when the Trainer says so."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers

    def configure_model(self) -> None:
        torch.manual_seed(1)
        self.layers = layers()


class Compiled(Classifier):
    """Its layers are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.compile(self.layers, backend="aot_eager")


class Validated(Classifier):
    """Counts and averages over samples that two ranks cannot share evenly."""

    def validation_step(self, batch: Sequence[Tensor], index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(images(7), batch_size=2)


@dataclass
class Feature:
    """Something that a user may do beside, with the options of the Trainer and of the strategy."""

    model: Callable[[], Classifier] = Classifier
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    is_compiled: bool = False


FEATURES = {
    "nothing": Feature(),
    "unused parameters": Feature(Unused, strategy={"find_unused_parameters": True}),
    "gradients as views": Feature(strategy={"gradient_as_bucket_view": True}),
    "static graph": Feature(strategy={"static_graph": True}),
    "buffers that DDP does not send": Feature(Validated, strategy={"broadcast_buffers": False}),
    "manual optimisation": Feature(Manual),
    "two forward passes": Feature(Twice),
    "accumulation": Feature(trainer={"accumulate_grad_batches": 2}),
    "clipping": Feature(trainer={"gradient_clip_val": 0.1}),
    "closures": Feature(Lbfgs),
    "float32": Feature(trainer={"precision": "32-true"}, tolerance=1e-5),
    "bfloat16": Feature(trainer={"precision": "bf16-mixed"}, tolerance=2e-2),
    "configure_model": Feature(Late),
    "compiled layers": Feature(Compiled),
    "compiled": Feature(is_compiled=True),
    "validation": Feature(Validated, {"val_check_interval": 1, "num_sanity_val_steps": 1}),
}


def learn(feature: Feature, make: Callable[..., L.Trainer], **options: Any) -> dict[str, Any]:
    model = feature.model()
    trainer = make(**{"precision": "64-true", **feature.trainer, **options})
    trainer.fit(torch.compile(model, backend="eager") if feature.is_compiled else model)
    norms = [type(module) for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert norms == [nn.BatchNorm2d, nn.BatchNorm2d, nn.BatchNorm1d]
    return {"weights": weights(model), "metrics": dict(trainer.callback_metrics), "steps": trainer.global_step}


def features_alone(rank: int, world_size: int) -> dict[str, Any]:
    return {name: learn(feature, trainer_alone) for name, feature in FEATURES.items()}


def features_on_all(kind: Kind, directory: Path) -> dict[str, Any]:
    def make(**options: Any) -> L.Trainer:
        return trainer_with(kind, directory, **options)

    return {name: learn(feature, make, strategy=feature.strategy) for name, feature in FEATURES.items()}


def test_what_a_user_may_do_beside_gives_the_numbers_of_one_process(tmp_path: Path) -> None:
    """DDP's options, Lightning's ways to optimise, precisions and a validation in between: joint statistics each time.

    What the ranks have, running statistics included, is the same to the last bit.
    """
    (alone,) = run_ranks(features_alone, 1)
    first, second = on_ranks("ours", features_on_all, tmp_path)
    for name, feature in FEATURES.items():
        assert_same(first[name], second[name])
        tolerance = feature.tolerance
        assert first[name]["steps"] == alone[name]["steps"], name
        torch.testing.assert_close(
            first[name], alone[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert set(first["validation"]["metrics"]) == {"val_loss"}


class Shares(IterableDataset[list[Tensor]]):
    """Batches of these sizes, cut from the images one after another; a rank's are its part of each."""

    def __init__(self, sizes: Sequence[Sequence[int]], rank: int, world_size: int) -> None:
        self.sizes, self.rank, self.world_size = sizes, rank, world_size

    def __iter__(self) -> Iterator[list[Tensor]]:
        start = 0
        for shares in self.sizes:
            begin = start + sum(shares[: self.rank])
            end = begin + shares[self.rank] if self.world_size > 1 else start + sum(shares)
            start += sum(shares)
            if begin < end:
                yield list(images()[begin:end])


class Observer(Classifier):
    """Reads uneven shares and learns nothing but statistics."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self) -> DataLoader[Any]:
        sizes = ((4, 4), (5, 3), (6, 1), (1, 0))  # the last one has no step: rank 1 has no more data
        sizes = sizes if self.trainer.world_size > 1 else sizes[:3]
        return DataLoader(Shares(sizes, self.trainer.global_rank, self.trainer.world_size), batch_size=None)


def observe_alone(rank: int, world_size: int) -> Any:
    return learn(Feature(Observer), trainer_alone)


def observe_on_all(kind: Kind, directory: Path) -> Any:
    def make(**options: Any) -> L.Trainer:
        return trainer_with(kind, directory, strategy={"uneven_inputs": "stop_at_shortest"}, **options)

    return learn(Feature(Observer), make)


@pytest.mark.lowest
def test_samples_count_alike_however_unevenly_they_are_shared_out(tmp_path: Path) -> None:
    """With `uneven_inputs="stop_at_shortest"` batches of different sizes give the statistics of the joined ones."""
    (alone,) = run_ranks(observe_alone, 1)
    first, second = on_ranks("ours", observe_on_all, tmp_path)
    assert_same(first, second)
    torch.testing.assert_close(first, alone, rtol=1e-9, atol=1e-9)
    assert first["steps"] == 2 * 3


class Tunable(Classifier):
    """Has a learning rate that can be set."""

    lr = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tune(kind: Kind, directory: Path) -> None:
    for by in ("callback", "flag"):
        model, untuned = Tunable(), Tunable()
        before = facts(model), weights(model)
        trainer = trainer_with(kind, directory, by=by, default_root_dir=directory)
        finder = Tuner(trainer).lr_find(model, num_training=6, early_stop_threshold=None, update_attr=False)
        assert finder is not None
        assert len(finder.results["loss"]) == 6
        assert facts(model) == before[0]
        assert_same(weights(model), before[1])
        trainer.fit(model)
        trainer_with(kind, directory, by=by).fit(untuned)
        assert_same(weights(model), weights(untuned))


@pytest.mark.lowest
def test_a_learning_rate_is_found_without_a_trace(tmp_path: Path) -> None:
    """Lightning's Tuner leaves `fit` by an exception of its own: the model is what it was, and trains as it would."""
    on_ranks("ours", tune, tmp_path)


# --- the model is itself again --------------------------------------------------------------------


class Doubling(nn.BatchNorm1d):
    """Adds something to torch's layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class OnItsOwn(nn.BatchNorm1d):
    """Calls the function itself, and so cannot be made to synchronise."""

    def forward(self, input: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return batch_norm(input, mean, var, self.weight, self.bias, self.training)


class OddModel(Classifier):
    """Layers that are shared, in evaluation, synchronised already, derived, or that no one can synchronise.

    Args:
        end: what happens in the second training step.
    """

    def __init__(self, end: BaseException | None = None) -> None:
        super().__init__()
        from lightning_ddp_ext import SyncBatchNorm

        shared = nn.BatchNorm1d(16)
        self.layers[2] = nn.Sequential(
            nn.Linear(32, 16), shared, nn.ReLU(), shared, Doubling(16), OnItsOwn(16), SyncBatchNorm(16)
        )
        self.frozen = nn.BatchNorm1d(16).eval().requires_grad_(False)
        self.end = end
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(super().forward(x))[:, :10]

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor | None:
        if index == 1 and self.end is not None:
            raise self.end
        self.note("training")
        return super().training_step(batch, index)

    def on_train_end(self) -> None:
        self.note("on_train_end")

    def on_fit_end(self) -> None:
        self.note("on_fit_end")

    def note(self, place: str) -> None:
        self.seen[place] = (types_and_modes(self), list(self.state_dict()))


class BoomError(Exception):
    """What goes wrong in these tests; no other code raises it."""


def facts(model: nn.Module) -> dict[str, Any]:
    """What conversion could have changed, names of classes apart."""
    return {
        "types": [type(module) for module in model.modules()],
        "modes": types_and_modes(model),
        "keys": list(model.state_dict()),
        "attributes": [sorted(vars(module)) for module in model.modules() if isinstance(module, nn.BatchNorm1d)],
    }


# How fit ends: what is raised in the second step, and how many batches there are.
ENDS: list[tuple[BaseException | None, int | None]] = [
    (None, None),
    (None, 0),
    (BoomError("no such layer"), None),
    (KeyboardInterrupt(), None),
]


def leave_fit(kind: Kind, directory: Path) -> list[str]:
    """The ways out of ``fit`` after which, or in whose last hooks, something is left of the conversion."""
    wrong = []
    for by, (end, limit) in itertools.product(("callback", "flag") if kind == "ours" else ("callback",), ENDS):
        model = OddModel(end)
        before = facts(model)
        trainer = trainer_with(kind, directory, by=by, limit_train_batches=limit)
        with suppress(*(() if end is None else (BoomError, RankFailedError, SystemExit))):
            trainer.fit(model)
        places = not_plain(model, by, before, limit) if end is None else []
        if facts(model) != before or model.layers[2][1] is not model.layers[2][3]:
            places.append("afterwards")
        wrong += [f"{kind} {by} {end!r} {limit} {place}" for place in places]
    return wrong


def not_plain(model: OddModel, by: str, before: dict[str, Any], limit: int | None) -> list[str]:
    """The hooks that have seen other layers or keys than there were before."""
    places = ["on_fit_end", "on_train_end"] if limit is None and by == "callback" else ["on_fit_end"]
    wrong = [place for place in places if model.seen[place] != (before["modes"], before["keys"])]
    if limit is None and (model.seen["training"][0] == before["modes"] or model.seen["training"][1] != before["keys"]):
        wrong.append("training")
    return wrong


def test_whatever_ends_fit_the_model_is_what_it_was(tmp_path: Path) -> None:
    """Types, modes, keys and sharing, after the end, an error, Ctrl-C, and where there was nothing to train.

    The hooks at the end of ``fit`` see that, too; state dicts have the same keys all the time.
    """
    for ranks in on_both(leave_fit, tmp_path):
        assert ranks == [[], []]


def refused(kind: Kind, directory: Path) -> list[str]:
    from lightning_ddp_ext import SyncBatchNormConversion

    choices: list[tuple[str, dict[str, Any]]] = [
        ("nothing", {"include": "backbone.*"}),
        ("nothing", {"exclude": nn.BatchNorm3d}),
        ("flag", {"exclude": "layers.2"}),
        ("flag", {"process_group": 1}),
    ]
    errors = []
    for by, choice in choices:
        trainer = trainer_with(kind, directory, by=by, callbacks=[SyncBatchNormConversion(**choice)])
        with pytest.raises((ConversionError, RankFailedError)) as caught:
            trainer.fit(Classifier())
        errors.append(str(caught.value))
    trainer_with(kind, directory, by="flag", callbacks=[SyncBatchNormConversion()]).fit(Classifier())
    return errors


def test_choices_that_cannot_be_meant_end_fit_on_all_ranks(tmp_path: Path) -> None:
    """A selection that fits nothing, which names the layers that there are, and one beside the Trainer's flag."""
    layers_there = (
        "fits no BatchNorm layer; choose among layers.0.1, layers.1.1, layers.2.1, or modules that they are in"
    )
    for errors in on_ranks("ours", refused, tmp_path):
        assert errors[0].endswith(f"include='backbone.*' {layers_there}")
        assert errors[1].endswith(f"exclude=BatchNorm3d {layers_there}")
        for error in errors[2:]:
            assert "sync_batchnorm=True converts all layers over all ranks" in error


# --- checkpoints ----------------------------------------------------------------------------------


class Saver(L.Callback):
    """Saves at the end of each step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.directory / f"step{trainer.global_step}.ckpt")


def resume(kind: Kind, directory: Path, by: str) -> dict[str, Any]:
    """A run with a file after each step; the same from the second and fourth, with and without conversion."""
    whole, keeper = Classifier(), ModelCheckpoint(directory / by, "{epoch}", save_last=True)
    keys = list(whole.state_dict())
    trainer_with(kind, directory, by=by, callbacks=[Saver(directory / by), keeper], enable_checkpointing=True).fit(
        whole
    )
    whole.trainer.strategy.barrier()  # rank 0 has written its files
    files = sorted((directory / by).iterdir())
    states = [torch.load(path, weights_only=True)["state_dict"] for path in files]
    Classifier().load_state_dict(states[0])
    found: dict[str, Any] = {"files": [path.name for path in files]}
    found["other keys"] = [path.name for path, state in zip(files, states, strict=True) if list(state) != keys]
    for step, how in itertools.product((2, 4), (by, "nothing")):
        model = Classifier()
        trainer = trainer_with(kind, directory, by=how)
        trainer.fit(model, ckpt_path=directory / by / f"step{step}.ckpt")
        found[f"{step} {how}"] = (trainer.global_step, weights(model))
    found["whole"] = (whole.trainer.global_step, weights(whole))
    return found


@pytest.mark.parametrize("by", ["callback", "flag"])
def test_checkpoints_are_those_of_plain_layers_and_resuming_changes_nothing(by: str, tmp_path: Path) -> None:
    """Files from amid training have a plain model's keys; a resumed run is the uninterrupted one, bit by bit."""
    first, second = on_ranks("ours", resume, tmp_path, by)
    assert first["files"] == ["epoch=1.ckpt", "last.ckpt", *(f"step{step}.ckpt" for step in range(1, 7))]
    assert first["other keys"] == []
    for found, step in itertools.product((first, second), (2, 4)):
        assert_same(found[f"{step} {by}"], found["whole"])
        steps, without = found[f"{step} nothing"]
        assert steps == 6
        assert not torch.equal(without["layers.0.0.weight"], found["whole"][1]["layers.0.0.weight"])


# --- what is said ---------------------------------------------------------------------------------


class Lines(logging.Handler):
    """Keeps what has been logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def said(kind: Kind, directory: Path) -> list[list[str]]:
    """What a fit has logged and warned of about BatchNorm, by the callback and by the flag."""
    found = []
    for by in ("callback", "flag") if kind == "ours" else ("callback",):
        lines, ours = Lines(), logging.getLogger("lightning_ddp_ext")
        ours.setLevel(logging.INFO)
        for logger in (ours, logging.getLogger("lightning.pytorch")):
            logger.addHandler(lines)
        with warnings.catch_warnings(record=True) as caught:
            trainer = trainer_with(kind, directory, by=by, max_epochs=1)
            warnings.simplefilter("always")
            trainer.fit(OddModel())
        for logger in (ours, logging.getLogger("lightning.pytorch")):
            logger.removeHandler(lines)
        texts = [*lines.texts, *(str(warning.message) for warning in caught)]
        found.append([text for text in texts if "BatchNorm" in text])
    return found


def test_rank_zero_says_once_what_has_been_converted(tmp_path: Path) -> None:
    """A line, and a warning that names the layer that cannot be. The other ranks are silent."""
    for kind, (first, second) in zip(KINDS, on_both(said, tmp_path), strict=True):
        assert second == [[]] * len(first)
        assert len(first) == (2 if kind == "ours" else 1)
        for summary, warning in first:
            assert summary == (
                "SyncBatchNorm: 5 of 7 layers, statistics over 2 ranks; "
                "not: 1 its forward may normalise by itself, 1 synchronises already"
            )
            assert "layers.2.5 (OnItsOwn): its forward may normalise by itself" in warning


# --- groups of ranks ------------------------------------------------------------------------------


def in_pairs(kind: Kind, directory: Path) -> Tensor:
    from lightning_ddp_ext import SyncBatchNormConversion

    model = Classifier()
    callbacks = [SyncBatchNormConversion(process_group=2)]
    trainer_with(kind, directory, by="nothing", devices=4, callbacks=callbacks).fit(model)
    return model.layers[0][1].running_mean


def test_groups_have_statistics_of_their_own(tmp_path: Path) -> None:
    """With `process_group=2` two ranks each have the same statistics."""
    first, second, third, fourth = on_ranks("ours", in_pairs, tmp_path, world_size=4)
    assert_same((first, third), (second, fourth))
    assert not torch.equal(first, third)


# --- averaged models ------------------------------------------------------------------------------


def average(trainer: Callable[..., L.Trainer], which: str) -> dict[str, dict[str, Tensor]]:
    from lightning.pytorch import callbacks

    made = {
        "SWA": lambda: callbacks.StochasticWeightAveraging(0.01, 2),
        "EMA": lambda: callbacks.EMAWeightAveraging(decay=0.5),
        "EMA without buffers": lambda: callbacks.EMAWeightAveraging(decay=0.5, use_buffers=False),
        "nothing": L.Callback,
    }
    found = {}
    for place in ("before", "after"):  # the other callback
        model = Classifier()
        averaging = made[which]()
        trainer(callbacks=[averaging], place=place).fit(model)
        found[place] = weights(model)
    return found


def average_alone(rank: int, world_size: int, names: Sequence[str]) -> dict[str, Any]:
    def make(callbacks: list[L.Callback], place: str) -> L.Trainer:
        return trainer_alone(callbacks=callbacks, max_epochs=3, precision="64-true")

    return {name: average(make, name) for name in names}


def average_on_all(kind: Kind, directory: Path, names: Sequence[str]) -> dict[str, Any]:
    from lightning_ddp_ext import SyncBatchNormConversion

    def make(callbacks: list[L.Callback], place: str) -> L.Trainer:
        both = [*callbacks, SyncBatchNormConversion()] if place == "before" else [SyncBatchNormConversion(), *callbacks]
        options: dict[str, Any] = {"max_epochs": 3, "precision": "64-true"}
        return trainer_with(kind, directory, by="nothing", callbacks=both, **options)

    return {name: average(make, name) for name in names}


def test_averaged_models_have_the_statistics_that_they_have_in_one_process(tmp_path: Path) -> None:
    """Averaging callbacks before or after ours end with the weights and statistics of one process, as documented.

    `StochasticWeightAveraging` computes running statistics anew in a last pass over the data, with the averaged
    weights; `EMAWeightAveraging` averages them as it does weights, or with `use_buffers=False` takes the model's own.
    """
    names = ["SWA", "EMA", "EMA without buffers", "nothing"]
    (alone,) = run_ranks(average_alone, 1, names)
    for first, second in on_both(average_on_all, tmp_path, names):
        assert_same(first, second)
        # Lightning's averaged models are of float32.
        torch.testing.assert_close(first, alone, rtol=1e-6, atol=1e-6)
        last, own = first["EMA without buffers"]["after"], first["nothing"]["after"]
        for name in own:
            if name.endswith(("weight", "running_mean", "running_var")):
                is_own = torch.allclose(last[name], own[name], rtol=1e-6, atol=1e-6)
                assert is_own == ("running" in name), name


# --- other ways to start --------------------------------------------------------------------------


def start(rank: int, world_size: int) -> None:
    """Train on ranks that this process starts, to which model and callback travel, and compare."""
    from lightning_ddp_ext import DDPExtStrategy, SyncBatchNormConversion

    models = []
    for start_method in ("fork", "spawn"):
        model, conversion = Classifier(), SyncBatchNormConversion(include=(nn.Sequential,), process_group="node")
        before = facts(model)
        trainer = make_trainer(DDPExtStrategy(start_method=start_method), callbacks=[conversion])
        trainer.fit(model)
        assert facts(model) == before
        models.append(weights(model))
    alone = Classifier()
    trainer_alone().fit(alone)
    torch.testing.assert_close(models, 2 * [weights(alone)], rtol=1e-5, atol=1e-5)


def test_started_processes_get_the_callback(tmp_path: Path) -> None:
    """It travels to ranks that are forked or spawned; one that is spawned gets it by pickle."""
    run_ranks(start, 1, time_limit=60)


def train_in_the_other_tree(rank: int, world_size: int, directory: Path) -> list[Any]:
    pl = importlib.import_module("pytorch_lightning")
    ours = import_package_anew()

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
            return self.norm(batch[0]).square().sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = []
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    for options in ({"callbacks": [ours.SyncBatchNormConversion()]}, {"sync_batchnorm": True}):
        strategy, module = ours.DDPExtStrategy(f"file://{directory}/store"), Module()
        trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_steps=3, **quiet, **options)
        trainer.fit(module, DataLoader(data(), batch_size=4))
        found.append((type(module.norm) is nn.BatchNorm1d, weights(module)))
    return found


def test_the_other_class_tree_has_both(tmp_path: Path) -> None:
    """Callback and flag work with `import pytorch_lightning as pl`."""
    env = {**by_hand_env(2), "DDPX_LIGHTNING": "pytorch_lightning"}
    first, second = run_ranks(train_in_the_other_tree, 2, tmp_path, env=env)
    assert_same(first, second)
    assert_same(first[0], first[1])
    assert first[0][0] is True
