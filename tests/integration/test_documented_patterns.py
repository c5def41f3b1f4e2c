"""Ways to evaluate and to optimise by hand that Lightning's documentation shows, unchanged, beside stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, MetricCollection, R2Score

from tests.harness.training import Batch, Kind, Net, assert_same, data, make_strategy, make_trainer, on_both, weights

Seen = dict[str, Any]


class CollectsOutputs(Net):
    """Keeps the outputs of the steps and gathers them at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.validation_outputs: list[Tensor] = []
        self.seen: Seen = {}

    def validation_step(self, batch: Batch, index: int) -> Tensor:  # type: ignore[override]
        predicted = self(batch[0])
        self.validation_outputs.append(predicted)
        return predicted

    def on_validation_epoch_end(self) -> None:
        everything = self.all_gather(torch.cat(self.validation_outputs))
        self.seen["gathered"] = everything.clone()  # type: ignore[union-attr]
        self.log("spread", everything.std(), rank_zero_only=True)  # type: ignore[union-attr]
        self.validation_outputs.clear()


class SeveralLoaders(Net):
    """Evaluates several loaders, each with its own metrics."""

    def __init__(self) -> None:
        super().__init__()
        both = MetricCollection({"mse": MeanSquaredError(), "r2": R2Score()})
        self.measures = nn.ModuleList([both.clone(prefix="first/"), both.clone(prefix="second/")])

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        measures: Any = self.measures[dataloader_idx]
        measures.update(self(batch[0]), batch[1])
        self.log_dict(measures, add_dataloader_idx=False)
        self.log("loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return [DataLoader(data(8), 2), DataLoader(data(12), 3)]


class ByHand(Net):
    """Steps an optimiser by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss, prog_bar=True, sync_dist=True)


class Accumulates(ByHand):
    """Steps after every second batch, and the scheduler at the end of the epoch."""

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (index + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]


class FollowsTheLoss(ByHand):
    """Gives a value that it has just logged to a scheduler, within the step and after the epoch."""

    def training_step(self, batch: Batch, index: int) -> None:
        super().training_step(batch, index)
        self.log("own", float(index if self.global_rank else -3 * index), sync_dist=True)
        scheduler: Any = self.lr_schedulers()
        scheduler.step(self.trainer.callback_metrics["own"])

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            scheduler: Any = self.lr_schedulers()
            scheduler.step(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)]


class TwoPlayers(Net):
    """Toggles two optimisers, as a GAN does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(1, 1)

    def training_step(self, batch: Batch, index: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        loss = self.judge(self(batch[0])).square().mean()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        judged = (self.judge(batch[1]) - self.judge(self(batch[0]).detach())).square().mean()
        self.manual_backward(judged)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)
        self.log_dict({"made": loss, "judged": judged}, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.layers.parameters()), torch.optim.Adam(self.judge.parameters())]


class WithClosure(ByHand):
    """Passes a closure to an optimiser that calls it several times."""

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class SchedulesEveryFew(ByHand):
    """Steps the scheduler after every third batch, and logs within inference mode."""

    def training_step(self, batch: Batch, index: int) -> None:
        super().training_step(batch, index)
        if (index + 1) % 3 == 0:
            self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        with torch.inference_mode():
            self.log("spread", self(batch[0]).std(), sync_dist=True)


class CollectsDictionaries(Net):
    """Collects dictionaries in the test and gathers them together, as older versions' ``test_epoch_end`` did."""

    def __init__(self) -> None:
        super().__init__()
        self.test_outputs: list[dict[str, Tensor]] = []
        self.seen: Seen = {}

    def test_step(self, batch: Batch, index: int) -> None:
        super().test_step(batch, index)
        self.test_outputs.append({"predicted": self(batch[0]), "target": batch[1]})

    def on_test_epoch_end(self) -> None:
        joined = {name: torch.cat([each[name] for each in self.test_outputs]) for name in self.test_outputs[0]}
        everywhere: Any = self.all_gather(joined)
        self.seen |= everywhere
        self.log("worst", (everywhere["predicted"] - everywhere["target"]).abs().max(), rank_zero_only=True)


class Reads(L.Callback):
    """Reads the metrics after each step and each evaluation, as loggers and progress bars do."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.found.append({name: value.clone() for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.on_train_batch_end(trainer)


def fit_and_test(kind: Kind, directory: Path, models: list[type[Net]], options: dict[str, bool]) -> list[Seen]:
    found = []
    for model_class in models:
        L.seed_everything(3)
        model = model_class()
        reads = Reads()
        callbacks: list[L.Callback] = [reads]
        if model_class is Net:
            callbacks.append(EarlyStopping("val_loss", patience=1))
        trainer = make_trainer(make_strategy(kind, directory, **options), callbacks=callbacks)
        trainer.fit(model)
        tested = trainer.test(model, verbose=False) if model_class is not SeveralLoaders else None
        seen = getattr(model, "seen", {})
        found.append({"weights": weights(model), "read": reads.found, "tested": tested, **seen})
    return found


def test_evaluation_and_manual_optimisation_as_documented(tmp_path: Path) -> None:
    """Weights, gathered outputs and every value that is read are stock's to the last bit."""
    models = [
        *(CollectsOutputs, CollectsDictionaries, SeveralLoaders, Net),
        *(ByHand, Accumulates, FollowsTheLoss, SchedulesEveryFew),
    ]
    for ours, stock in zip(*on_both(fit_and_test, tmp_path, models, {}), strict=True):
        for model_class, mine, expected in zip(models, ours, stock, strict=True):
            try:
                assert_same(mine, expected)
            except AssertionError as error:
                raise AssertionError(model_class.__name__) from error


def test_optimisers_that_leave_parameters_out_as_documented(tmp_path: Path) -> None:
    """Toggled optimisers, and a closure that is called several times, train as with stock."""
    models = [TwoPlayers, WithClosure]
    options = {"find_unused_parameters": True}
    for ours, stock in zip(*on_both(fit_and_test, tmp_path, models, options), strict=True):
        assert_same(ours, stock)
