"""A resumed run continues as if it had not been stopped: cases that
``test_resume_sweep`` lacks.
"""

from __future__ import annotations

import random
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ddp_ext import SamplerEpochSeeding
from tests.harness import training
from tests.harness.ranks import run_ranks
from tests.integration import continuing

# Two ranks read 16 samples in batches of two.
BATCHES = 4  # of an epoch
# The batches that raise, by epoch and number: the second one of an epoch, its last one,
# and its first one.
FAILURES = ((0, 1), (0, BATCHES - 1), (1, 0))


def fail_again_and_again(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run that fails three times differs from one that does not."""
    options = {"dropout": False}
    resuming = continuing.Training(
        continuing.shuffled(16, **continuing.KEPT), directory, options=options
    )
    whole = resuming.run()
    done = 0
    path = None
    for epoch, batch in FAILURES:
        point = f"exception-{BATCHES * epoch + batch}"
        run = resuming.run(point, ckpt_path=path, fail_at=(epoch, batch))
        assert run.steps == whole.steps[done : done + len(run.steps)]
        path = run.saved[point]
        done += len(run.steps)
    return continuing.difference(resuming, whole, done, resuming.run(ckpt_path=path))


@pytest.mark.lowest
def test_a_run_that_fails_again_and_again_trains_on_each_batch_once(tmp_path: Path) -> None:
    """A run continues with the batch that raised.

    The batch is the first, the last or another one of an epoch.
    """
    assert run_ranks(fail_again_and_again, 2, tmp_path) == ["", ""]


def fail_within_a_step(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run that fails in the second of a step's two batches differs."""
    options = {"dropout": False, "accumulate_grad_batches": 2}
    resuming = continuing.Training(
        continuing.shuffled(16, **continuing.KEPT), directory, options=options
    )
    point = f"exception-{2 * BATCHES - 1}"
    path = resuming.run(point, fail_at=(1, BATCHES - 1)).saved[point]
    return continuing.difference(
        resuming, resuming.run(), 2 * BATCHES - 1, resuming.run(ckpt_path=path)
    )


def test_a_run_that_fails_within_an_optimiser_step_repeats_it(tmp_path: Path) -> None:
    """Its gradients are not saved, so the step begins with its first batch."""
    assert run_ranks(fail_within_a_step, 2, tmp_path) == ["", ""]


def validate_and_resume(rank: int, world_size: int, directory: Path, ends: dict[str, int]) -> str:
    """Describe how a run differs that resumes from a checkpoint saved after
    ``validate``; ``ends`` says where its training ended.
    """
    resuming = continuing.Training(continuing.shuffled(20), directory, options={"max_epochs": 2})
    path = str(directory / "validated.ckpt")
    L.seed_everything(7, verbose=False)
    net = continuing.Net(resuming.loaders)
    trainer = training.make_trainer(
        training.make_strategy("ours", directory),
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **ends,
    )
    trainer.fit(net)
    trainer.validate(net, verbose=False)
    trainer.save_checkpoint(path)
    return continuing.difference(
        resuming, resuming.run(), len(net.steps), resuming.run(ckpt_path=path)
    )


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


class ChangedSize(NamedTuple):
    """The steps of an epoch with batches that grow after the third one, those of a run
    that resumes after the fifth, and its warnings that the epoch starts again.
    """

    steps: list[continuing.Step]
    resumed: list[continuing.Step]
    warned: list[str]


def change_batch_size(rank: int, world_size: int, directory: Path) -> ChangedSize:
    def grow(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        loader.batch_sampler.batch_size = 4

    growing = training.At("on_train_batch_end", grow, earlier=2)
    options = {"max_epochs": 1, "callbacks": [growing]}
    resuming = continuing.Training(continuing.shuffled(48), directory, options=options)
    run = resuming.run("train_batch_end-5")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = resuming.run(ckpt_path=run.saved["train_batch_end-5"], callbacks=[])
    texts = [str(each.message) for each in caught]
    warned = [text for text in texts if "that epoch starts again" in text]
    return ChangedSize(run.steps, resumed.steps, warned)


def test_an_epoch_in_which_the_batch_size_changed_starts_again(tmp_path: Path) -> None:
    """The resumed run reads all samples of the epoch once, and rank 0 warns."""
    by_rank = run_ranks(change_batch_size, 2, tmp_path)
    for run in by_rank:
        # Each rank has 24 of the 48 samples.
        assert [len(step.samples) for step in run.steps] == [2, 2, 2, 4, 4, 4, 4, 2]
        assert [len(step.samples) for step in run.resumed] == [2] * 12
    assert [len(run.warned) for run in by_rank] == [1, 0]
    read = [sample for run in by_rank for sample in continuing.samples_of(run.resumed)]
    assert sorted(read) == [*range(48)]


class Augmented(continuing.Numbers):
    """Samples with a part that all three global generators draw."""

    def __getitem__(self, index: int) -> Tensor:
        drawn = random.random() + np.random.random() + torch.rand(())
        return torch.tensor([float(index) + 0.1 * float(drawn)])


class AugmentedTogether(Augmented):
    """The same, if the loader asks for all samples of a batch together."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [super(AugmentedTogether, self).__getitem__(index) for index in indices]


def resume_augmented(
    rank: int, world_size: int, directory: Path, dataset: type[Augmented]
) -> tuple[dict[str, str], str]:
    """Return the differences of runs that resume, and of one with fewer workers."""
    two_workers: Any = partial(DataLoader, dataset(24), 2, shuffle=True, **continuing.workers(2))
    seeding = SamplerEpochSeeding(seed=3, each_sample=True)
    resuming = continuing.Training(two_workers, directory, options={"callbacks": [seeding]})
    resumed = continuing.generations(resuming, ["train_batch_end-3"], ["train_batch_end-7"])
    whole = resuming.run()
    resuming.loaders = partial(two_workers, num_workers=1)
    return resumed, continuing.difference(resuming, whole, 0, resuming.run())


@pytest.mark.parametrize("dataset", [Augmented, AugmentedTogether])
def test_augmentation_in_workers_is_that_of_an_uninterrupted_run(
    dataset: type[Augmented], tmp_path: Path
) -> None:
    """A run that resumes within an epoch learns the same with ``each_sample=True``.

    It is the same bit for bit, as is one with another number of workers.
    """
    for resumed, one_worker in run_ranks(resume_augmented, 2, tmp_path, dataset):
        assert resumed == {}
        assert one_worker == ""
