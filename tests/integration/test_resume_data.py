"""``resume_data="stock"``, and checkpoints that do not say where their epoch continues."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.harness.ranks import run_ranks
from tests.harness.training import Kind, assert_same, on_both, on_ranks
from tests.integration import continuing
from tests.integration.continuing import Run, Training

TWO_EPOCHS = {"max_epochs": 2}
MIDDLE = "train_batch_end-2"  # of the first epoch
FIRST_EPOCH_END = "train_epoch_end-4"  # of 16 samples on two ranks, in batches of two

# Lightning's own way to resume.


def save_shuffled(kind: Kind, directory: Path) -> list[str]:
    training = Training(continuing.shuffled(16), directory, options=TWO_EPOCHS)
    return [*training.run(MIDDLE, FIRST_EPOCH_END).saved.values()]


def resume_as_stock(kind: Kind, directory: Path, paths: list[str]) -> list[Run]:
    training = Training(continuing.shuffled(16), directory, options=TWO_EPOCHS, side=kind)
    if kind == "ours":
        training.strategy = {"resume_data": "stock"}
    return [training.run(ckpt_path=path) for path in paths]


def test_data_and_random_numbers_can_be_left_to_stock(tmp_path: Path) -> None:
    """With ``resume_data="stock"``, batches and weights are those of stock's resume."""
    paths, _ = on_ranks("ours", save_shuffled, tmp_path)
    ours, stock = on_both(resume_as_stock, tmp_path, paths)
    for own_runs, stock_runs in zip(ours, stock, strict=True):
        assert [run.steps for run in own_runs] == [run.steps for run in stock_runs]
        assert_same([run.weights for run in own_runs], [run.weights for run in stock_runs])


def count_lightnings_warnings(rank: int, world_size: int, directory: Path) -> dict[str, int]:
    """Return how often Lightning warns of a resume within an epoch, by ``resume_data``."""
    training = Training(continuing.shuffled(16), directory, options=TWO_EPOCHS)
    path = training.run(MIDDLE).saved[MIDDLE]
    filters = list(warnings.filters)
    counts = {}
    for resume_data in ("exact", "stock"):
        training.strategy = {"resume_data": resume_data}
        with warnings.catch_warnings(record=True) as caught:
            training.run(ckpt_path=path)
            assert warnings.filters == filters
        texts = [str(warning.message) for warning in caught]
        counts[resume_data] = sum("ended before the epoch ended" in text for text in texts)
    return counts


def test_lightnings_warning_is_hidden_only_where_an_epoch_continues(tmp_path: Path) -> None:
    """A later run that resumes as stock shows it, on rank 0."""
    first, second = run_ranks(count_lightnings_warnings, 2, tmp_path)
    assert first == {"exact": 0, "stock": 1}
    assert second == {"exact": 0, "stock": 0}


# Checkpoints without a data position of this release.

STREAM_SAMPLES = 9
NO_POSITION = (
    "epoch 0 cannot be resumed in the middle, so that epoch starts again: the checkpoint has no"
    " position that this release can read; save at the end of an epoch before you change the"
    " strategy or its release"
)


def training_on_streams(kind: Kind, directory: Path) -> Training:
    """Return a training in which each rank has its own stream, in a loader with a state."""

    def load_stream() -> StatefulDataLoader[Any]:
        stream = continuing.Stream(STREAM_SAMPLES, dist.get_rank())
        return StatefulDataLoader(stream, batch_size=2)

    return Training(load_stream, directory, options=TWO_EPOCHS, side=kind)


def save_streams(kind: Kind, directory: Path) -> str:
    return training_on_streams(kind, directory).run(MIDDLE).saved[MIDDLE]


def resume_streams(kind: Kind, directory: Path, path: str) -> continuing.Resumed:
    return continuing.resume(training_on_streams(kind, directory), path)


def test_a_checkpoint_of_stock_lightning_repeats_the_epoch(tmp_path: Path) -> None:
    """Each rank reads all its own data again, and rank 0 warns that the checkpoint has no
    position.
    """
    path, _ = on_ranks("stock", save_streams, tmp_path)
    first, second = on_ranks("ours", resume_streams, tmp_path, path)
    assert first.warned == [NO_POSITION]
    assert second.warned == []
    for rank, resumed in enumerate((first, second)):
        first_epoch = [step for step in resumed.run.steps if step.epoch == 0]
        own = continuing.Stream(STREAM_SAMPLES, rank).numbers
        assert continuing.samples_of(first_epoch) == [*own]


def test_a_data_position_of_another_release_repeats_the_epoch(tmp_path: Path) -> None:
    """Rank 0 warns with the remedy."""
    path, _ = on_ranks("ours", save_streams, tmp_path)
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["lightning_ddp_ext"]["version"] = 5
    torch.save(checkpoint, path)
    first, _ = on_ranks("ours", resume_streams, tmp_path, path)
    assert first.warned == [NO_POSITION]
    assert [step.batch for step in first.run.steps if step.epoch == 0] == [0, 1, 2, 3, 4]
