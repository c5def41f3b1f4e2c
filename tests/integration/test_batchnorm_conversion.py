"""`fit` converts BatchNorm layers, reports this, and restores them afterwards; ranks that
run different ones raise, instead of mixing up statistics.
"""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from torch import Tensor, nn

from lightning_ddp_ext import SyncBatchNorm, SyncBatchNormConversion, convert_sync_batchnorm
from lightning_ddp_ext.errors import ConfigurationError, RankFailedError
from tests.harness.ranks import launch_ranks, run_ranks
from tests.harness.training import Batch, Kind, Net, fit, make_trainer, on_ranks, stock_group

By = Literal["callback", "flag"]  # what converts: our callback, or the Trainer's flag

WAYS = pytest.mark.parametrize(
    ("kind", "by"), [pytest.param("ours", "flag", marks=pytest.mark.lowest), ("stock", "callback")]
)


class Scaled(nn.BatchNorm1d):
    """A subclass, which is not converted."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def classes_of(model: Any) -> list[str]:
    """Return the name of the class of each layer."""
    return [type(layer).__name__ for layer in model.layers]


NORMS = ["BatchNorm1d", "BatchNorm1d", "BatchNorm1d", "Scaled", "SyncBatchNorm1d", "SyncBatchNorm"]
PLAIN = ["Linear", *NORMS, "Linear"]
CONVERTED = ["Linear", *["SyncBatchNorm1d"] * 3, *NORMS[3:], "Linear"]


class Observed(Net):
    """Has layers that are converted and others, and records their classes in hooks.

    Args:
        error: what the second training step raises.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        shared = nn.BatchNorm1d(8)  # converted: one layer in two places
        by_hand = [convert_sync_batchnorm(nn.BatchNorm1d(8)), SyncBatchNorm(8)]
        layers = [shared, shared, nn.BatchNorm1d(8).eval(), Scaled(8), *by_hand]
        self.layers = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1))
        self.error = error
        self.seen: dict[str, list[str]] = {}

    def training_step(self, batch: Batch, index: int) -> Any:
        if index == 1 and self.error is not None:
            raise self.error
        self.seen["training"] = classes_of(self)
        return super().training_step(batch, index)

    def on_train_end(self) -> None:
        self.seen["on_train_end"] = classes_of(self)

    def on_fit_end(self) -> None:
        self.seen["on_fit_end"] = classes_of(self)


class End(NamedTuple):
    """How a fit ends: with an error of the second step, or after a share of the batches."""

    error: BaseException | None = None
    limit_train_batches: float = 1.0


SUCCESS = End()


def fit_and_see(
    rank: int, world_size: int, directory: Path, kind: Kind, by: By, end: End = SUCCESS
) -> dict[str, list[str]]:
    """Return the classes of a model's layers in the hooks of a fit, and after it."""
    callbacks = [SyncBatchNormConversion()] if by == "callback" else []
    options = {
        "sync_batchnorm": by == "flag",
        "limit_train_batches": end.limit_train_batches,
    }
    model = Observed(end.error)
    with (
        stock_group(rank, world_size, directory) if kind == "stock" else nullcontext(),
        suppress(ZeroDivisionError, RankFailedError, SystemExit),
    ):
        fit(kind, directory, model, *callbacks, **options)
    return {**model.seen, "after fit": classes_of(model)}


@WAYS
def test_layers_are_converted_during_training_only(kind: Kind, by: By, tmp_path: Path) -> None:
    """The callback restores layers before ``on_train_end``, the flag before
    ``on_fit_end``.
    """
    at_train_end = CONVERTED if by == "flag" else PLAIN
    for seen in run_ranks(fit_and_see, 2, tmp_path, kind, by):
        assert seen == {
            "training": CONVERTED,
            "on_train_end": at_train_end,
            "on_fit_end": PLAIN,
            "after fit": PLAIN,
        }


@WAYS
def test_converted_and_other_layers_are_named(kind: Kind, by: By, tmp_path: Path) -> None:
    """Rank 0 logs a line about converted layers, and names the others in a warning."""
    first, second = launch_ranks(fit_and_see, 2, tmp_path, kind, by)
    summary = "SyncBatchNorm: 2 of 5 layers, statistics over 2 ranks\n"
    assert first.output.count(summary) == 1, first.story()
    assert first.output.count("are not converted: layers.4 (Scaled). To use the") == 1
    assert "BatchNorm" not in second.output


@WAYS
@pytest.mark.parametrize(
    "end",
    [
        pytest.param(End(limit_train_batches=0), id="no batches"),
        pytest.param(End(ZeroDivisionError()), id="error"),
        pytest.param(End(KeyboardInterrupt()), id="Ctrl-C"),
    ],
)
def test_whatever_ends_fit_the_model_is_what_it_was(
    kind: Kind, by: By, end: End, tmp_path: Path
) -> None:
    """All layers have their classes of before."""
    for seen in run_ranks(fit_and_see, 2, tmp_path, kind, by, end):
        assert seen["after fit"] == PLAIN


class Teacher(Net):
    """Trains beside a copy of its layers, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm1d(4), *self.layers)

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.layers)


def train_teacher(kind: Kind, directory: Path) -> list[type]:
    model = Teacher()
    fit(kind, directory, model, sync_batchnorm=True)
    return [type(layers[0]) for layers in (model.layers, model.teacher)]


def test_copies_in_the_model_are_restored_too(tmp_path: Path) -> None:
    """A copy that was made during training has the class that its original had."""
    assert on_ranks("ours", train_teacher, tmp_path) == [[nn.BatchNorm1d] * 2] * 2


def choose_layers_beside_the_flag(kind: Kind, directory: Path) -> str:
    model = Observed()
    conversion = SyncBatchNormConversion(exclude="layers.1")
    with pytest.raises((ConfigurationError, RankFailedError)) as caught:
        fit(kind, directory, model, conversion, sync_batchnorm=True)
    assert classes_of(model) == PLAIN
    return str(caught.value)


def test_the_trainers_flag_allows_no_choice_of_layers(tmp_path: Path) -> None:
    """All ranks raise an error that names the flag."""
    for message in on_ranks("ours", choose_layers_beside_the_flag, tmp_path):
        assert "sync_batchnorm=True synchronises all layers" in message


def fit_alone(rank: int, world_size: int) -> None:
    model = Observed()
    copied = pickle.loads(pickle.dumps(SyncBatchNormConversion()))
    make_trainer("auto", devices=1, callbacks=[copied]).fit(model)
    assert model.seen["training"] == PLAIN


def test_the_callback_does_nothing_on_one_rank() -> None:
    """A pickled copy, as spawned ranks have, leaves the layers unchanged."""
    run_ranks(fit_alone, 1)


# Ranks that run different layers.


class Normalised(Net):
    """Three BatchNorm layers with a linear one behind each of them.

    Args:
        run_otherwise: runs the layers in the second step of rank 1.
    """

    def __init__(self, run_otherwise: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norms = nn.ModuleDict(
            {name: nn.BatchNorm1d(4) for name in ("first", "middle", "last")}
        )
        self.linears = nn.ModuleDict({name: nn.Linear(4, 4) for name in self.norms})
        self.layers = nn.Linear(4, 1)
        self.run_otherwise = run_otherwise

    def run_layers(self, x: Tensor, left_out: str = "") -> Tensor:
        for name, norm in self.norms.items():
            x = self.linears[name](x if name == left_out else norm(x))
        return x

    def training_step(self, batch: Batch, index: int) -> Tensor:
        is_other = self.global_rank == 1 and index == 1
        run = self.run_otherwise if is_other else Normalised.run_layers
        x, y = batch
        return self.loss([run(self, x), y])


def run_twice(model: Normalised, x: Tensor) -> Tensor:
    model.run_layers(x)
    return model.run_layers(x)


WITHOUT_FIRST = partial(Normalised.run_layers, left_out="first")
WITHOUT_LAST = partial(Normalised.run_layers, left_out="last")


def train(rank: int, world_size: int, directory: Path, model: Normalised, by_flag: bool) -> None:
    callbacks = [] if by_flag else [SyncBatchNormConversion()]
    unused = {"find_unused_parameters": True}
    fit("ours", directory, model, *callbacks, strategy=unused, sync_batchnorm=by_flag)


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("run_otherwise", "by_flag", "place_of_rank_0", "place_of_rank_1"),
    [
        (WITHOUT_FIRST, False, "forward pass of norms.first", "forward pass of norms.middle"),
        (WITHOUT_LAST, False, "forward pass of norms.last", "backward pass of norms.middle"),
        (run_twice, True, "backward pass of norms.last", "forward pass of norms.first"),
    ],
)
def test_ranks_that_run_other_layers_raise(
    run_otherwise: Callable[[Normalised, Tensor], Tensor],
    by_flag: bool,
    place_of_rank_0: str,
    place_of_rank_1: str,
    tmp_path: Path,
) -> None:
    """Every rank's error names each rank's layer."""
    message = (
        f"ranks are in different BatchNorm layers or passes: rank 0 is in the {place_of_rank_0},"
        f" rank 1 is in the {place_of_rank_1}"
    )
    outcomes = launch_ranks(train, 2, tmp_path, Normalised(run_otherwise), by_flag)
    assert "BatchNormError" in [outcome.failure.type_name for outcome in outcomes]
    for outcome in outcomes:
        assert message in outcome.failure.message
