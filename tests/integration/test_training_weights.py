"""In a validation, weights that a hook has swapped in are told from those that are
trained.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lightning_ddp_ext.integration.stopping.training_weights import TrainingWeights
from tests.harness.training import Net, make_trainer


def before_validation(model: Net, *callbacks: L.Callback) -> TrainingWeights:
    """Return the weights of a model that has trained and begins to validate."""
    trainer = make_trainer("auto", callbacks=list(callbacks))
    trainer.strategy.connect(model)
    weights = TrainingWeights()
    weights.on_train_start(trainer)
    trainer.fit_loop.epoch_loop.batch_progress.total.processed += 1
    weights.before_validation(trainer)
    return weights


class HasEvalHook(Net):
    """Has a hook that may swap weights before the Trainer's other hooks."""

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()


class HasBatchHook(L.Callback):
    """Has a hook that may swap weights for each batch."""

    def on_validation_batch_start(self, *_: Any) -> None:
        """Do nothing here."""


@pytest.mark.parametrize(
    ("model", "callback", "are_compared"),
    [
        pytest.param(Net, L.Callback, False, id="no hook"),
        pytest.param(HasEvalHook, L.Callback, True, id="a hook of the model"),
        pytest.param(Net, HasBatchHook, True, id="a hook of a callback"),
    ],
)
def test_weights_are_compared_if_a_users_hook_may_swap_them(
    model: Callable[[], Net], callback: Callable[[], L.Callback], are_compared: bool
) -> None:
    """Other weights then do not match the trained ones; without such a hook they do."""
    validated = model()
    weights = before_validation(validated, callback())
    assert weights.match(validated)
    with torch.no_grad():
        validated.layers[0].weight.neg_()
    assert weights.match(validated) is not are_compared
