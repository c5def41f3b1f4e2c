"""Loaders, samplers, limits and modes of all kinds in an evaluation on three ranks, beside one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from lightning_ddp_ext.data.shared_samplers import DistributedBatchSamplerWrapper
from lightning_ddp_ext.errors import ExactEvaluationError, UnevenInputsError
from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.evaluating import Measured, Scores, Values, loaders_of, measured, trainer_on

RANKS = 3


class Found(NamedTuple):
    """What a rank has to tell of an evaluation: values over all ranks, and the sizes of its own batches."""

    values: Values
    sizes: list[int]


Make = Callable[..., L.Trainer]  # takes what a Trainer takes


def validate(trainer: L.Trainer, loaders: Any, model: Measured | None = None) -> Found:
    model = model or Measured(1)
    trainer.validate(model, loaders, verbose=False)
    return Found(measured(trainer, model), model.sizes)


def loader(samples: int, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Scores(samples), batch_size, **options)


# Evaluations whose values are to be those of one process.


def fitted(make: Make, **options: Any) -> Found:
    """Two epochs of fit, each with a validation, after a sanity check."""
    trainer, model = make(num_sanity_val_steps=2, **options), Measured(2)
    trainer.fit(model, loader(6, 1, shuffle=True), [loader(7, 1), loader(5, 2)])
    return Found(measured(trainer, model), model.sizes)


def read_by_a_worker(make: Make) -> Found:
    trainer, model = make(max_epochs=2, num_sanity_val_steps=0), Measured()
    read = loader(8, 1, num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    trainer.fit(model, loader(6, 1), read)
    return Found(measured(trainer, model), model.sizes)


def of_a_subset(make: Make) -> Found:
    return validate(make(), loader(40, 2, sampler=SubsetRandomSampler([30, 31, 32, 33, 34, 35, 39])))


def shuffled(make: Make) -> Found:
    return validate(make(), loader(13, 4, shuffle=True))


class Ragged(BatchSampler):
    """A user's batch sampler: each batch is one larger than the one before."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        size = 1
        for sample in self.sampler:
            batch.append(sample)
            if len(batch) == size:
                yield batch
                batch, size = [], size + 1
        if batch:
            yield batch

    def __len__(self) -> int:
        return sum(1 for _ in self)


def by_a_users_batch_sampler(make: Make) -> Found:
    """Ranks have 6, 5 and 5 samples, and so 3, 3 and 3 batches; then 4, 3, 3 samples, and so 3, 2 and 2 batches."""
    batch_samplers = [Ragged(range(samples), 2, False) for samples in (16, 10)]
    loaders = [DataLoader(Scores(len(each.sampler)), batch_sampler=each) for each in batch_samplers]  # type: ignore[arg-type]
    return validate(make(), loaders, Measured(2))


class Single(Measured):
    """Gets samples instead of batches."""

    def measure(self, batch: dict[str, Tensor], loader: int) -> None:
        super().measure({name: value.unsqueeze(0) for name, value in batch.items()}, loader)


def without_batches(make: Make) -> Found:
    return validate(make(), loader(4, None), Single())


def by_the_users_exact_sampler(make: Make) -> Found:
    """A loader that Lightning leaves alone, used twice, and found again as it was."""
    mine = loader(10, 3, sampler=ExactDistributedSampler(Scores(10)))
    validate(make(), mine)
    assert type(mine.batch_sampler) is BatchSampler
    return validate(make(), mine)


class Dealt(DistributedSampler[Any]):
    """A user's sampler that knows of ranks and repeats nothing, so that some have one sample more."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


def by_the_users_own_dealing(make: Make) -> Found:
    trainer = make(use_distributed_sampler=False)
    ranks = trainer.world_size, trainer.global_rank
    return validate(trainer, [loader(n, 1, sampler=Dealt(Scores(n), *ranks)) for n in (5, 1)], Measured(2))


def of_a_loader_with_a_state(make: Make) -> Found:
    """A loader that is not copied, used twice, and found again as it was."""
    mine = StatefulDataLoader(Scores(10), 3, sampler=ExactDistributedSampler(Scores(10)))
    batch_sampler = mine.batch_sampler
    validate(make(), mine)
    assert mine.batch_sampler is batch_sampler
    return validate(make(), mine)


def by_dealt_batches(make: Make) -> Found:
    """Whole batches that are dealt out: five of the first loader, and one of the second, which is evaluated twice."""
    batches = [DistributedBatchSamplerWrapper(BatchSampler(range(n), 3, False), uneven="exact") for n in (13, 3)]
    first, second = (DataLoader(Scores(16), batch_sampler=each) for each in batches)  # type: ignore[arg-type]
    return validate(make(), [first, second, second], Measured(3))


class Combined(Measured):
    """Gets batches of two loaders at once, or None from one that is exhausted."""

    def measure(self, batch: dict[str, Any], loader: int) -> None:
        for number, (name, each) in enumerate(batch.items()):
            if each is not None:
                measures: Any = self.measures[number]
                measures.seen.update(each["index"])
                size = len(each["x"])
                self.log(f"mean_{name}", each["x"].mean(), sync_dist=True, batch_size=size)


def combined(mode: str, first: int = 12, second: int = 5) -> CombinedLoader:
    return CombinedLoader({"a": loader(first, 2), "b": loader(second, 2)}, mode)  # type: ignore[arg-type]


def in_max_size_mode(make: Make) -> Found:
    return validate(make(), combined("max_size"), Combined(2))


def in_min_size_mode_of_equal_loaders(make: Make) -> Found:
    return validate(make(), combined("min_size", 9, 9), Combined(2))


class Unreduced(Measured):
    """Logs what nobody reduces, and watches it."""

    def measure(self, batch: dict[str, Tensor], loader: int) -> None:
        super().measure(batch, loader)
        self.log("local", 1.0 + batch["x"].mean(), sync_dist=False)

    def configure_callbacks(self) -> list[L.Callback]:
        return [EarlyStopping("local", patience=100)]


def watched_without_reduction(make: Make) -> Found:
    """A rank without samples has a finite number of its own, which does not stop the others."""
    trainer, model = make(max_epochs=3, num_sanity_val_steps=0), Unreduced()
    trainer.fit(model, loader(6, 1), loader(2, 4))
    assert trainer.current_epoch == 3
    found = measured(trainer, model)
    assert 1.0 <= found.pop("local") < 2.0
    return Found(found, model.sizes)


SAME = (
    fitted, read_by_a_worker, of_a_subset, shuffled, by_a_users_batch_sampler, without_batches,
    by_the_users_exact_sampler, by_the_users_own_dealing, of_a_loader_with_a_state, by_dealt_batches, in_max_size_mode,
    in_min_size_mode_of_equal_loaders, watched_without_reduction,
)  # fmt: skip

# Evaluations on several ranks alone.


def limited(make: Make, limit: float) -> Found:
    trainer = make(limit_val_batches=limit)
    found = validate(trainer, loaders_of([(19, 3), (7, 1)]), Measured(2))
    return Found({**found.values, "totals": trainer.num_val_batches}, found.sizes)


def limited_to_two(make: Make) -> Found:
    return limited(make, 2)


def limited_to_three_quarters(make: Make) -> Found:
    return limited(make, 0.75)


def dropping(make: Make) -> Found:
    return validate(make(), loader(16, 3, drop_last=True))


def by_the_users_sampler(make: Make) -> Found:
    return validate(make(), loader(4, 1, sampler=DistributedSampler(Scores(4), shuffle=False)))


def with_stocks_samplers(make: Make) -> Found:
    return validate(make(exact_evaluation=False), loader(4, 2))


class Steps(Measured):
    """Keeps what each step has logged, as this rank knows it."""

    def measure(self, batch: dict[str, Tensor], loader: int) -> None:
        for reduction in ("mean", "sum", "min", "max"):
            value = batch["index"].float().mean() + 1
            self.log(reduction, value, reduce_fx=reduction, on_step=True, on_epoch=True, sync_dist=True)
        self.log("int", batch["index"].sum(), on_step=True, on_epoch=False, sync_dist=True)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in self.trainer.logged_metrics.items()})  # type: ignore[arg-type]

    def on_validation_epoch_end(self) -> None:
        pass


def of_each_step(make: Make) -> Found:
    return validate(make(), loader(4, 1), Steps())


ALONE = (
    limited_to_two, limited_to_three_quarters, dropping, by_the_users_sampler, with_stocks_samplers, of_each_step,
)  # fmt: skip

# What cannot work.


class Pulls(Measured):
    """Takes batches from an iterator."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        next(dataloader_iter)


class Unsized(Ragged):
    """A batch sampler that does not know how many batches it has."""

    __len__ = None  # type: ignore[assignment]


class Stream(IterableDataset[Any]):
    """No sampler says what is read."""

    def __init__(self, samples: int = 2) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (Scores(8)[index] for index in range(self.samples))


class SizedStream(Stream):
    """The same, with a length."""

    def __len__(self) -> int:
        return self.samples


def refused(make: Make) -> list[str]:
    unsized = DataLoader(Scores(4), batch_sampler=Unsized(range(4), 2, False))  # type: ignore[arg-type]
    uneven = loader(4, 1, sampler=ExactDistributedSampler(Scores(4)))
    return [
        message_of(lambda: validate(make(), combined("max_size", 12, 2), Combined(2))),
        message_of(lambda: validate(make(), combined("max_size_cycle", 12, 2), Combined(2))),
        message_of(lambda: validate(make(), loader(4, 1), Pulls())),
        message_of(lambda: validate(make(), [loader(4, 1), DataLoader(Stream())], Measured(2))),
        message_of(lambda: validate(make(), DataLoader(SizedStream(1 + make().global_rank)))),
        message_of(lambda: validate(make(), unsized)),
        message_of(lambda: make().fit(Measured(), uneven)),
    ]


def repeated(make: Make) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_the_users_sampler(make)
    return [str(each.message) for each in caught if "own DistributedSampler" in str(each.message)]


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises((ExactEvaluationError, UnevenInputsError)) as error:
        call()
    return str(error.value)


def evaluate_all(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """What comes of each evaluation, by its name."""

    def make(**options: Any) -> L.Trainer:
        return trainer_on(rank, world_size, directory, **options)

    chosen = SAME if world_size == 1 else (*SAME, *ALONE, repeated, refused)
    found: dict[str, Any] = {}
    for evaluation in chosen:
        torch.manual_seed(rank)  # as it may be: user's samplers draw differently on each rank
        found[evaluation.__name__] = evaluation(make)
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """What one process finds."""
    directory = tmp_path_factory.mktemp("one")
    found: dict[str, Found] = run_ranks(evaluate_all, 1, directory, env=by_hand_env(1))[0]
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of several ranks finds."""
    return run_ranks(evaluate_all, RANKS, tmp_path_factory.mktemp("three"), env=by_hand_env(RANKS))


@pytest.mark.parametrize("evaluation", [evaluation.__name__ for evaluation in SAME])
def test_same_as_on_one_process(evaluation: str, one: dict[str, Found], ranks: list[dict[str, Found]]) -> None:
    """All values on every rank are those of one process, and every rank has made equally many steps."""
    expected = dict(one[evaluation].values)
    seen = expected.pop("seen")
    for rank in ranks:
        mine = dict(rank[evaluation].values)
        assert mine.pop("seen") == seen
        assert mine == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert len({len(rank[evaluation].sizes) for rank in ranks}) == 1


def test_a_subset_stays_one(ranks: list[dict[str, Found]]) -> None:
    """Of a sampler that draws from a part of the dataset, each sample of this part is evaluated."""
    assert ranks[0]["of_a_subset"].values["seen"] == [[30, 31, 32, 33, 34, 35, 39]]


@pytest.mark.parametrize("limit", ["limited_to_two", "limited_to_three_quarters"])
def test_limits_leave_whole_batches(limit: str, ranks: list[dict[str, Found]]) -> None:
    """A limit below the number of batches leaves each rank that many full ones, and progress bars as many."""
    found = [rank[limit] for rank in ranks]
    assert [each.values["totals"] for each in found] == [[2, 2]] * RANKS
    assert [each.sizes for each in found] == [[3, 3, 1, 1]] * RANKS
    assert found[0].values["seen"] == [list(range(18)), list(range(6))]


def test_incomplete_batches_are_dropped(ranks: list[dict[str, Found]]) -> None:
    """With drop_last each rank drops its own incomplete batch."""
    assert [rank["dropping"].sizes for rank in ranks] == [[3, 3]] * RANKS
    assert ranks[0]["dropping"].values["seen"] == [[*range(10), 12, 15]]


def test_the_users_sampler_is_left_alone(ranks: list[dict[str, Found]]) -> None:
    """A sampler that the user chose repeats what it repeats."""
    assert ranks[0]["by_the_users_sampler"].values["seen"] == [[0, 0, 1, 1, 2, 3]]
    assert [len(rank["repeated"]) for rank in ranks] == [1, 0, 0]
    assert "evaluates some samples twice" in ranks[0]["repeated"][0]


def test_stocks_samplers_come_back(ranks: list[dict[str, Found]]) -> None:
    """With exact_evaluation=False samples are repeated as by stock, but means of integers are still right."""
    values = ranks[0]["with_stocks_samplers"].values
    assert values["seen"] == [[0, 0, 1, 1, 2, 3]]
    x = Scores(4).x[torch.tensor(values["seen"][0]).long()]
    assert values["mean"] == pytest.approx(float(x.mean()), rel=1e-6)


def test_steps_are_reduced_over_the_ranks_that_count(ranks: list[dict[str, Found]]) -> None:
    """Four samples on three ranks: in the second step rank 0 alone has one, and every rank sees its value alone."""
    for rank in ranks:
        first, second = rank["of_each_step"].values["seen"]
        assert first == {"mean_step": 2.0, "sum_step": 6.0, "min_step": 1.0, "max_step": 3.0, "int": 1.0}
        assert second == {"mean_step": 4.0, "sum_step": 4.0, "min_step": 4.0, "max_step": 4.0, "int": 3.0}


def test_what_cannot_work_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    """Where a batch cannot be left out of account, every rank raises at once, and says what to do instead."""
    assert ranks[0]["refused"] == ranks[1]["refused"] == ranks[2]["refused"]
    starts = [
        *["every rank needs a batch of its own in every step where a step takes dataloader_iter, loaders are"] * 4,
        "every rank needs a batch of its own in every step where no sampler with a length (-1: none) says what Data",
        "every rank needs a batch of its own in every step where no sampler with a length (-1: none) says what Data",
        "the ranks have different numbers of training batches (2 on rank 0, 1 on rank 1, 1 on rank 2)",
    ]
    assert [message[: len(start)] for message, start in zip(ranks[0]["refused"], starts, strict=True)] == starts
