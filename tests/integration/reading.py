"""What each rank reads in training."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from tests.harness import training
from tests.integration.continuing import Net, Numbers

Batches = dict[int, list[list[int]]]  # by epoch


class Backwards(BatchSampler):
    """A batch sampler of which Lightning makes a new object, with a sampler for the rank."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


def read(
    kind: training.Kind,
    directory: Path,
    make: Callable[[], Any],
    *,
    ckpt_path: str | None = None,
    **options: Any,
) -> Batches:
    """Train on what ``make`` returns, by default for two epochs; return the batches."""
    module = Net(make)
    strategy = training.make_strategy(kind, directory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = training.make_trainer(strategy, limit_val_batches=0, **options)
        trainer.fit(module, ckpt_path=ckpt_path)
    return {
        epoch: [list(step.samples) for step in module.steps if step.epoch == epoch]
        for epoch in {step.epoch for step in module.steps}
    }


def loader(length: int, **options: Any) -> Callable[[], DataLoader[Any]]:
    """Return a loader of numbers, in batches of two unless the options say otherwise."""
    chosen = options if "batch_sampler" in options else {"batch_size": 2, **options}
    return lambda: DataLoader(Numbers(length), **chosen)
