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


def load_in_hook(
    hook: str, side: training.Kind, directory: Path, teacher: Path, plain: Path
) -> dict[str, Any]:
    """Train, and read files in a hook: a checkpoint on all ranks, and weights on rank 0.

    Return what is read, and what the run trains.
    """
    read: dict[str, Any] = {}

    def load(trainer: L.Trainer) -> None:
        read["teacher"] = trainer.strategy.load_checkpoint(teacher)["state_dict"]
        if trainer.is_global_zero:
            read["plain"] = trainer.strategy.load_checkpoint(plain)

    runs = Training(shuffled(12), directory, side=side, options={"max_epochs": 1})
    run = runs.run(callbacks=[training.At(hook, load)])
    return {"read": read, "steps": run.steps, "counts": run.counts, "weights": run.weights}


def load_in_hooks(side: training.Kind, *paths: Path) -> dict[str, dict[str, Any]]:
    return {hook: load_in_hook(hook, side, *paths) for hook in HOOKS}


def test_a_file_read_in_a_hook_does_not_change_where_training_starts(tmp_path: Path) -> None:
    """Training starts at the first batch, and each rank gets the content of the file that it
    reads, as with stock.
    """
    teacher, _ = training.on_ranks("ours", save_early, tmp_path, Net)
    plain = tmp_path / "plain.pt"
    torch.save({"layers.0.weight": torch.ones(4, 1)}, plain)
    ours, stock = training.on_both(load_in_hooks, tmp_path, Path(teacher), plain)
    training.assert_same(ours, stock)
    for found in ours[0].values():
        assert found["read"].keys() == {"teacher", "plain"}


class Tuned(Net):
    """Has the one optimiser that a finder of learning rates needs."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def find_a_rate(side: training.Kind, directory: Path, path: str) -> dict[str, Any]:
    """Resume a run that first looks for a learning rate, which needs four more steps.

    Return the epoch and batch of each step, and the counts at the end.
    """
    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    options = {"max_epochs": 2, "default_root_dir": directory}
    runs = Training(shuffled(12), directory, side=side, options=options)
    run = runs.run(model=Tuned, callbacks=[finder], ckpt_path=path)
    return {"moments": [step.moment for step in run.steps], "counts": run.counts}


def test_a_finder_of_learning_rates_restores_its_own_file(tmp_path: Path) -> None:
    """After the search, training continues with the batch after the file's, as with stock."""
    path, _ = training.on_ranks("ours", save_early, tmp_path, Tuned)
    ours, stock = training.on_both(find_a_rate, tmp_path, path)
    assert ours == stock
