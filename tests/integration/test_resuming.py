"""A run that is resumed at any point goes on as if it had not been stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.errors import ResumeError
from tests.integration.continuing import Moment, Net, Numbers, Run, Saver, Stream, fit
from tests.integration.training import make_strategy, make_trainer
from tests.ranks import by_hand_env, run_ranks

# Of the checkpoints that are saved with each batch: in the midst of an epoch, and in the next one.
RESUMED_FROM = (1, 3)
AN_EPOCH_AND_MORE = (0, 1, 2, 3)
MOMENTS: tuple[Moment, ...] = (
    "train_batch_start",
    "train_batch_end",
    "validation_batch_end",
    "validation_end",
    "train_epoch_start",
    "train_epoch_end",
    "train_end",
)


def workers(number: int, **options: Any) -> dict[str, Any]:
    return {"num_workers": number, "multiprocessing_context": "fork", **options}


def shuffled(samples: int = 10, **options: Any) -> Callable[[], DataLoader[Any]]:
    return lambda: DataLoader(Numbers(samples), **{"batch_size": 2, "shuffle": True, **options})


class Looking(Net):
    """Looks at a batch of its own now and then, as people do to log some samples."""

    def on_train_start(self) -> None:
        next(iter(self.trainer.train_dataloader))  # type: ignore[arg-type]

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            next(iter(self.trainer.train_dataloader))  # type: ignore[arg-type]


class Planning(Net):
    """Has Lightning make its loaders before anything is restored."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 6
        return super().configure_optimizers()


class Case:
    """One way to train, and the moments at which it is stopped."""

    def __init__(self, loaders: Callable[[], Any], *moments: Moment, dropout: bool = True, **options: Any) -> None:
        self.loaders = loaders
        self.moments = moments
        self.dropout = dropout
        self.fail_at = options.pop("fail_at", None)
        self.resumed_from = options.pop("resumed_from", RESUMED_FROM)
        self.strategy: dict[str, Any] = options.pop("strategy", {})
        self.options = {"limit_val_batches": 0, **options}
        if any("validation" in moment for moment in moments):
            self.options["limit_val_batches"] = 1.0

    def check(self, directory: Path, name: str) -> list[str]:
        """What differs from the run that was not stopped, after each checkpoint; ``directory`` is where ranks meet."""
        whole = self.run(directory) if self.fail_at is not None else None
        wrong = []
        for number, moment in enumerate(self.moments):
            place = directory / name / f"{number}"
            place.mkdir(parents=True, exist_ok=True)
            stopped = self.run(directory, saver=Saver(moment, place), fail_at=self.fail_at)
            assert stopped.saved, moment
            whole = whole or stopped  # a run is the same with other checkpoints, and this says so, too
            saved = stopped.saved
            for path, done in [saved[index] for index in self.resumed_from if index < len(saved)] or saved[:1]:
                wrong += self.differences(moment, path, whole, done, self.run(directory, ckpt_path=path))
        return wrong

    def differences(self, moment: Moment, path: str, whole: Run, done: int, resumed: Run) -> list[str]:
        accumulated = self.options.get("accumulate_grad_batches", 1)
        name = Path(path).stem
        if accumulated == 1 and resumed.steps != whole.steps[done:]:
            return [f"{name} after {done}: {resumed.steps} instead of {whole.steps[done:]}"]
        again = len(resumed.steps) - len(whole.steps[done:])
        if not 0 <= again < accumulated or resumed.steps != whole.steps[done - again :]:
            return [f"{name} after {done}: {again} again, {resumed.steps} instead of {whole.steps[done:]}"]
        if resumed.steps and resumed.counts != whole.counts:
            return [f"{name}: counts {resumed.counts} instead of {whole.counts}"]
        return [] if torch.equal(resumed.weights, whole.weights) else [f"{name}: other weights"]

    def run(self, directory: Path, **options: Any) -> Run:
        strategy = make_strategy("ours", directory, **self.strategy)
        return fit(strategy, self.loaders, dropout=self.dropout, **{**self.options, **options})


def odd_ones_first(samples: int) -> BatchSampler:
    """A batch sampler of the user's own, over whatever sampler it is given."""
    return InTwos(RandomSampler(range(samples)), batch_size=2, drop_last=False)


class InTwos(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == 2:
                yield batch
                batch = []


def run_cases(rank: int, world_size: int, directory: Path, names: list[str]) -> dict[str, list[str]]:
    return {name: CASES[name](rank).check(directory, name) for name in names}


CASES: dict[str, Callable[[int], Case]] = {
    # Lightning does not make up for a validation that was due after a save in on_train_batch_end; it draws a number.
    "all moments": lambda _: Case(
        shuffled(), *MOMENTS, val_check_interval=2, dropout=False, resumed_from=AN_EPOCH_AND_MORE
    ),
    "dropout": lambda _: Case(
        shuffled(), "train_batch_start", "train_batch_end", "train_epoch_end", resumed_from=AN_EPOCH_AND_MORE
    ),
    "dropout and validation": lambda _: Case(
        shuffled(), "validation_batch_end", "validation_end", val_check_interval=2
    ),
    "validation at the end": lambda _: Case(shuffled(8), "validation_batch_end", "validation_end"),
    "max_steps": lambda _: Case(shuffled(), "train_batch_end", "train_epoch_end", max_epochs=-1, max_steps=5),
    "max_steps and max_epochs": lambda _: Case(
        shuffled(10), "train_epoch_start", "train_epoch_end", max_epochs=3, max_steps=9
    ),
    # Saved in the last on_train_batch_end, the epoch's end is left out, and with it what would have been updated there.
    "plateau": lambda _: Case(shuffled(6), "train_batch_start", max_epochs=3, plateau=True),
    "accumulation": lambda _: Case(shuffled(), "train_batch_end", accumulate_grad_batches=3),
    "accumulation and validation": lambda _: Case(
        shuffled(), "validation_end", accumulate_grad_batches=3, val_check_interval=2
    ),
    "limit": lambda _: Case(shuffled(), "train_batch_end", limit_train_batches=2),
    "scalable": lambda _: Case(shuffled(), "train_batch_end", strategy={"sampler": "scalable"}),
    "exception": lambda _: Case(shuffled(), "exception", fail_at=(1, 2), dropout=False),
    "exception while accumulating": lambda _: Case(
        shuffled(), "exception", fail_at=(0, 2), accumulate_grad_batches=2, dropout=False
    ),
    "looked at": lambda _: Case(shuffled(), "train_batch_end", "train_epoch_end", kind=Looking, dropout=False),
    "planned": lambda _: Case(shuffled(), "train_batch_end", "train_epoch_end", kind=Planning),
    "workers": lambda _: Case(shuffled(12, **workers(2)), "train_batch_end"),
    "persistent workers": lambda _: Case(
        shuffled(12, **workers(1, persistent_workers=True)), "train_batch_end", "train_epoch_end"
    ),
    "no batches": lambda _: Case(shuffled(8, batch_size=None), "train_batch_end"),
    "a batch sampler of one's own": lambda _: Case(
        lambda: DataLoader(Numbers(14), batch_sampler=odd_ones_first(14)), "train_batch_end"
    ),
    "no distributed sampler": lambda _: Case(shuffled(10), "train_batch_end", use_distributed_sampler=False),
    "no distributed sampler, workers": lambda _: Case(
        shuffled(10, **workers(1)), "train_batch_end", use_distributed_sampler=False
    ),
    "reloaded": lambda _: Case(  # twice in an epoch, but once after a resume: that draws other numbers
        shuffled(), "train_batch_end", reload_dataloaders_every_n_epochs=1, dropout=False
    ),
    **{
        f"two loaders, {mode}": lambda _, mode=mode: Case(  # type: ignore[misc]
            lambda: CombinedLoader([shuffled(8)(), shuffled(20)()], mode), "train_batch_end", "train_epoch_end"
        )
        for mode in ("min_size", "max_size", "max_size_cycle")
    },
    "stream": lambda rank: Case(
        lambda: DataLoader(Stream(9, rank), batch_size=2), "train_batch_end", "train_epoch_end"
    ),
    "stream, workers": lambda rank: Case(
        lambda: DataLoader(Stream(9, rank), batch_size=2, **workers(1)), "train_batch_end", max_epochs=1
    ),
    "torchdata": lambda _: Case(
        lambda: StatefulDataLoader(Numbers(14), batch_size=2, shuffle=True), "train_batch_end", "train_epoch_end"
    ),
    "torchdata, scalable, accumulation": lambda _: Case(
        lambda: StatefulDataLoader(Numbers(14), batch_size=2, shuffle=True),
        "train_batch_end",
        accumulate_grad_batches=2,
        strategy={"sampler": "scalable"},
    ),
    "torchdata, stream": lambda rank: Case(
        lambda: StatefulDataLoader(Stream(9, rank), batch_size=2), "train_batch_end", "train_epoch_end", dropout=False
    ),
    "torchdata, workers": lambda _: Case(
        lambda: StatefulDataLoader(Numbers(12), batch_size=2, shuffle=True, **workers(1)), "train_batch_end"
    ),
    "stream and samples": lambda rank: Case(
        lambda: [DataLoader(Stream(9, rank), batch_size=2), shuffled(8)()], "train_batch_end"
    ),
}


TELLING = ["validation at the end", "plateau", "no distributed sampler"]
OTHERS = [name for name in CASES if name not in TELLING]


@pytest.mark.parametrize(
    "names",
    [pytest.param(TELLING, marks=pytest.mark.lowest), OTHERS[::2], OTHERS[1::2]],
    ids=["telling", "one half", "other half"],
)
def test_a_resumed_run_reads_what_was_left_and_ends_with_the_same_weights(names: list[str], tmp_path: Path) -> None:
    """At whatever point a checkpoint was saved, the batches after it are the same, and the weights to the last bit."""
    found = run_ranks(run_cases, 2, tmp_path, names, env=by_hand_env(2), time_limit=110)
    assert found == [{name: [] for name in names}] * 2


def save_in_the_middle(rank: int, world_size: int, directory: Path, options: dict[str, Any]) -> Run:
    return Case(shuffled(37), **options).run(directory, saver=Saver("train_batch_end", directory))


def resume(rank: int, world_size: int, directory: Path, options: dict[str, Any], path: str) -> Run:
    place = directory / f"{world_size}"
    place.mkdir(exist_ok=True)
    return Case(shuffled(37), **options).run(place, ckpt_path=path, devices=world_size)


def of_epoch(runs: list[Run], epoch: int) -> list[int]:
    """All samples that the ranks have read in an epoch."""
    return sorted(sample for run in runs for read, _, *samples in run.steps if read == epoch for sample in samples)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (3, {"strategy": {"sampler": "scalable"}}),
        (4, {"limit_train_batches": 8, "val_check_interval": 0.5, "limit_val_batches": 1.0}),
    ],
    ids=["1 rank", "3 ranks, scalable", "4 ranks, limited"],
)
def test_the_rest_of_an_epoch_is_shared_out_among_another_number_of_ranks(
    world_size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Each sample of the epoch is read once, but for the padding; later epochs are whole ones for so many ranks.

    ``limit_train_batches`` counts batches of so many ranks in all epochs, in the one that was resumed, too.
    """
    before = run_ranks(save_in_the_middle, 2, tmp_path, options, env=by_hand_env(2))
    path, done = before[0].saved[3]
    assert done == 4
    args = (tmp_path, {"max_epochs": 3, **options}, path)
    after = run_ranks(resume, world_size, *args, env=by_hand_env(world_size))
    read = [Run(run.steps[:done], run.weights, ()) for run in before] + after
    counts = [of_epoch(read, 0).count(sample) for sample in range(37)]
    assert len([count for count in counts if count]) == 37
    assert sum(counts) - 37 < 2 * world_size
    batches = min(options.get("limit_train_batches", 37), -(-37 // (2 * world_size)))
    for epoch in (1, 2):
        assert [len([step for step in run.steps if step[0] == epoch]) for run in after] == [batches] * world_size


def refuses_another_number_of_ranks(rank: int, world_size: int, directory: Path, path: str, stream: bool) -> str:
    def loaders() -> DataLoader[Any]:
        return DataLoader(Stream(9, rank), batch_size=2) if stream else shuffled(37)()

    with pytest.raises(ResumeError) as raised:
        Case(loaders, use_distributed_sampler=False).run(directory, ckpt_path=path, devices=world_size)
    return str(raised.value)


def save_streams(rank: int, world_size: int, directory: Path, stream: bool) -> Run:
    def loaders() -> DataLoader[Any]:
        return DataLoader(Stream(9, rank), batch_size=2) if stream else shuffled(37)()

    return Case(loaders, use_distributed_sampler=False).run(directory, saver=Saver("train_batch_end", directory))


@pytest.mark.parametrize("stream", [True, False])
def test_data_that_each_rank_orders_by_itself_are_not_shared_out_anew(stream: bool, tmp_path: Path) -> None:
    """The middle of an epoch over them goes on with as many ranks as before, or says so on every rank."""
    saved = run_ranks(save_streams, 2, tmp_path, stream, env=by_hand_env(2))
    (tmp_path / "one").mkdir()
    (message,) = run_ranks(
        refuses_another_number_of_ranks, 1, tmp_path / "one", saved[0].saved[1][0], stream, env=by_hand_env(1)
    )
    assert "had ranks=2 when the checkpoint was saved, and has 1; resume with" in message


def go_on_after_a_validation(rank: int, world_size: int, directory: Path) -> list[str]:
    case = Case(shuffled(20), max_epochs=3, dropout=False)
    whole, path = case.run(directory), str(directory / "validated.ckpt")
    L.seed_everything(7, verbose=False)
    net = Net(case.loaders)
    net.layers[1] = nn.Identity()
    trainer = make_trainer(make_strategy("ours", directory), max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(net)
    trainer.validate(net, verbose=False)
    trainer.save_checkpoint(path)
    return case.differences("validated", path, whole, len(net.steps), case.run(directory, ckpt_path=path))


def test_what_is_saved_after_a_validation_goes_on_as_what_is_saved_after_training(tmp_path: Path) -> None:
    """The seed of the orders is in it, so the next epochs have those that they would have had."""
    assert run_ranks(go_on_after_a_validation, 2, tmp_path, env=by_hand_env(2)) == [[], []]


def go_on_in_a_stream(rank: int, world_size: int, directory: Path) -> list[str]:
    case = Case(lambda: DataLoader(Stream(9, rank), batch_size=2), max_epochs=2)
    cut = case.run(directory, saver=Saver("train_end", directory), max_epochs=-1, max_steps=3)
    path, done = cut.saved[0]
    return case.differences("train_end", path, case.run(directory), done, case.run(directory, ckpt_path=path))


def test_a_stream_without_a_length_goes_on_where_max_steps_has_cut_it_short(tmp_path: Path) -> None:
    """The rest of the epoch comes, as it does of an epoch whose length is known."""
    assert run_ranks(go_on_in_a_stream, 2, tmp_path, env=by_hand_env(2)) == [[], []]


def resumed_without_validation(rank: int, world_size: int, directory: Path) -> tuple[list[Any], list[Any]]:
    case = Case(shuffled(), limit_val_batches=1.0)
    whole = case.run(directory, saver=Saver("validation_end", directory))
    path, done = whole.saved[0]
    return case.run(directory, ckpt_path=path, limit_val_batches=0).steps, whole.steps[done:]


def test_an_epoch_that_was_saved_at_its_validation_is_not_trained_again_without_it(tmp_path: Path) -> None:
    """Whether a validation is due or not when the run is resumed, the next epoch comes."""
    for resumed, expected in run_ranks(resumed_without_validation, 2, tmp_path, env=by_hand_env(2)):
        assert resumed == expected
