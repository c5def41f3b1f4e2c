"""Steps that leave no trace in metrics, without any ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, MinMaxMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryPrecision, BinaryRecall
from torchmetrics.utilities.data import dim_zero_cat

from lightning_ddp_ext.data.metric_state import preserve_metric_state

SCORES, LABELS = torch.tensor([0.9, 0.2, 0.6]), torch.tensor([1, 0, 0])
OTHERS = torch.tensor([0.1]), torch.tensor([1])


class InPlace(Metric):
    """Adds to its state in place, as some do, and counts by the way."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")
        self.calls: dict[str, int] = {"update": 0}

    def update(self, scores: Tensor, _: Tensor) -> None:
        self.total += scores.sum()
        self.calls["update"] += 1

    def compute(self) -> Tensor:
        return self.total


class Rows(Metric):
    """Keeps all that it is given."""

    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], "cat")

    def update(self, rows: Tensor) -> None:
        self.rows.append(rows)

    def compute(self) -> Tensor:
        return dim_zero_cat(self.rows)


def collection() -> MetricCollection:
    return MetricCollection([BinaryAccuracy(), BinaryPrecision(), BinaryRecall()])


METRICS = {
    "tensors": BinaryAccuracy,
    "lists": BinaryAUROC,
    "in place": InPlace,
    "of another": lambda: MinMaxMetric(BinaryAccuracy()),
    "collection": collection,
}


def value(metric: Any) -> Any:
    return metric.compute()


@pytest.mark.parametrize("how", ["update", "forward"])
@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_goes_on_as_if_nothing_had_been(kind: str, how: str) -> None:
    """Updated or called before, in between and after, a metric has the value and counts of before and after."""
    metric, expected = METRICS[kind](), METRICS[kind]()
    module = nn.ModuleList([nn.ModuleDict({"deep": metric})])
    for each in (metric, expected):
        getattr(each, how)(SCORES, LABELS)
    with preserve_metric_state({}, module):
        getattr(metric, how)(*OTHERS)
        metric.compute()
    for each in (metric, expected):
        getattr(each, how)(LABELS.float(), LABELS)
    torch.testing.assert_close(value(metric), value(expected))
    if isinstance(metric, Metric):
        assert (metric.update_count, metric._forward_cache) == (expected.update_count, expected._forward_cache)
    assert getattr(metric, "calls", None) == getattr(expected, "calls", None)


def test_a_metric_of_training_is_not_touched_by_inference() -> None:
    """States that are put back in inference mode can be added to in training, and buffers are the same objects."""
    metric = InPlace()
    metric.register_buffer("weight", torch.ones(()))
    weight = metric.weight
    with torch.inference_mode(), preserve_metric_state({}, metric):
        pass
    metric.update(SCORES, LABELS)
    assert metric.weight is weight


def test_groups_of_a_collection_are_found_by_steps_that_count() -> None:
    """What a sample that does not count makes equal by chance is not taken for one and the same metric."""
    metrics = collection()
    with preserve_metric_state({}, nn.ModuleList([metrics])):
        metrics.update(*OTHERS)
        assert metrics._groups_checked
    assert not metrics._groups_checked
    assert len(metrics._groups) == 3
    metrics.update(SCORES, LABELS)
    assert len(metrics.compute_groups) == 1
    assert float(metrics.compute()["BinaryPrecision"]) == 0.5


def test_empty_lists_keep_their_type_and_shape() -> None:
    """A list state without samples has no rows, of the type and width that those of other ranks have."""
    metric = Rows()
    with preserve_metric_state({}, metric):
        metric.update(torch.ones(2, 3, dtype=torch.float64))
    assert [(state.shape, state.dtype) for state in metric.rows] == [((0, 3), torch.float64)]
    metric.update(torch.ones(1, 3, dtype=torch.float64))
    assert metric.compute().tolist() == [[1.0, 1.0, 1.0]]


OPERATIONS = {"mean": torch.mean, "sum": torch.sum, "min": torch.min, "max": torch.max}


def as_it_is(number: Tensor, **_: Any) -> Tensor:
    return number


def log(results: _ResultCollection, number: float, *, sync: bool = True) -> None:
    for name, operation in OPERATIONS.items():
        options: Any = {"reduce_fx": operation, "sync_dist": sync, "sync_dist_fn": as_it_is, "batch_size": 2}
        results.log("step", name, torch.tensor(number), **options)


def logged(results: _ResultCollection) -> dict[str, float]:
    return {name: float(number) for name, number in results.metrics(on_step=False)["log"].items()}


@pytest.mark.lowest
def test_values_that_are_logged_stay_those_that_count() -> None:
    """Means, sums and extremes are those of the other steps."""
    results = _ResultCollection(training=False)
    log(results, 1.0)
    with preserve_metric_state(results, nn.Module()):
        log(results, 9.0)
    log(results, 3.0)
    assert logged(results) == {"mean": 2.0, "sum": 4.0, "min": 1.0, "max": 3.0}


@pytest.mark.lowest
@pytest.mark.parametrize("again", [False, True], ids=["first epoch", "later epoch"])
def test_what_is_logged_first_by_such_a_step_adds_nothing(again: bool) -> None:
    """The keys are there, to be reduced, with values that no mean, sum, minimum or maximum notices."""
    results = _ResultCollection(training=False)
    if again:
        log(results, 5.0)
        results.reset()
    with preserve_metric_state(results, nn.Module()):
        log(results, 9.0)
    states = {result.meta.name: (float(result.value), result.has_reset) for result in results.values()}
    assert states == {
        "mean": (0.0, False), "sum": (0.0, False), "min": (float("inf"), False), "max": (float("-inf"), False),
    }  # fmt: skip
    assert int(results["step.mean"].cumulated_batch_size) == 0


def test_what_no_rank_reduces_stays_finite() -> None:
    """A rank that has nothing else keeps the value of the step, rather than a mean over no samples."""
    results = _ResultCollection(training=False)
    with preserve_metric_state(results, nn.Module()):
        log(results, 9.0, sync=False)
    assert logged(results) == {"mean": 9.0, "sum": 9.0, "min": 9.0, "max": 9.0}
