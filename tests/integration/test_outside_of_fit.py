"""The strategy outside of a running fit: its data path, what it reduces, and the options that it keeps."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.ranks import run_ranks
from tests.harness.training import Kind, Net, data, make_strategy, make_trainer, on_both


def told_of(loader: Any) -> tuple[int, int, int, int]:
    """Batches, replicas, rank and size of the first batch."""
    return len(loader), loader.sampler.num_replicas, loader.sampler.rank, len(next(iter(loader))[0])


def set_up_data(rank: int, world_size: int) -> list[tuple[int, int, int, int]]:
    """Have loops of a Trainer of two devices that has started nothing set up their data."""
    warnings.simplefilter("ignore")
    trainer, model = make_trainer("ddp_ext"), Net()
    trainer.strategy.connect(model)
    trainer._data_connector.attach_data(model)
    trainer.fit_loop.setup_data()
    trainer.state.fn, trainer.state.stage = TrainerFn.FITTING, RunningStage.VALIDATING
    trainer.fit_loop.epoch_loop.val_loop.setup_data()
    validation = trainer.val_dataloaders
    trainer.state.fn, trainer.state.stage = TrainerFn.TESTING, RunningStage.TESTING
    trainer.test_loop.setup_data()
    return [told_of(loader) for loader in (trainer.train_dataloader, validation, trainer.test_dataloaders)]


def test_loops_set_up_their_data_without_a_run() -> None:
    """With a model connected, as Lightning's own tests have it, each loop gets loaders for this rank of two."""
    train, evaluation = (4, 2, 0, 3), (2, 2, 0, 2)
    assert run_ranks(set_up_data, 1) == [[train, evaluation, evaluation]]


def test_a_strategy_without_a_trainer_leaves_batches_as_they_are() -> None:
    """`process_dataloader` of a strategy that nobody has connected gives what is in the loader, as stock's does."""
    loader = DataLoader(data(), batch_size=3)
    strategies: list[Any] = [DDPStrategy(), DDPExtStrategy()]
    stock, ours = ([float(x.sum()) for x, _ in strategy.process_dataloader(loader)] for strategy in strategies)
    assert ours == stock


def reduce_numbers(kind: Kind, directory: Path) -> list[Any]:
    trainer = make_trainer(make_strategy(kind, directory), max_epochs=1)
    trainer.fit(Net())
    strategies: list[Any] = [trainer.strategy, make_strategy(kind, directory)]
    cases = itertools.product(strategies, (3.0, 3, True, "three", None), ("mean", "sum", "max"))
    return [strategy.reduce(value, reduce_op=operation) for strategy, value, operation in cases]


def test_what_is_no_tensor_is_reduced_as_by_stock(tmp_path: Path) -> None:
    """`strategy.reduce(3.0)` returns 3.0, a float, on every rank, whether the strategy has run or not."""
    ours, stock = on_both(reduce_numbers, tmp_path)
    assert ours == stock
    assert [list(map(type, values)) for values in ours] == [list(map(type, values)) for values in stock]


def test_options_for_ddp_are_those_that_were_given() -> None:
    """An explicit `find_unused_parameters=False` is kept, and none is made up, as with stock."""
    options: dict[str, bool]
    for options in ({}, {"find_unused_parameters": False}, {"find_unused_parameters": True}):
        assert DDPExtStrategy(**options)._ddp_kwargs == DDPStrategy(**options)._ddp_kwargs == options
