"""A checkpoint that a hook reads by itself does not decide where a run begins."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateFinder

from tests.harness import training
from tests.integration.continuing import Net, Training, shuffled

HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_batch_start")


def save_early(side: training.Kind, directory: Path, model: type[Net]) -> str:
    """Return the checkpoint of a run after its first step."""
    runs = Training(shuffled(12), directory, options={"max_epochs": 1, "model": model})
    return runs.run("train_batch_end-1").saved["train_batch_end-1"]


def load_a_teacher(
    side: training.Kind, directory: Path, teacher: Path, plain: Path
) -> dict[str, Any]:
    """Return what each hook reads, a checkpoint on all ranks and a file of weights on rank
    0 only, and the run.
    """
    found: dict[str, Any] = {}

    def load(trainer: L.Trainer) -> None:
        read["teacher"] = trainer.strategy.load_checkpoint(teacher)["state_dict"]
        if trainer.is_global_zero:
            read["plain"] = trainer.strategy.load_checkpoint(plain)

    runs = Training(shuffled(12), directory, side=side, options={"max_epochs": 1})
    for hook in HOOKS:
        read: dict[str, Any] = {}
        run = runs.run(callbacks=[training.At(hook, load)])
        found[hook] = [read, run.steps, run.counts, run.weights]
        assert "teacher" in read, f"{hook} was not called"
    return found


def test_a_file_read_in_a_hook_does_not_change_where_training_starts(tmp_path: Path) -> None:
    """Training starts at the first batch, and each rank gets the content of the file that it
    reads, as with stock.
    """
    teacher, _ = training.on_ranks("ours", save_early, tmp_path, Net)
    torch.save({"layers.0.weight": torch.ones(4, 1)}, tmp_path / "plain.pt")
    ours, stock = training.on_both(load_a_teacher, tmp_path, Path(teacher), tmp_path / "plain.pt")
    training.assert_same(ours, stock)


class Tuned(Net):
    """Has the one optimiser that a finder of learning rates needs."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def find_a_rate(side: training.Kind, directory: Path, path: str) -> list[Any]:
    """Return the samples and counts of a run that resumes and then looks for a learning rate, which
    needs four more steps.
    """
    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    options = {"max_epochs": 2, "default_root_dir": directory}
    runs = Training(shuffled(12), directory, side=side, options=options)
    run = runs.run(model=Tuned, callbacks=[finder], ckpt_path=path)
    return [[len(step.samples) for step in run.steps], *run.counts]


def test_a_finder_of_learning_rates_restores_its_own_file(tmp_path: Path) -> None:
    """After the search, training continues with the batch after the file's, as with stock."""
    path, _ = training.on_ranks("ours", save_early, tmp_path, Tuned)
    ours, stock = training.on_both(find_a_rate, tmp_path, path)
    assert ours == stock
