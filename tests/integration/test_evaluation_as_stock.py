"""Evaluations in which samples cannot or must not count once are stock's.

They have combined loaders, ``dataloader_iter``, whole batches only, a batch sampler of
the user's, a sampler that repeats samples, or ``exact_evaluation=False``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data.distributed import DistributedSampler

from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_both
from tests.integration.evaluating import Ragged, Scorer, loader

Mode = Literal["min_size", "max_size", "max_size_cycle"]


class Pulls(Scorer):
    """Takes batches from an iterator."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        batch, _, _ = next(dataloader_iter)
        super().validation_step(batch, 0)


class Pairs(Scorer):
    """Takes batches of two loaders, of which one may have ended."""

    def __init__(self) -> None:
        super().__init__(loaders=2)

    def validation_step(self, batches: Any, index: int) -> None:
        for number, batch in enumerate(batches):
            if batch is not None:
                super().validation_step(batch, index, number)


@dataclass
class Case:
    """What a rank reads, the model, and options of the Trainer and of our strategy."""

    loaders: Callable[[int], Any]
    model: type[Scorer] = Scorer
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)


def combined(mode: Mode, **options: Any) -> Case:
    return Case(lambda rank: CombinedLoader([loader(11, 2), loader(5, 2)], mode), Pairs, options)


MODES: tuple[Mode, ...] = ("min_size", "max_size", "max_size_cycle")
CASES = {
    **{mode: combined(mode) for mode in MODES},
    **{f"{mode}, limited": combined(mode, limit_val_batches=1) for mode in MODES},
    **{f"{mode}, fast_dev_run": combined(mode, fast_dev_run=True) for mode in MODES},
    "dataloader_iter": Case(lambda rank: loader(5, 2), Pulls),
    "drop_last": Case(lambda rank: loader(9, 2, drop_last=True)),
    "the user's batches": Case(lambda rank: loader(13, batch_sampler=Ragged(range(13), 2, False))),
    "a sampler that repeats": Case(
        lambda rank: loader(5, sampler=DistributedSampler(range(5), 2, rank, shuffle=False))
    ),
    "exact_evaluation=False": Case(lambda rank: loader(5, 2), strategy={"exact_evaluation": False}),
}


def evaluate_cases(kind: Kind, directory: Path) -> dict[str, tuple[Any, Any]]:
    """Return what each evaluation logged, and the samples of this rank's batches."""
    evaluated = {}
    for name, case in CASES.items():
        model = case.model()
        strategy = make_strategy(kind, directory, **case.strategy if kind == "ours" else {})
        trainer = make_trainer(strategy, **case.options)
        logged = trainer.validate(model, case.loaders(trainer.global_rank), verbose=False)
        evaluated[name] = (logged, model.samples)
    return evaluated


def test_evaluations_that_do_not_count_samples_once_are_stocks(tmp_path: Path) -> None:
    """Values, samples and batches are stock's on each rank."""
    ours, stock = on_both(evaluate_cases, tmp_path)
    assert_same(ours, stock)
