"""A resumed run equals one that did not stop, wherever it stopped: what the sweep lacks."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness.ranks import run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration import continuing
from tests.integration.continuing import Numbers, Training

# Two ranks read 16 samples in batches of two.
BATCHES = 4  # of an epoch
# The batches that raise, by epoch and number: the second one of an epoch, its last one,
# and its first one.
FAILURES = ((0, 1), (0, BATCHES - 1), (1, 0))


def fail_again_and_again(rank: int, world_size: int, directory: Path) -> str:
    """Describe how a run that fails three times differs from one that does not."""
    loaders = continuing.shuffled(16, **continuing.KEPT)
    training = Training(loaders, directory, options={"model": continuing.WITHOUT_DROPOUT})
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
    """Return the differences of resumed runs.

    They resume in each epoch, after one, and in its validation; and then in a later
    epoch again.
    """
    model = partial(continuing.Net, validation=continuing.KEPT)
    validated = {"model": model, "max_epochs": 6, "limit_val_batches": 1.0}
    training = Training(continuing.shuffled(16), directory, options={**validated, **options})
    ends = [BATCHES * (epoch + 1) for epoch in range(4)]
    within = [f"train_batch_end-{end - 2}" for end in ends]
    at_end = [f"{moment}-{ends[1]}" for moment in ("validation_end", "train_epoch_end")]
    return continuing.generations(training, [*within, *at_end], [f"train_batch_end-{ends[3] + 2}"])


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
