"""The strategy outside of a running fit: its data path, what it reduces, and the options that it keeps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.ranks import run_ranks
from tests.harness.training import Kind, Net, data, make_trainer, on_both
from tests.harness.training import make_strategy as make

STRATEGIES = ("ddp_ext", "ddp_ext_spawn", "ddp_ext_fork", "an object")


def strategy_named(name: str) -> Any:
    return DDPExtStrategy() if name == "an object" else name


def connected(name: str) -> tuple[L.Trainer, Net]:
    """A Trainer of two devices that has a model and has started nothing."""
    trainer, model = make_trainer(strategy_named(name)), Net()
    trainer.strategy.connect(model)
    trainer._data_connector.attach_data(model)
    return trainer, model


def told_of(loader: Any) -> tuple[int, int, int, int]:
    """Batches, replicas, rank and size of the first batch."""
    sampler: Any = loader.sampler
    return len(loader), sampler.num_replicas, sampler.rank, len(next(iter(loader))[0])


def set_up_data(rank: int, world_size: int, name: str) -> list[tuple[int, int, int, int]]:
    warnings.simplefilter("ignore")
    found = []
    trainer, _ = connected(name)
    trainer.fit_loop.setup_data()
    found.append(told_of(trainer.train_dataloader))

    trainer, _ = connected(name)
    trainer.state.fn, trainer.state.stage = TrainerFn.FITTING, RunningStage.TRAINING
    trainer.fit_loop.setup_data()
    found.append(told_of(trainer.train_dataloader))
    trainer.state.stage = RunningStage.VALIDATING
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    found.append(told_of(trainer.val_dataloaders))

    for fn, stage in ((TrainerFn.VALIDATING, RunningStage.VALIDATING), (TrainerFn.TESTING, RunningStage.TESTING)):
        trainer, _ = connected(name)
        trainer.state.fn, trainer.state.stage = fn, stage
        loop = trainer.validate_loop if fn == TrainerFn.VALIDATING else trainer.test_loop
        loop.setup_data()
        found.append(told_of(trainer.val_dataloaders if fn == TrainerFn.VALIDATING else trainer.test_dataloaders))
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_loops_set_up_their_data_without_a_run(name: str) -> None:
    """With a model connected, as Lightning's own tests have it, each loop gets loaders for this rank of two."""
    train, evaluation = (4, 2, 0, 3), (2, 2, 0, 2)
    assert run_ranks(set_up_data, 1, name) == [[train, train, evaluation, evaluation, evaluation]]


def read_through(rank: int, world_size: int) -> list[list[float]]:
    loader = DataLoader(data(), batch_size=3)
    strategies: list[Any] = [DDPStrategy(), DDPExtStrategy()]
    return [[float(x.sum()) for x, _ in strategy.process_dataloader(loader)] for strategy in strategies]


def test_a_strategy_without_a_trainer_leaves_batches_as_they_are() -> None:
    """`process_dataloader` of a strategy that nobody has connected gives what is in the loader, as stock's does."""
    ((stock, ours),) = run_ranks(read_through, 1)
    assert ours == stock


class Reduces(L.Callback):
    """Reduces what is no tensor."""

    VALUES = (3.0, 3, True, "three", None)

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        reduce: Any = trainer.strategy.reduce
        self.found += [reduce(value) for value in self.VALUES]
        self.found += [reduce(value, reduce_op=op) for value in self.VALUES for op in ("sum", "mean", "max")]


def reduce_in_training(kind: Kind, directory: Path) -> list[Any]:
    callback = Reduces()
    make_trainer(make(kind, directory), max_epochs=1, callbacks=[callback]).fit(Net())
    strategy: Any = make(kind, directory)
    return [*callback.found, *(strategy.reduce(value) for value in Reduces.VALUES)]


def test_what_is_no_tensor_is_reduced_as_by_stock(tmp_path: Path) -> None:
    """`strategy.reduce(3.0)` returns 3.0, a float, on every rank, within a run and without one."""
    ours, stock = on_both(reduce_in_training, tmp_path)
    for mine, expected in zip(ours, stock, strict=True):
        assert mine == expected
        assert [type(value) for value in mine] == [type(value) for value in expected]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": False}, {"find_unused_parameters": True}])
def test_options_for_ddp_are_those_that_were_given(options: dict[str, bool]) -> None:
    """An explicit `find_unused_parameters=False` is kept, and none is made up, as with stock."""
    assert DDPExtStrategy(**options)._ddp_kwargs == DDPStrategy(**options)._ddp_kwargs == options


@pytest.mark.parametrize("suffix", ["", "_find_unused_parameters_false", "_find_unused_parameters_true"])
def test_options_for_ddp_are_those_of_the_name(suffix: str) -> None:
    """A name says the same as with stock."""
    ours, stock = (make_trainer(f"{name}{suffix}").strategy for name in ("ddp_ext", "ddp"))
    assert isinstance(ours, DDPExtStrategy)
    assert isinstance(stock, DDPStrategy)
    assert ours._ddp_kwargs == stock._ddp_kwargs
