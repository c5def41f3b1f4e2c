"""A resumed run continues as if it had not been stopped: cases that ``test_resume_sweep`` lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import nn
from torch.utils.data import DataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration.continuing import KEPT, Loaders, Net, Numbers, Points, Training, difference, generations


class Plans(Net):
    """Makes Lightning create the loaders before anything is restored."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def shuffled(samples: int = 16, **options: Any) -> Loaders:
    return lambda rank, size: DataLoader(Numbers(samples), **{"batch_size": 2, "shuffle": True, **options})


# What is read, the points that are resumed from (of a whole run, of the run resumed there, and so on), and options.
CASES: dict[str, tuple[Loaders, list[Points], dict[str, Any]]] = {
    "limit of samples": (
        shuffled(10, batch_size=None),
        [["train_batch_end-3"], ["train_epoch_end-4"], ["train_batch_end-6"]],
        {"limit_train_batches": 4},
    ),
    "last batch dropped": (shuffled(18, drop_last=True), [["train_batch_end-3"], ["train_batch_end-6"]], {}),
    "plan": (
        shuffled(),
        [["train_batch_end-1", "train_batch_end-4"], ["train_batch_end-7"]],
        {"kind": Plans, "accumulate_grad_batches": 2},
    ),
}


def run_cases(rank: int, world_size: int, directory: Path) -> dict[str, dict[str, str]]:
    found = {}
    for name, (loaders, points, options) in CASES.items():
        training = Training(lambda make=loaders: make(rank, 2), directory, 2, options, name=name)  # type: ignore[misc]
        found[name] = generations(training, *points)
    return found


@pytest.mark.lowest
def test_a_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    """After any number of stops, the remaining batches are the same, and so are the weights, bit for bit."""
    found = run_ranks(run_cases, 2, tmp_path, env=by_hand_env(2))
    assert found == [{name: {} for name in CASES}] * 2


def fail_again_and_again(rank: int, world_size: int, directory: Path) -> list[str]:
    """Return the differences of runs that fail in an epoch's second, last and first batch, and within a step."""
    training = Training(lambda: shuffled(**KEPT)(rank, 2), directory, 2, {"dropout": False})
    whole, done, path = training.run(), 0, None
    wrong: list[str] = []
    for fail_at in ((0, 1), (0, 3), (1, 0)):
        point = f"exception-{4 * fail_at[0] + fail_at[1]}"
        run = training.run(point, ckpt_path=path, fail_at=fail_at)
        wrong += [] if run.steps == whole.steps[done : done + len(run.steps)] else [f"{fail_at}: {run.steps}"]
        path, done = run.saved[point], done + len(run.steps)
    wrong.append(difference(training, whole, done, training.run(ckpt_path=path)))
    training.options["accumulate_grad_batches"] = 2
    path = training.run("exception-7", fail_at=(1, 3)).saved["exception-7"]
    return [*wrong, difference(training, training.run(), 7, training.run(ckpt_path=path))]


def test_a_run_that_fails_again_and_again_trains_on_each_batch_once(tmp_path: Path) -> None:
    """If the first, last or another batch of an epoch raises, the run later continues with it, or with its step."""
    assert run_ranks(fail_again_and_again, 2, tmp_path, env=by_hand_env(2)) == [["", ""]] * 2


def resume_ended_run(rank: int, world_size: int, directory: Path) -> str:
    """Return the difference of a run that resumes from a checkpoint saved after ``validate``."""
    training = Training(lambda: shuffled(20)(rank, 2), directory, 2, {"max_epochs": 2, "dropout": False})
    path = str(directory / "validated.ckpt")
    L.seed_everything(7, verbose=False)
    net = Net(training.loaders)
    net.layers[1] = nn.Identity()
    trainer = make_trainer(make_strategy("ours", directory), max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(net)
    trainer.validate(net, verbose=False)
    trainer.save_checkpoint(path)
    return difference(training, training.run(), len(net.steps), training.run(ckpt_path=path))


def test_a_finished_run_continues_where_training_was(tmp_path: Path) -> None:
    """Its checkpoint is saved after ``validate``."""
    assert run_ranks(resume_ended_run, 2, tmp_path, env=by_hand_env(2)) == [""] * 2
