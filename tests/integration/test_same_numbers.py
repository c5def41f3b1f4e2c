"""`DDPExtStrategy` in place of `ddp`: the same numbers, to the last bit.

These are the models, options and loaders that the programs of ``test_stock_sweep`` do
not have.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.functional import dropout
from torch.utils.data import DataLoader, Dataset

from tests.harness import training
from tests.harness.training import Net, Rows
from tests.integration import continuing

# Manual optimisation, as Lightning's documentation shows it.


class ByHand(Net):
    """Steps an optimiser by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: training.Batch, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        self.log("loss", loss, prog_bar=True, sync_dist=True)


class Accumulates(ByHand):
    """Steps after every second batch, and the scheduler at the end of the epoch."""

    def training_step(self, batch: training.Batch, index: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (index + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()


class WithClosure(ByHand):
    """Passes a closure to an optimiser that calls it several times."""

    def training_step(self, batch: training.Batch, index: int) -> None:
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

    def training_step(self, batch: training.Batch, index: int) -> None:
        super().training_step(batch, index)
        if (index + 1) % 3 == 0:
            self.lr_schedulers().step()
        with torch.inference_mode():
            self.log("spread", self(batch[0]).std(), sync_dist=True)


# Other models that DDP treats differently.


class HalfUsed(Net):
    """Leaves a layer out of its loss, another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])

    def loss(self, batch: training.Batch) -> Tensor:
        return super().loss(batch) + self.branches[self.global_rank](batch[1]).square().mean()


class Sparse(Net):
    """Has sparse gradients, in which a row occurs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 1, sparse=True)
        self.layers.sparse = torch.ones(2)  # not a setting, but a name of the user's

    def loss(self, batch: training.Batch) -> Tensor:
        rows = batch[0].mul(7).long().abs() % 3
        return super().loss(batch) + self.table(rows).sub(batch[0].unsqueeze(2)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Case(NamedTuple):
    """A model, options of the Trainer and of the strategy."""

    model: type[Net] = Net
    trainer: Mapping[str, Any] = {}
    strategy: Mapping[str, Any] = {}


FIND_UNUSED = {"find_unused_parameters": True}
LOCAL_AFTER_STEP_2 = PostLocalSGDState(None, None, 2)
MODEL_AVERAGING = {"ddp_comm_state": LOCAL_AFTER_STEP_2, "model_averaging_period": 2}
SHORT = {"max_epochs": 1}
CASES = {
    "clipping by hand": Case(ByHand),
    "manual accumulation": Case(Accumulates),
    "a scheduler of every third batch": Case(SchedulesEveryFew),
    "a closure": Case(WithClosure, strategy=FIND_UNUSED),
    "other parameters on each rank": Case(HalfUsed, SHORT, strategy=FIND_UNUSED),
    "static graph": Case(Accumulates, strategy={"static_graph": True}),
    "bucket views": Case(
        trainer=SHORT, strategy={"gradient_as_bucket_view": True, "bucket_cap_mb": 1}
    ),
    "own buffers": Case(trainer=SHORT, strategy={"broadcast_buffers": False, "init_sync": False}),
    "model averaging": Case(strategy=MODEL_AVERAGING),
}


def train(kind: training.Kind, directory: Path, case: Case) -> dict[str, Any]:
    L.seed_everything(7)
    model = case.model()
    trainer = training.fit(kind, directory, model, strategy=case.strategy, **case.trainer)
    return {
        "weights": training.weights(model),
        "parameters": [*model.parameters()],
        "step": trainer.global_step,
        "metrics": dict(trainer.callback_metrics),
    }


def train_all(kind: training.Kind, directory: Path) -> dict[str, Any]:
    return {name: train(kind, directory, case) for name, case in CASES.items()}


@pytest.mark.lowest
def test_numbers_are_those_of_stock_ddp(tmp_path: Path) -> None:
    """Weights and logged values equal stock's on each rank, to the last bit.

    One Trainer follows another in the same two processes.
    """
    ours, stock = training.on_both(train_all, tmp_path)
    training.assert_same(ours, stock)
    first, second = ours
    for name in CASES:
        training.assert_same(first[name]["parameters"], second[name]["parameters"])
        assert first[name]["step"] > 2, name
        assert first[name]["metrics"], name


ON_OTHER_RANKS = {
    "plain": Case(),
    "accumulation": Case(trainer={"accumulate_grad_batches": 3}),
    "manual accumulation": Case(Accumulates),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed", **SHORT}),
    "sparse": Case(Sparse),
}


def train_on_ranks(kind: training.Kind, directory: Path, ranks: int) -> dict[str, Any]:
    """Return the weights after each training, and the calls of the module's forward hook,
    which DDP's forward pass makes.
    """
    learned = {}
    for name, case in ON_OTHER_RANKS.items():
        L.seed_everything(7)
        model = case.model()
        calls: list[str] = []
        model.register_forward_hook(lambda *_, calls=calls: calls.append("forward"))
        training.fit(kind, directory, model, devices=ranks, **case.trainer)
        learned[name] = {"weights": training.weights(model), "forward passes": len(calls)}
    return learned


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_learn_what_they_learn_with_stock_ddp(
    ranks: int, tmp_path: Path
) -> None:
    """One rank has nothing to average, but also takes DDP's forward pass; for three, the
    division by their number is not exact.
    """
    ours, stock = (
        training.on_ranks(kind, train_on_ranks, tmp_path, ranks, world_size=ranks)
        for kind in training.KINDS
    )
    training.assert_same(ours, stock)
    assert ours[0]["plain"]["forward passes"] > 0


# Random numbers.


class OwnIteration(DataLoader[Any]):
    """Starts torch's iterator when its first batch is requested."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


loader = partial(DataLoader, batch_size=3)


class Drawing(NamedTuple):
    """The training loader, and options of the validation loader."""

    loader: Callable[[], Any]
    validation: Mapping[str, Any] = {}


DRAWING = {
    "persistent workers": Drawing(
        partial(loader, training.data(), **continuing.KEPT), continuing.KEPT
    ),
    "a stream, persistent workers": Drawing(partial(loader, Rows(12), **continuing.KEPT)),
    "several loaders": Drawing(lambda: [loader(training.data()), loader(training.data(9))]),
    "own iteration": Drawing(partial(OwnIteration, training.data(), batch_size=3)),
}


class Dropping(Net):
    """Trains with dropout."""

    def __init__(self, case: Drawing) -> None:
        super().__init__()
        self.case = case

    def train_dataloader(self) -> Any:
        return self.case.loader()

    def val_dataloader(self) -> Any:
        return DataLoader(training.data(8), batch_size=2, **self.case.validation)

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch if isinstance(batch[0], Tensor) else batch[1]
        return super().training_step([dropout(x), y], index)


def draw(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Train twice with one Trainer, and evaluate; return the weights, which follow from
    all dropout, and the number that is drawn next.
    """
    results = {}
    for name, case in DRAWING.items():
        L.seed_everything(7)
        model = Dropping(case)
        trainer = training.fit(kind, directory, model)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model)
        trainer.validate(model, verbose=False)
        trainer.test(model, verbose=False)
        trainer.predict(model)
        results[name] = {"weights": training.weights(model), "next": torch.rand(())}
    return results


class Seeds(Dataset[Tensor]):
    """Samples with the seed of the worker that loads them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(torch.initial_seed() % 2**20)])


def read_seeds(kind: training.Kind, directory: Path) -> tuple[set[int], set[int]]:
    """Return the seeds of workers in a hook's own loop, which only ours has, and in training."""
    in_hook = set[int]()

    def read(trainer: L.Trainer) -> None:
        in_hook.update(int(sample) for batch in trainer.train_dataloader for sample in batch)

    L.seed_everything(7)
    hooks = [training.At("on_train_start", read)] if kind == "ours" else []
    batches = continuing.read(kind, directory, partial(loader, Seeds(), **continuing.KEPT), hooks)
    return in_hook, {sample for epoch in batches.values() for batch in epoch for sample in batch}


def test_persistent_workers_have_stocks_seed_after_a_loop_in_a_hook(tmp_path: Path) -> None:
    """The loop's workers have it as well."""
    ours, stock = training.on_both(read_seeds, tmp_path)
    for (in_hook, trained), (_, expected) in zip(ours, stock, strict=True):
        assert in_hook == trained == expected


def test_random_numbers_are_those_of_stock_ddp(tmp_path: Path) -> None:
    """Dropout and a script draw what they draw with stock, also after a second fit."""
    training.assert_same(*training.on_both(draw, tmp_path))
