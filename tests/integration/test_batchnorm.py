"""With BatchNorm over all ranks a model learns as in one process, and afterwards has
its own layers again.
"""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as pl_callbacks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext import SyncBatchNorm
from lightning_ddp_ext.errors import ConfigurationError, RankFailedError
from tests.harness import ranks, training
from tests.harness.network import Network
from tests.harness.training import Net

By = Literal["callback", "flag", "both"]  # what converts: our callback, or the Trainer's flag


class Scaled(nn.BatchNorm2d):
    gain = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return self.gain * super().forward(input)


class Squared:
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.square())


class Mixed(Squared, nn.BatchNorm2d):
    pass


class Doubled(SyncBatchNorm):
    """Overrides forward, and synchronises by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def hooked(layer: nn.Module) -> nn.Module:
    """Return a layer whose hooks change input, output and gradient."""
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    layer.register_forward_hook(lambda _, __, output: 2 * output)
    layer.register_full_backward_hook(lambda _, gradients, __: (3 * gradients[0],))
    return layer


class Joint(Net):
    """Learns from batches of six samples on any number of ranks."""

    def train_dataloader(self) -> DataLoader[Any]:
        world_size = self.trainer.world_size
        sampler = DistributedSampler(training.data(), world_size, self.trainer.global_rank, seed=3)
        return DataLoader(training.data(), 6 // world_size, sampler=sampler)


def trainer_with(
    kind: training.Kind,
    directory: Path,
    *,
    by: By = "callback",
    conversion: dict[str, Any] | None = None,
    callbacks: Sequence[L.Callback] = (),
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> L.Trainer:
    """Return a Trainer that converts BatchNorm."""
    from lightning_ddp_ext import SyncBatchNormConversion

    warnings.simplefilter("ignore", UserWarning)  # of Lightning, on few batches and workers
    converting = [SyncBatchNormConversion(**conversion or {})] if by != "flag" else []
    options = {"num_sanity_val_steps": 0, "sync_batchnorm": by != "callback", **options}
    strategy = strategy or {}
    return training.make_trainer(
        training.make_strategy(kind, directory, **strategy),
        callbacks=[*callbacks, *converting],
        **options,
    )


def trainer_alone(**options: Any) -> L.Trainer:
    """Return a Trainer in one process."""
    warnings.simplefilter("ignore", UserWarning)
    return training.make_trainer("auto", **{"devices": 1, "num_sanity_val_steps": 0, **options})


class Manual(Joint):
    """Optimises by hand: two forward passes for one backward pass, then one of each,
    for one step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) + 0.5 * self.loss([-batch[0], batch[1]]))
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Recomputed(Joint):
    """Runs its layers once more in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return out


class Split(nn.BatchNorm2d):
    """Has a separate layer for the lower half of the images."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.second = nn.BatchNorm2d(num_features)

    def forward(self, input: Tensor) -> Tensor:
        first, second = input.chunk(2, dim=2)
        return torch.cat([super().forward(first), self.second(second)], dim=2)


class Odd(Joint):
    """Has ten layers of all kinds: six can be converted, three override ``forward``, and
    one synchronises already.

    Args:
        end: what happens in the second training step.
        overriding: the classes of the three that override ``forward``.
    """

    def __init__(
        self,
        end: BaseException | None = None,
        overriding: Sequence[type[nn.Module]] = (Scaled, Mixed, Split),
    ) -> None:
        super().__init__()
        shared = nn.BatchNorm2d(8)  # converted: one layer in two places
        self.layers = nn.Sequential(
            nn.Linear(4, 32),
            nn.BatchNorm1d(32),  # converted
            nn.Unflatten(1, (8, 4, 1)),
            *(cls(8) for cls in overriding),  # the second layer of Split is converted
            shared,
            hooked(nn.BatchNorm2d(8)),  # converted
            nn.utils.spectral_norm(nn.BatchNorm2d(8)),  # converted
            nn.BatchNorm2d(8).eval(),  # converted
            Doubled(8),  # synchronises already
            shared,
            nn.Flatten(),
            nn.Linear(32, 1),
        )
        self.end = end
        self.seen: dict[str, Any] = {}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 1 and self.end is not None:
            raise self.end
        self.seen["training"] = facts(self)
        return super().training_step(batch, index)

    def on_train_end(self) -> None:
        self.seen["on_train_end"] = facts(self)

    def on_fit_end(self) -> None:
        self.seen["on_fit_end"] = facts(self)


def facts(model: nn.Module) -> dict[str, Any]:
    """Return the properties that a conversion could change."""
    return {
        "modules": [
            (name, id(each), type(each), each.training)
            for name, each in model.named_modules(remove_duplicate=False)
        ],
        "keys": list(model.state_dict()),
        "attributes": [sorted(vars(layer)) for layer in model.layers],
    }


@dataclass
class Feature:
    """A feature that users combine with BatchNorm, with its options of the Trainer and
    the strategy.
    """

    model: Callable[[], Joint] = Joint
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9
    by: By = "callback"
    average: Callable[[], L.Callback] | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of the Trainer, with its callbacks."""
        callbacks = [self.average()] if self.average is not None else []
        epochs = 1 if self.average is None else 2
        return {
            "precision": "64-true",
            "max_epochs": epochs,
            "callbacks": callbacks,
            **self.trainer,
        }


FEATURES = {
    "nothing": Feature(strategy={"broadcast_buffers": False}),
    "the Trainer's flag": Feature(by="flag"),
    "both": Feature(by="both"),
    "static graph": Feature(strategy={"static_graph": True}),
    "odd layers": Feature(partial(Odd, overriding=())),
    "manual optimisation": Feature(Manual),
    "activation checkpointing": Feature(Recomputed),
    "accumulation": Feature(trainer={"accumulate_grad_batches": 2}),
    "bfloat16": Feature(trainer={"precision": "bf16-mixed", "max_steps": 1}, tolerance=2e-2),
    # Lightning averages in float32, and not before 2.6 in the second way.
    "SWA": Feature(average=lambda: pl_callbacks.StochasticWeightAveraging(0.01, 1), tolerance=1e-6),
    "EMA": Feature(average=lambda: pl_callbacks.EMAWeightAveraging(decay=0.5), tolerance=1e-6),
}


def learn(feature: Feature, trainer: L.Trainer) -> dict[str, Any]:
    torch.manual_seed(1)
    model = feature.model()
    trainer.fit(model)
    assert nn.BatchNorm1d in map(type, model.modules())
    return {
        "weights": training.weights(model),
        "metrics": dict(trainer.callback_metrics),
        "steps": trainer.global_step,
    }


def features_alone(rank: int, world_size: int) -> dict[str, Any]:
    """Train without conversion; the callback, which can be pickled for spawned ranks,
    does nothing on one rank.
    """
    from lightning_ddp_ext import SyncBatchNormConversion

    model = Odd()
    before = facts(model)
    trainer_alone(
        callbacks=[pickle.loads(pickle.dumps(SyncBatchNormConversion()))], max_epochs=1
    ).fit(model)
    assert model.seen["training"] == before
    return {
        name: learn(feature, trainer_alone(**feature.options()))
        for name, feature in FEATURES.items()
    }


def features_on_all(kind: training.Kind, directory: Path) -> dict[str, Any]:
    found = {}
    for name in FEATURES if kind == "ours" else ["nothing"]:
        feature = FEATURES[name]
        how: dict[str, Any] = {
            "by": feature.by,
            "strategy": feature.strategy,
        }
        found[name] = learn(feature, trainer_with(kind, directory, **how, **feature.options()))
    return found


def test_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    """The statistics of ranks are joint, with layers and options of all kinds.

    The options are DDP's, and Lightning's ways to optimise. What the ranks have,
    running statistics included, is the same to the last bit; the callback also serves
    stock DDP.
    """
    (alone,) = ranks.run_ranks(features_alone, 1)
    first, second = training.on_ranks("ours", features_on_all, tmp_path)
    stock, _ = training.on_ranks("stock", features_on_all, tmp_path)
    for name, feature in FEATURES.items():
        training.assert_same(first[name], second[name])
        close = {"rtol": feature.tolerance, "atol": feature.tolerance}
        torch.testing.assert_close(
            first[name], alone[name], **close, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.testing.assert_close(stock["nothing"], alone["nothing"], rtol=1e-9, atol=1e-9)


WAYS = pytest.mark.parametrize(
    ("kind", "by"), [pytest.param("ours", "flag", marks=pytest.mark.lowest), ("stock", "callback")]
)


def fit_and_log(kind: training.Kind, directory: Path, by: By) -> list[str]:
    """Return the messages about BatchNorm of a run that converts layers."""
    lines = BufferingHandler(10_000)
    for logger in (logging.getLogger("lightning_ddp_ext"), logging.getLogger("lightning.pytorch")):
        logger.setLevel(logging.INFO)
        logger.addHandler(lines)
    model = Odd()
    before = facts(model)
    with warnings.catch_warnings(record=True) as caught:
        trainer = trainer_with(kind, directory, by=by, max_epochs=1)
        warnings.simplefilter("always")
        trainer.fit(model)
    assert model.seen["training"]["modules"] != before["modules"]
    assert model.seen["training"]["keys"] == before["keys"]
    if by == "callback":  # the flag's layers stay until the end of fit
        assert model.seen["on_train_end"] == before
    logged = [each.getMessage() for each in lines.buffer]
    warned = [str(each.message) for each in caught]
    return [text for text in [*logged, *warned] if "BatchNorm" in text]


@WAYS
def test_converted_and_other_layers_are_named(kind: training.Kind, by: By, tmp_path: Path) -> None:
    """Rank 0 logs a line about converted layers, and names the others in a warning."""
    (summary, warning), second = training.on_ranks(kind, fit_and_log, tmp_path, by)
    assert (
        summary == "SyncBatchNorm: 6 of 10 layers, statistics over 2 ranks; "
        "not converted: 3 overrides forward, 1 synchronises already"
    )
    assert (
        "layers.3 (Scaled) overrides forward; layers.4 (Mixed) overrides forward; layers.5 (Split) "
        in warning
    )
    assert second == []


def fit_to_an_end(
    kind: training.Kind, directory: Path, by: By, error: BaseException | None, limit: int | None
) -> None:
    model = Odd(error)
    before = facts(model)
    trainer = trainer_with(kind, directory, by=by, limit_train_batches=limit, max_epochs=1)
    with suppress(ZeroDivisionError, RankFailedError, SystemExit):
        trainer.fit(model)
    assert facts(model) == before
    if error is None:
        assert model.seen["on_fit_end"] == before


@WAYS
@pytest.mark.parametrize(
    ("error", "limit"),
    [
        pytest.param(None, None, id="success"),
        pytest.param(None, 0, id="no batches"),
        pytest.param(ZeroDivisionError(), None, id="error"),
        pytest.param(KeyboardInterrupt(), None, id="Ctrl-C"),
    ],
)
def test_whatever_ends_fit_the_model_is_what_it_was(
    kind: training.Kind, by: By, error: BaseException | None, limit: int | None, tmp_path: Path
) -> None:
    """Types, modes, keys and sharing of layers are unchanged."""
    training.on_ranks(kind, fit_to_an_end, tmp_path, by, error, limit)


def choose_twice(kind: training.Kind, directory: Path) -> str:
    model = Joint()
    before = facts(model)
    trainer = trainer_with(kind, directory, by="both", conversion={"process_group": 1})
    with pytest.raises((ConfigurationError, RankFailedError)) as caught:
        trainer.fit(model)
    assert facts(model) == before
    return str(caught.value)


def test_the_trainers_flag_allows_no_choice_of_ranks(tmp_path: Path) -> None:
    """All ranks raise an error that names the flag."""
    for error in training.on_ranks("ours", choose_twice, tmp_path):
        assert "sync_batchnorm=True synchronises all layers" in error


def resume(kind: training.Kind, directory: Path) -> None:
    """Run with a checkpoint in the middle of an epoch, and resume it."""
    for by in ("callback", "flag"):
        torch.manual_seed(1)
        whole = Joint()
        path = directory / f"{by}.ckpt"
        save = training.At(
            "on_train_batch_end",
            lambda trainer, path=path: trainer.save_checkpoint(path),
            earlier=4,
        )
        trainer_with(kind, directory, by=by, callbacks=[save]).fit(whole)
        assert list(torch.load(path, weights_only=True)["state_dict"]) == list(whole.state_dict())
        model = Joint()
        trainer_with(kind, directory, by=by).fit(model, ckpt_path=path)
        assert model.trainer.global_step == 8
        training.assert_same(training.weights(model), training.weights(whole))


def test_checkpoints_are_those_of_plain_layers_and_resuming_changes_nothing(tmp_path: Path) -> None:
    """A file from the middle of training has a plain model's keys.

    A resumed run equals an unbroken one, bit by bit.
    """
    training.on_ranks("ours", resume, tmp_path)


def in_groups(rank: int, world_size: int, init_method: str) -> list[Tensor]:
    from lightning_ddp_ext import DDPExtStrategy, SyncBatchNormConversion

    means = []
    for group in (2, "node"):
        model = Joint()
        strategy = DDPExtStrategy(init_method, broadcast_buffers=False)
        options = {"num_nodes": 2, "max_epochs": 1, "num_sanity_val_steps": 0}
        training.make_trainer(
            strategy, callbacks=[SyncBatchNormConversion(process_group=group)], **options
        ).fit(model)
        means.append(model.layers[1].running_mean)
    return means


@pytest.mark.netns
def test_groups_have_separate_statistics(two_hosts: Network) -> None:
    """Ranks of a group have the same statistics, and groups have different ones.

    With `process_group=2` a group has two ranks, with "node" those of one machine.
    """
    env = {
        **ranks.by_hand_env(4),
        "LOCAL_RANK": lambda rank: str(rank % 2),
        "NODE_RANK": lambda rank: str(rank // 2),
    }
    init_method = f"tcp://{two_hosts[0].address}:29873"
    places = [two_hosts[rank // 2] for rank in range(4)]
    results = ranks.run_ranks(in_groups, 4, init_method, env=env, namespaces=places)
    for means in zip(*results, strict=True):
        training.assert_same((means[0], means[2]), (means[1], means[3]))
        assert not torch.equal(means[0], means[2])


class Normalised(Net):
    """BatchNorm layers with a linear one behind each of them.

    Args:
        leaves_out: the layer that rank 1 does not run in its second step.
        extra: the rank that runs the whole model once more in its second step.
    """

    def __init__(self, *, leaves_out: str = "", extra: int | None = None) -> None:
        super().__init__()
        self.norms = nn.ModuleDict(
            {name: nn.BatchNorm1d(4) for name in ("first", "middle", "last")}
        )
        self.linears = nn.ModuleDict({name: nn.Linear(4, 4) for name in self.norms})
        self.layers = nn.Linear(4, 1)
        self.leaves_out = leaves_out
        self.extra = extra

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        is_second = index == 1
        if is_second and self.global_rank == self.extra:
            self.run_layers(batch[0], is_second)
        return self.loss([self.run_layers(batch[0], is_second), batch[1]])

    def run_layers(self, x: Tensor, is_second: bool) -> Tensor:
        is_other = is_second and self.global_rank == 1
        for name, norm in self.norms.items():
            x = self.linears[name](x if is_other and name == self.leaves_out else norm(x))
        return x


def normalise(rank: int, world_size: int, directory: Path, by: By, model: Normalised) -> None:
    unused = {"find_unused_parameters": True}
    trainer_with("ours", directory, by=by, strategy=unused, max_epochs=1).fit(model)


DIFFERENCES: list[tuple[By, dict[str, Any], str, str]] = [
    (
        "callback",
        {"leaves_out": "first"},
        "forward pass of norms.first",
        "forward pass of norms.middle",
    ),
    (
        "callback",
        {"leaves_out": "last"},
        "forward pass of norms.last",
        "backward pass of norms.middle",
    ),
    ("flag", {"extra": 1}, "backward pass of norms.last", "forward pass of norms.first"),
]


@pytest.mark.lowest
@pytest.mark.parametrize(("by", "options", "first", "second"), DIFFERENCES)
def test_ranks_that_run_other_layers_raise(
    by: By, options: dict[str, Any], first: str, second: str, tmp_path: Path
) -> None:
    """Every rank's error names each rank's layer.

    A rank skips a layer, or runs one more often.
    """
    told = (
        f"ranks are in different BatchNorm layers or passes: rank 0 is in the {first}, rank 1 is in"
        f" the {second}"
    )
    outcomes = ranks.launch_ranks(normalise, 2, tmp_path, by, Normalised(**options))
    assert "BatchNormError" in [outcome.failure.type_name for outcome in outcomes]
    assert all(told in outcome.failure.message for outcome in outcomes)
