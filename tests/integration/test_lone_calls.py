"""A call that every rank must make, and that some ranks do not make, ends with an error that names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, by_hand_env, hold, launch_ranks, run_ranks
from tests.harness.training import Net, limit_collectives, make_strategy, make_trainer

PLACE = r"\(.*test_lone_calls.py:\d+\)"


class SavesOn(L.Callback):
    """Saves after a step, on some ranks only."""

    def __init__(self, ranks: list[int], path: Path, step: int = 1) -> None:
        self.ranks, self.path, self.step = ranks, path, step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fitted(world_size: int, directory: Path, *callbacks: L.Callback) -> L.Trainer:
    strategy = make_strategy("ours", directory)
    trainer = make_trainer(strategy, devices=world_size, callbacks=[*callbacks], max_epochs=1)
    trainer.fit(Net())
    return trainer


def save_on(rank: int, world_size: int, directory: Path, ranks: list[int], step: int = 1) -> None:
    fitted(world_size, directory, SavesOn(ranks, directory / "it.ckpt", step))


def endings(function: Any, world_size: int, *args: Any) -> list[Outcome]:
    return launch_ranks(function, world_size, *args, env=by_hand_env(world_size))


@pytest.mark.parametrize(("ranks", "absent"), [([2], "[01]"), ([0, 1], "2")])
def test_a_save_on_some_ranks_names_one_that_did_not_make_it(ranks: list[int], absent: str, tmp_path: Path) -> None:
    """`trainer.save_checkpoint` under `if rank == 0` raises on all ranks immediately, instead of hanging."""
    for outcome in endings(save_on, 3, tmp_path, ranks):
        assert outcome.error is not None
        assert "RankAbsentError" in outcome.story()
        assert re.search(rf"began saving {tmp_path}/it.ckpt .*rank {absent} \(host .*make this call", outcome.story())


def test_a_save_after_the_last_step_names_the_rank_that_finished(tmp_path: Path) -> None:
    """The error also names a rank that finished without the call."""
    saving, _ = endings(save_on, 2, tmp_path, [0], 4)
    assert saving.error is not None
    assert "rank 1 (host" in saving.error.message


def save_between_two_calls(rank: int, world_size: int, directory: Path) -> None:
    trainer = fitted(world_size, directory)
    if trainer.is_global_zero:
        trainer.save_checkpoint(directory / "it.ckpt")
    trainer.test(trainer.lightning_module, verbose=False)


def test_a_save_on_one_rank_between_two_calls_is_named(tmp_path: Path) -> None:
    """The same holds after `fit`, while the others continue with the next call of the Trainer."""
    for outcome in endings(save_between_two_calls, 2, tmp_path):
        assert "RankAbsentError" in outcome.story()
        assert re.search(rf"rank 1 \(host .*?\) began broadcast from rank 0 {PLACE}", outcome.story())
        assert re.search(rf"rank 0 \(host .*?\) began saving .*it.ckpt {PLACE}", outcome.story())


def at_barriers(rank: int, world_size: int, directory: Path, names: list[str]) -> None:
    trainer = fitted(world_size, directory, SavesOn([0, 1, 2], directory / "it.ckpt"))
    trainer.strategy.barrier("all")
    trainer.strategy.barrier(names[rank])


def test_ranks_in_different_barriers_raise_with_both_places(tmp_path: Path) -> None:
    """No rank waits for the others: each names every rank's call. Ranks that all save continue."""
    for outcome in endings(at_barriers, 3, tmp_path, ["data", "model", "data"]):
        assert outcome.error is not None
        assert outcome.error.type_name == "RankAbsentError"
        assert re.search(rf"rank 1 .*? began barrier 'model' {PLACE}", outcome.error.message)
        assert re.search(rf"rank [02] .*? began barrier 'data' {PLACE}", outcome.error.message)
    run_ranks(at_barriers, 3, tmp_path, ["data"] * 3, env=by_hand_env(3))
    assert (tmp_path / "it.ckpt").exists()


def late_at_a_barrier(rank: int, world_size: int, directory: Path, late: int) -> None:
    trainer = fitted(world_size, directory)
    limit_collectives(2.0)
    if rank == late:
        hold("elsewhere")
    trainer.strategy.barrier("end")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_for_a_barrier_is_named(late: int, tmp_path: Path) -> None:
    """The waiting rank raises an error with its name, even if it is rank 0, which keeps the record."""
    with RankProcesses(late_at_a_barrier, 2, tmp_path, late, env=by_hand_env(2)) as ranks:
        (outcome,) = ranks.wait(1 - late)
    assert outcome.error is not None
    sentence = rf"rank {1 - late} began barrier 'end' .*, but rank {late} \(host .*did not do so in time"
    assert re.search(sentence, outcome.story())
