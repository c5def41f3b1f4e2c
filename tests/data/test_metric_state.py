"""Steps that leave no trace in metrics, without any ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MinMaxMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

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


METRICS = {"lists": BinaryAUROC, "in place": InPlace, "of another": lambda: MinMaxMetric(BinaryAccuracy())}


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
    torch.testing.assert_close(metric.compute(), expected.compute())
    assert getattr(metric, "update_count", None) == getattr(expected, "update_count", None)
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
