"""What users or Lightning set on samplers and datasets is not set again."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from tests.harness.training import Kind, on_both
from tests.integration import continuing
from tests.integration.continuing import Numbers


class Levels(Numbers):
    """Has a ``set_epoch`` with two arguments, which only its user can call."""

    def set_epoch(self, epoch: int, level: float) -> None:
        raise AssertionError("the user did not call it")


class CountingSampler(Sampler[int]):
    """Draws the sample whose number says how often an epoch was set."""

    times_set = 0

    def set_epoch(self, epoch: int) -> None:
        self.times_set += 1

    def __iter__(self) -> Iterator[int]:
        return iter([self.times_set] * 4)

    def __len__(self) -> int:
        return 4


class SetsEpoch(L.Callback):
    """Gives a sampler another number than the epoch."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        trainer.train_dataloader.sampler.set_epoch(100 + trainer.current_epoch)


class Case(NamedTuple):
    """A training loader, and the callbacks beside it."""

    loader: Callable[[], DataLoader[Any]]
    callbacks: Sequence[L.Callback] = ()


CASES = {
    "a sampler that the user sets": Case(
        lambda: DataLoader(Numbers(8), 2, sampler=DistributedSampler(range(8), 2, seed=1)),
        [SetsEpoch()],
    ),
    "a sampler that Lightning sets": Case(
        lambda: DataLoader(Numbers(4), 2, sampler=CountingSampler())
    ),
    "a dataset that takes two numbers": Case(lambda: DataLoader(Levels(4), 2)),
}


def read_cases(kind: Kind, directory: Path) -> dict[str, continuing.Batches]:
    return {
        name: continuing.read(
            kind, directory, case.loader, case.callbacks, use_distributed_sampler=False
        )
        for name, case in CASES.items()
    }


def test_what_lightning_or_the_user_sets_is_not_set_again(tmp_path: Path) -> None:
    """Each case reads the same batches as with stock, so a sampler keeps the epoch that
    its user sets; one that Lightning sets is set once in an epoch.
    """
    ours, stock = on_both(read_cases, tmp_path)
    assert ours == stock
    for cases in ours:
        assert cases["a sampler that Lightning sets"] == {0: [[1, 1]] * 2, 1: [[2, 2]] * 2}


HOOKS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end")


class ReadsInHooks(L.Callback):
    """Reads the training loader in hooks.

    Attributes:
        read: the batches of each call, by hook.
    """

    def __init__(self) -> None:
        self.read: dict[str, list[list[Any]]] = {hook: [] for hook in HOOKS}
        for hook in HOOKS:
            setattr(self, hook, partial(self._read, hook))

    def _read(self, hook: str, trainer: L.Trainer, module: Any) -> None:
        self.read[hook].append([batch.tolist() for batch in trainer.train_dataloader])


def read_in_hooks(kind: Kind, directory: Path) -> dict[str, list[list[Any]]]:
    reader = ReadsInHooks()
    continuing.read(kind, directory, continuing.shuffled(), [reader], max_epochs=3)
    return reader.read


def test_hooks_read_stocks_order(tmp_path: Path) -> None:
    """In each hook, user code reads the order that stock reads there."""
    ours, stock = on_both(read_in_hooks, tmp_path)
    assert ours == stock
    assert all(ours[0].values()), "a hook was not called"
