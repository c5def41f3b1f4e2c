"""A resumed run equals one that did not stop, in cases that ``test_resume_sweep`` does not
draw: several failures, a save after ``fit`` and after ``validate``, validation of combined
loaders, and a hook that loads the data early.
"""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness.ranks import run_ranks
from tests.harness.training import At, make_strategy, make_trainer
from tests.integration import continuing
from tests.integration.continuing import Numbers, Training

NO_DIFFERENCE = ["", ""]  # of a resumed run, on both ranks
SAMPLES = 16  # two ranks read them in four batches of two
# The batches that raise, by epoch and number, and the points at which they do.
FAILURES = {
    "exception-1": (0, 1),  # within an epoch
    "exception-3": (0, 3),  # the last batch of an epoch
    "exception-4": (1, 0),  # the first batch of an epoch
}


def fail_again_and_again(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run that fails three times differs from one that does not."""
    # The workers of the training loader persist from epoch to epoch.
    loaders = continuing.shuffled(SAMPLES, **continuing.KEPT)
    training = Training(loaders, directory, options={"model": continuing.WITHOUT_DROPOUT})
    whole = training.run()
    done = 0
    path = None
    for point, epoch_and_batch in FAILURES.items():
        run = training.run(point, ckpt_path=path, fail_at=epoch_and_batch)
        assert run.steps == whole.steps[done : done + len(run.steps)]
        path = run.saved[point]
        done += len(run.steps)
    return continuing.difference(training, whole, done, training.run(ckpt_path=path))


@pytest.mark.lowest
def test_a_run_that_fails_again_and_again_trains_on_each_batch_once(tmp_path: Path) -> None:
    """A run continues with the batch that raised.

    The batch is the first, the last or another one of an epoch.
    """
    assert run_ranks(fail_again_and_again, 2, tmp_path) == NO_DIFFERENCE


def save_after_fit(directory: Path, *, validates: bool, **limits: int) -> tuple[Training, Path]:
    """Train until the limits, and save a checkpoint when ``fit`` has returned.

    With ``validates``, ``validate`` runs before the save.
    """
    training = Training(continuing.shuffled(20), directory, options={"max_epochs": 2})
    path = directory / "finished.ckpt"
    L.seed_everything(7, verbose=False)
    module = continuing.Net(training.loaders)
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, **limits}
    trainer = make_trainer(make_strategy("ours", directory), **options)
    trainer.fit(module)
    if validates:
        trainer.validate(module, verbose=False)
    trainer.save_checkpoint(path)
    return training, path


def resume_after_fit(rank: int, world_size: int, directory: Path, limits: dict[str, int]) -> str:
    """Describe how a run differs that resumes from a checkpoint of a finished run."""
    training, path = save_after_fit(directory, validates=False, **limits)
    done = 3 if "max_steps" in limits else 5
    return continuing.difference(training, training.run(), done, training.run(ckpt_path=str(path)))


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"max_epochs": 1}, id="epoch"),
        pytest.param({"max_epochs": 2, "max_steps": 3}, id="step"),
    ],
)
def test_a_finished_run_continues_where_training_was(
    limits: dict[str, int], tmp_path: Path
) -> None:
    """A checkpoint that is saved after ``fit`` has returned continues the training."""
    assert run_ranks(resume_after_fit, 2, tmp_path, limits) == NO_DIFFERENCE


def resume_after_validate(rank: int, world_size: int, directory: Path) -> tuple[int, list[str]]:
    """Return the steps of a resumed run whose checkpoint was saved after ``validate``."""
    training, path = save_after_fit(directory, validates=True, max_epochs=1, max_steps=3)
    resumed = continuing.resume(training, str(path))
    return len(resumed.run.steps), resumed.warned


def test_after_validate_an_unfinished_epoch_starts_again(tmp_path: Path) -> None:
    """By then the Trainer has dropped the loaders, so the place in the epoch is unknown."""
    both_epochs = 2 * 5
    (steps, warned), (other_steps, _) = run_ranks(resume_after_validate, 2, tmp_path)
    assert steps == other_steps == both_epochs
    assert len(warned) == 1


class ValidatedTogether(continuing.LongValidated):
    """Validates on two shuffled loaders at once."""

    def val_dataloader(self) -> Any:
        loaders = [DataLoader(Numbers(self.samples), 2, shuffle=True) for _ in range(2)]
        return CombinedLoader(loaders, "max_size")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        super().validation_step(torch.cat(batch), index)


def stop_in_validation(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run differs that a signal stops in its first validation."""
    options = {
        "limit_val_batches": 1.0,
        "model": ValidatedTogether,
        "max_epochs": 2,
        "default_root_dir": directory / "run",  # for the stop checkpoint
    }
    training = Training(continuing.shuffled(SAMPLES), directory, options=options)
    whole = training.run()
    stop = continuing.signalled("on_validation_batch_start", ranks=[0])
    stopped = training.run(callbacks=[stop])
    assert stopped.status is not None
    resumed = training.run(ckpt_path="last")
    return continuing.difference(training, whole, len(stopped.steps), resumed)


def test_a_validation_of_combined_loaders_starts_again(tmp_path: Path) -> None:
    """Both loaders draw the order that they would have had, and the model's dropout too."""
    assert run_ranks(stop_in_validation, 2, tmp_path) == NO_DIFFERENCE


def stop_before_first_batch(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run differs that a signal stops when its second epoch has begun."""
    options = {"max_epochs": 2, "default_root_dir": directory / "run"}
    training = Training(continuing.shuffled(SAMPLES), directory, options=options)
    whole = training.run()
    stop = continuing.signalled("on_train_epoch_start", earlier=1)
    stopped = training.run(callbacks=[stop])
    assert stopped.status is not None
    return continuing.difference(
        training, whole, len(stopped.steps), training.run(ckpt_path="last")
    )


def test_an_epoch_that_was_stopped_before_its_first_batch_continues(tmp_path: Path) -> None:
    """The seeds of its workers were drawn before the random state was saved."""
    assert run_ranks(stop_before_first_batch, 2, tmp_path) == NO_DIFFERENCE


def resume_with_early_load(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a resumed run differs if a hook loads the data before the checkpoint."""
    training = Training(continuing.shuffled(SAMPLES), directory)
    whole = training.run("train_batch_end-3")
    loads = At("setup", lambda trainer: trainer.estimated_stepping_batches)
    resumed = training.run(ckpt_path=whole.saved["train_batch_end-3"], callbacks=[loads])
    return continuing.difference(training, whole, 3, resumed)


def test_a_hook_may_load_the_data_before_the_checkpoint(tmp_path: Path) -> None:
    """The resumed run keeps the order of the checkpoint's seed, not that of its own seed."""
    assert run_ranks(resume_with_early_load, 2, tmp_path) == NO_DIFFERENCE
