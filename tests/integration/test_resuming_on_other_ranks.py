"""Resume with another batch size, without the earlier limit, and on another number of ranks.

Other ranks with the same data, and what else must continue as before, are cases of ``test_resume_sweep``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import Numbers, Run, Step, Training

SAMPLES = 48
DONE = 4  # batches of the first epoch, on each of the two ranks that save; each has twelve of two samples
POINT = f"train_batch_end-{DONE}"


def train(directory: Path, devices: int, batch_size: int, *points: str, **options: Any) -> Run:
    def loaders() -> DataLoader[Any]:
        return DataLoader(Numbers(SAMPLES), batch_size, shuffle=True)

    training = Training(loaders, directory, devices, {"max_epochs": 2}, {"sampler": "scalable"})
    return training.run(*points, **options)


def save(rank: int, world_size: int, directory: Path) -> Run:
    return train(directory, world_size, 2, POINT, limit_train_batches=8, max_epochs=1)


def resume(rank: int, world_size: int, directory: Path, path: str) -> list[Step]:
    return train(directory, world_size, 3, ckpt_path=path).steps


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rest_of_an_epoch_is_read_once_in_other_batches(ranks: int, tmp_path: Path) -> None:
    """The next epoch is a full epoch on the new ranks."""
    saved = run_ranks(save, 2, tmp_path, env=by_hand_env(2))
    path = saved[0].saved[POINT]
    (tmp_path / "resumed").mkdir()
    resumed = run_ranks(resume, ranks, tmp_path / "resumed", path, env=by_hand_env(ranks))
    read = [sample for run in saved for step in run.steps[:DONE] for sample in step[2:]]
    read += [sample for steps in resumed for epoch, _, *samples in steps if epoch == 0 for sample in samples]
    assert set(read) == set(range(SAMPLES))
    assert len(read) - SAMPLES < 3 * ranks, "more than what fills the last batches"
    for steps in resumed:
        assert [batch for epoch, batch, *_ in steps if epoch == 1] == list(range(-(-SAMPLES // (3 * ranks))))
