"""`fit` converts BatchNorm layers, reports this, and restores them afterwards; ranks that
run different ones raise, instead of mixing up statistics.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import Tensor, nn

from lightning_ddp_ext import (
    ConfigurationError,
    RankFailedError,
    SyncBatchNorm,
    SyncBatchNormConversion,
    convert_sync_batchnorm,
)
from tests.harness.ranks import launch_ranks, run_ranks
from tests.harness.training import Batch, Kind, Net, fit, fit_on, on_ranks, stock_group

By = Literal["callback", "flag"]  # what converts: our callback, or the Trainer's flag


class Scaled(nn.BatchNorm1d):
    """A subclass, which is not converted."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def classes_of(layers: Any) -> list[str]:
    """Return the name of the class of each layer."""
    return [type(layer).__name__ for layer in layers]


NORMS = ["BatchNorm1d", "BatchNorm1d", "BatchNorm1d", "Scaled", "SyncBatchNorm1d", "SyncBatchNorm"]
PLAIN = ["Linear", *NORMS, "Linear"]
CONVERTED = ["Linear", *["SyncBatchNorm1d"] * 3, *NORMS[3:], "Linear"]


class Observed(Net):
    """Has layers that are converted and others, and records their classes in hooks.

    As momentum encoders do, it trains beside a copy of layers.

    Args:
        error: what the second training step raises.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        shared = nn.BatchNorm1d(8)  # converted: one layer in two places
        by_hand = [convert_sync_batchnorm(nn.BatchNorm1d(8)), SyncBatchNorm(8)]
        layers = [shared, shared, nn.BatchNorm1d(8).eval(), Scaled(8), *by_hand]
        self.layers = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1))
        self.teacher: Any = ()
        self.error = error
        self.seen: dict[str, list[str]] = {}

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.layers[:4])

    def training_step(self, batch: Batch, index: int) -> Any:
        if index == 1 and self.error is not None:
            raise self.error
        self.seen["training"] = classes_of(self.layers)
        return super().training_step(batch, index)

    def on_train_end(self) -> None:
        self.seen["on_train_end"] = classes_of(self.layers)

    def on_fit_end(self) -> None:
        self.seen["on_fit_end"] = classes_of(self.layers)


def fit_and_see(
    rank: int,
    world_size: int,
    directory: Path,
    kind: Kind,
    by: By,
    error: BaseException | None = None,
    **options: Any,
) -> dict[str, list[str]]:
    """Return the classes of a model's layers in the hooks of a fit, and after it."""
    callbacks = [SyncBatchNormConversion()] if by == "callback" else []
    model = Observed(error)
    with (
        stock_group(rank, world_size, directory) if kind == "stock" else nullcontext(),
        suppress(ZeroDivisionError, RankFailedError, SystemExit),
    ):
        fit(kind, directory, model, *callbacks, sync_batchnorm=by == "flag", **options)
    after = {"after fit": classes_of(model.layers), "the copy": classes_of(model.teacher)}
    return {**model.seen, **after}


@pytest.mark.parametrize(
    ("kind", "by"), [pytest.param("ours", "flag", marks=pytest.mark.lowest), ("stock", "callback")]
)
def test_layers_are_converted_during_training_only(kind: Kind, by: By, tmp_path: Path) -> None:
    """The callback restores layers before ``on_train_end``, the flag before
    ``on_fit_end``.

    Rank 0 logs a line about converted layers, and names the others in a warning.
    """
    first, second = launch_ranks(fit_and_see, 2, tmp_path, kind, by)
    for outcome in (first, second):
        assert outcome.result == {
            "training": CONVERTED,
            "on_train_end": CONVERTED if by == "flag" else PLAIN,
            "on_fit_end": PLAIN,
            "after fit": PLAIN,
            "the copy": PLAIN[:4],
        }, outcome.story()
    summary = "SyncBatchNorm: 2 of 5 layers, statistics over 2 ranks\n"
    assert first.output.count(summary) == 1, first.story()
    assert first.output.count("are not converted: layers.4 (Scaled). To use the") == 1
    assert "BatchNorm" not in second.output


@pytest.mark.parametrize(
    ("kind", "by", "end"),
    [
        pytest.param("stock", "callback", {"limit_train_batches": 0}, id="no batches"),
        pytest.param("stock", "callback", {"error": ZeroDivisionError()}, id="error"),
        pytest.param("ours", "flag", {"error": ZeroDivisionError()}, id="error, by the flag"),
        pytest.param("ours", "flag", {"error": KeyboardInterrupt()}, id="Ctrl-C, by the flag"),
    ],
)
def test_whatever_ends_fit_the_model_is_what_it_was(
    kind: Kind, by: By, end: dict[str, Any], tmp_path: Path
) -> None:
    """All layers have their classes of before."""
    for seen in run_ranks(fit_and_see, 2, tmp_path, kind, by, **end):
        assert seen["after fit"] == PLAIN


def choose_layers_beside_the_flag(kind: Kind, directory: Path) -> str:
    model = Observed()
    conversion = SyncBatchNormConversion(exclude="layers.1")
    with pytest.raises((ConfigurationError, RankFailedError)) as caught:
        fit(kind, directory, model, conversion, sync_batchnorm=True)
    assert classes_of(model.layers) == PLAIN
    return str(caught.value)


def test_the_trainers_flag_allows_no_choice_of_layers(tmp_path: Path) -> None:
    """All ranks raise an error that names the flag."""
    for message in on_ranks("ours", choose_layers_beside_the_flag, tmp_path):
        assert "sync_batchnorm=True synchronises all layers" in message


# Ranks that run different layers.

LAYERS = ("first", "middle", "last")


class Normalised(Net):
    """Three BatchNorm layers with a linear one behind each of them.

    Args:
        others: the layers that rank 1 runs in its second step.
    """

    def __init__(self, others: Sequence[str]) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.BatchNorm1d(4) for name in LAYERS})
        self.linears = nn.ModuleDict({name: nn.Linear(4, 4) for name in LAYERS})
        self.layers = nn.Linear(4, 1)
        self.others = others

    def training_step(self, batch: Batch, index: int) -> Tensor:
        is_other = self.global_rank == 1 and index == 1
        x, y = batch
        for name in self.others if is_other else LAYERS:
            x = self.linears[name](self.norms[name](x))
        return self.loss([x, y])


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("others", "by_flag", "place_of_rank_0", "place_of_rank_1"),
    [
        (LAYERS[:2], False, "forward pass of norms.last", "backward pass of norms.middle"),
        (LAYERS + LAYERS, True, "backward pass of norms.last", "forward pass of norms.first"),
    ],
)
def test_ranks_that_run_other_layers_raise(
    others: Sequence[str],
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
    callbacks = [] if by_flag else [SyncBatchNormConversion()]
    options = {"strategy": {"find_unused_parameters": True}, "sync_batchnorm": by_flag}
    outcomes = fit_on(2, tmp_path, Normalised(others), *callbacks, **options)
    assert "BatchNormError" in [outcome.failure.type_name for outcome in outcomes]
    for outcome in outcomes:
        assert message in outcome.failure.message
