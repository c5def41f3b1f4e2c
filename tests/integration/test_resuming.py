"""A resumed run continues as if it had not been stopped: cases that the sweep lacks."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import SamplerEpochSeeding
from tests.harness.ranks import run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration import continuing
from tests.integration.continuing import Numbers, Step, Training

# Two ranks read 16 samples in batches of two.
BATCHES = 4  # of an epoch
# The batches that raise, by epoch and number: the second one of an epoch, its last one,
# and its first one.
FAILURES = ((0, 1), (0, BATCHES - 1), (1, 0))


def training_with_workers(directory: Path, **options: Any) -> Training:
    loaders = continuing.shuffled(16, **continuing.KEPT)
    return Training(loaders, directory, options={"model": continuing.WITHOUT_DROPOUT, **options})


def fail_again_and_again(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run that fails three times differs from one that does not."""
    training = training_with_workers(directory)
    whole = training.run()
    done = 0
    path = None
    for epoch, batch in FAILURES:
        point = f"exception-{BATCHES * epoch + batch}"
        run = training.run(point, ckpt_path=path, fail_at=(epoch, batch))
        assert run.steps == whole.steps[done : done + len(run.steps)]
        path = run.saved[point]
        done += len(run.steps)
    return continuing.difference(training, whole, done, training.run(ckpt_path=path))


@pytest.mark.lowest
def test_a_run_that_fails_again_and_again_trains_on_each_batch_once(tmp_path: Path) -> None:
    """A run continues with the batch that raised.

    The batch is the first, the last or another one of an epoch.
    """
    assert run_ranks(fail_again_and_again, 2, tmp_path) == ["", ""]


def fail_within_a_step(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run that fails in the second of a step's two batches differs."""
    training = training_with_workers(directory, accumulate_grad_batches=2)
    done = 2 * BATCHES - 1
    point = f"exception-{done}"
    path = training.run(point, fail_at=(1, BATCHES - 1)).saved[point]
    return continuing.difference(training, training.run(), done, training.run(ckpt_path=path))


def test_a_run_that_fails_within_an_optimiser_step_repeats_it(tmp_path: Path) -> None:
    """Its gradients are not saved, so the step begins with its first batch."""
    assert run_ranks(fail_within_a_step, 2, tmp_path) == ["", ""]


def validate_and_resume(rank: int, world_size: int, directory: Path, ends: dict[str, int]) -> str:
    """Describe how a run differs that resumes from a checkpoint saved after ``validate``.

    ``ends`` says where its training ended.
    """
    training = Training(continuing.shuffled(20), directory, options={"max_epochs": 2})
    path = str(directory / "validated.ckpt")
    L.seed_everything(7, verbose=False)
    module = continuing.Net(training.loaders)
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, **ends}
    trainer = make_trainer(make_strategy("ours", directory), **options)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.save_checkpoint(path)
    whole = training.run()
    return continuing.difference(training, whole, len(module.steps), training.run(ckpt_path=path))


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param({"max_epochs": 1}, id="epoch"),
        pytest.param({"max_epochs": 2, "max_steps": 3}, id="step"),
    ],
)
def test_a_finished_run_continues_where_training_was(ends: dict[str, int], tmp_path: Path) -> None:
    """A checkpoint that is saved after ``validate`` continues the training.

    The validation followed an epoch, or a step in the middle of one. The random states
    are those of the end of the training.
    """
    assert run_ranks(validate_and_resume, 2, tmp_path, ends) == ["", ""]


def resume_with_validation_workers(
    rank: int, world_size: int, directory: Path, options: dict[str, Any]
) -> dict[str, str]:
    """Resume in each epoch and after it, and in the next epoch again; describe how the
    runs differ.
    """
    model = partial(continuing.Net, validation=continuing.KEPT)
    validated = {"model": model, "max_epochs": 6, "limit_val_batches": 1.0}
    training = Training(continuing.shuffled(16), directory, options={**validated, **options})
    ends = [BATCHES * (epoch + 1) for epoch in range(4)]
    first = [f"train_batch_end-{end - 2}" for end in ends] + [f"train_epoch_end-{ends[1]}"]
    return continuing.generations(training, first, [f"train_batch_end-{ends[3] + 2}"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="each epoch"),
        pytest.param({"check_val_every_n_epoch": 2}, id="every second epoch"),
        pytest.param({"reload_dataloaders_every_n_epochs": 1}, id="on new loaders"),
    ],
)
def test_workers_that_persist_for_validation_are_seeded_once(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A resumed run draws their seed only where an uninterrupted one does."""
    assert run_ranks(resume_with_validation_workers, 2, tmp_path, options) == [{}, {}]


class ValidatedTogether(continuing.LongValidated):
    """Validates on two shuffled loaders at once."""

    def val_dataloader(self) -> Any:
        loaders = [DataLoader(Numbers(self.samples), 2, shuffle=True) for _ in range(2)]
        return CombinedLoader(loaders, "max_size")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        super().validation_step(torch.cat(batch), index)


def stop_in_validation(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run differs that a signal stops in its first validation."""
    options = {"limit_val_batches": 1.0, "model": ValidatedTogether, "max_epochs": 2}
    training = Training(continuing.shuffled(16), directory, options=options)
    whole = training.run()
    place = {"default_root_dir": directory / "stopped"}
    stop = continuing.signalled("on_validation_batch_start", ranks=[0])
    stopped = training.run(callbacks=[stop], **place)
    assert stopped.status is not None
    resumed = training.run(ckpt_path="last", **place)
    return continuing.difference(training, whole, len(stopped.steps), resumed)


def test_a_validation_of_combined_loaders_starts_again(tmp_path: Path) -> None:
    """Both loaders draw the order that they would have had, and the model's dropout too."""
    assert run_ranks(stop_in_validation, 2, tmp_path) == ["", ""]


# Of two loaders, the first one ends after four batches.
FIRST_SAMPLES = 8
SECOND_SAMPLES = 20


def two_loaders(mode: Any) -> CombinedLoader:
    own = torch.Generator().manual_seed(20)
    first = DataLoader(Numbers(FIRST_SAMPLES), 2, shuffle=True)
    second = DataLoader(Numbers(SECOND_SAMPLES), 2, shuffle=True, generator=own)
    return CombinedLoader([first, second], mode)


def resume_two_loaders(
    rank: int, world_size: int, directory: Path, mode: str, done: int
) -> tuple[list[Step], list[Step]]:
    """Resume after the first of an optimiser step's two batches, which is repeated;
    return the steps from there without a stop, and those of the resumed run.
    """
    options = {"use_distributed_sampler": False, "accumulate_grad_batches": 2}
    training = Training(lambda: two_loaders(mode), directory, devices=world_size, options=options)
    point = f"train_batch_end-{done}"
    whole = training.run(point)
    resumed = training.run(ckpt_path=whole.saved[point])
    return whole.steps[done - 1 :], resumed.steps


# ``done`` exceeds the four batches of the first loader.
@pytest.mark.parametrize(("mode", "done"), [("max_size", 7), ("max_size_cycle", 5)])
def test_a_loader_that_is_longer_than_the_first_one_continues(
    mode: str, done: int, tmp_path: Path
) -> None:
    """The run resumes at an optimiser step that begins after the first loader's end."""
    [(expected, resumed)] = run_ranks(resume_two_loaders, 1, tmp_path, mode, done)
    assert resumed == expected


def augmented(number: float) -> Tensor:
    """Return a sample with a part that all three global generators draw."""
    drawn = random.random() + np.random.random() + torch.rand(())
    return torch.tensor([float(number) + 0.1 * float(drawn)])


class Augmented(Numbers):
    """Samples that are augmented when they are read."""

    def __getitem__(self, index: int) -> Tensor:
        return augmented(index)


class AugmentedStream(continuing.Stream):
    """The same, without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return (augmented(float(number)) for number in super().__iter__())


def resume_augmented_stream(
    rank: int, world_size: int, directory: Path, loader: type[DataLoader[Any]], accumulated: int
) -> dict[str, str]:
    """Return the differences of resumed runs."""
    options = {"model": continuing.WITHOUT_DROPOUT, "accumulate_grad_batches": accumulated}
    loaders = partial(loader, AugmentedStream(12, rank), batch_size=2)
    training = Training(loaders, directory, options=options)
    return continuing.generations(
        training, ["train_batch_end-3", "train_batch_end-8"], ["train_batch_end-10"]
    )


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_augmentation_of_a_stream_is_that_of_an_uninterrupted_run(
    loader: type[DataLoader[Any]], accumulated: int, tmp_path: Path
) -> None:
    """Lightning reads a batch of a stream ahead, which a resumed run augments in the same way."""
    differences = run_ranks(resume_augmented_stream, 2, tmp_path, loader, accumulated)
    assert differences == [{}, {}]


class OwnGenerator(Numbers):
    """Samples with a part that the dataset's own generator draws."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(5)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + 0.1 * self.rng.random()], dtype=torch.float32)


class Collator:
    """Adds a part to a batch that its own generator draws."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + 0.1 * torch.rand((), generator=self.generator)

    def collate(self, samples: list[Tensor]) -> Tensor:
        return self(samples)


OWN_GENERATORS: dict[str, Callable[[], DataLoader[Any]]] = {
    "dataset": lambda: DataLoader(OwnGenerator(24), 2, shuffle=True),
    "datasets inside it": lambda: DataLoader(
        ConcatDataset([OwnGenerator(12), Subset(OwnGenerator(12), range(12))]), 2
    ),
    "collate_fn": lambda: DataLoader(Numbers(24), 2, shuffle=True, collate_fn=Collator()),
    "object of collate_fn": lambda: DataLoader(Numbers(24), 2, collate_fn=Collator().collate),
}


def resume_own_generator(rank: int, world_size: int, directory: Path, owner: str) -> dict[str, str]:
    """Return the differences of resumed runs."""
    training = Training(OWN_GENERATORS[owner], directory)
    return continuing.generations(training, ["train_batch_end-3"], ["train_batch_end-7"])


@pytest.mark.parametrize("owner", OWN_GENERATORS)
def test_a_generator_of_the_data_continues(owner: str, tmp_path: Path) -> None:
    """Without workers, an attribute of a dataset or ``collate_fn`` draws the same numbers."""
    assert run_ranks(resume_own_generator, 2, tmp_path, owner) == [{}, {}]


class AugmentedTogether(Augmented):
    """The same, if the loader asks for all samples of a batch together."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [super(AugmentedTogether, self).__getitem__(index) for index in indices]


def resume_augmented(
    rank: int, world_size: int, directory: Path, dataset: type[Augmented]
) -> tuple[dict[str, str], str]:
    """Return the differences of resumed runs, and of a run with one worker."""
    two_workers: Any = partial(DataLoader, dataset(24), 2, shuffle=True, **continuing.workers(2))
    seeding = SamplerEpochSeeding(seed=3, each_sample=True)
    training = Training(two_workers, directory, options={"callbacks": [seeding]})
    # Saved by the whole run; saved by the resumed run, and resumed again.
    resumed = continuing.generations(training, ["train_batch_end-3"], ["train_batch_end-7"])
    whole = training.run()
    training.loaders = partial(two_workers, num_workers=1)
    return resumed, continuing.difference(training, whole, 0, training.run())


@pytest.mark.parametrize("dataset", [Augmented, AugmentedTogether])
def test_augmentation_in_workers_is_that_of_an_uninterrupted_run(
    dataset: type[Augmented], tmp_path: Path
) -> None:
    """With ``each_sample=True``, resumed runs end with the same weights to the last bit.

    So does a run with another number of workers.
    """
    for resumed, with_one_worker in run_ranks(resume_augmented, 2, tmp_path, dataset):
        assert (resumed, with_one_worker) == ({}, "")


# Loaders that are read in parts, or record a state.


class ByHand(DataLoader[Any]):
    """Loads a stream, and has no more than the two methods that Lightning needs for its state.

    Like torchdata's loader, it counts a batch when it is fetched, and a restored state
    is for the next iterator only.
    """

    given = start = 0

    def __iter__(self) -> Any:
        self.given = self.start
        self.start = 0
        return self._batches(self.given)

    def _batches(self, start: int) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "first": self.dataset.numbers[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # As a reader of files continues at its place in the file.
        self.dataset.numbers = range(state["first"], state["first"] + len(self.dataset.numbers))
        self.start = state["given"]


class LikeLitdata(DataLoader[Any]):
    """Forgets a restored state only when an iterator is read to its end, as litdata's
    loader does.
    """

    given = 0
    is_restored = False

    def __iter__(self) -> Any:
        start = self.given if self.is_restored else 0
        self.given = start
        for batch in islice(DataLoader.__iter__(self), start, None):
            self.given += 1
            yield batch
        self.is_restored = False

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        self.is_restored = True


# Each epoch has five batches of two samples, and a step two batches: steps end with
# batches 1, 3 and 4 of an epoch.
OPTIONS = {"model": continuing.WITHOUT_DROPOUT, "accumulate_grad_batches": 2}


def continue_by_hand(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of resumed runs."""
    loaders = partial(ByHand, continuing.Stream(9, rank), batch_size=2)
    training = Training(loaders, directory, options={"max_epochs": 2, **OPTIONS})
    return continuing.generations(
        training, ["train_batch_end-1", "train_batch_end-4"], ["train_batch_end-7"]
    )


def test_each_rank_continues_with_the_state_of_its_own_loader(tmp_path: Path) -> None:
    """No batch is lost or repeated, also where a run resumes within an optimiser step."""
    assert run_ranks(continue_by_hand, 2, tmp_path) == [{}, {}]


def continue_like_litdata(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of resumed runs."""
    options = {"max_epochs": 3, "use_distributed_sampler": False, **OPTIONS}
    training = Training(partial(LikeLitdata, Numbers(10), 2), directory, options=options)
    return continuing.generations(training, ["train_batch_end-2"], ["train_batch_end-8"])


def test_a_state_that_a_loader_keeps_until_the_epochs_end_is_restored_once(tmp_path: Path) -> None:
    """With a loader like litdata's no batch is lost or repeated."""
    assert run_ranks(continue_like_litdata, 2, tmp_path) == [{}, {}]


def continue_in_a_long_step(rank: int, world_size: int, directory: Path) -> bool:
    """Return whether a run that resumes in the middle of a step repeats it."""

    def loaders() -> CombinedLoader:
        return CombinedLoader(
            [continuing.shuffled(40)(), continuing.shuffled(6, batch_size=6)()], "max_size_cycle"
        )

    options = {
        "model": continuing.WITHOUT_DROPOUT,
        "max_epochs": 1,
        "use_distributed_sampler": False,
    }
    training = Training(loaders, directory, options=options)
    callbacks = [GradientAccumulationScheduler({0: 8})]
    whole = training.run("train_batch_end-15", callbacks=callbacks)
    resumed = training.run(ckpt_path=whole.saved["train_batch_end-15"], callbacks=callbacks)
    return resumed.steps == whole.steps[8:]


def test_a_loader_that_begins_again_in_each_batch_of_a_long_step(tmp_path: Path) -> None:
    """A callback sets how many batches a step has, and none is lost or repeated."""
    assert run_ranks(continue_in_a_long_step, 2, tmp_path) == [True, True]
