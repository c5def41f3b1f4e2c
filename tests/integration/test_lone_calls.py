"""A call that every rank must make, and that some ranks do not make, ends with an error that names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_ddp_ext import DDPExtStrategy, RankZeroCheckpoint
from tests.harness.ranks import RankProcesses, by_hand_env, hold, launch_ranks, run_ranks
from tests.harness.training import make_trainer
from tests.integration.checkpointing import Net, strategy_for


class SavesOn(L.Callback):
    """Saves at the end of a batch, on some ranks only."""

    def __init__(self, ranks: list[int], path: Path, batch: int) -> None:
        self.ranks = ranks
        self.path = path
        self.batch = batch

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_rank in self.ranks and index == self.batch:
            trainer.save_checkpoint(self.path)


def fitted(rank: int, world_size: int, directory: Path, ranks: list[int], batch: int) -> None:
    saves = SavesOn(ranks, directory / "it.ckpt", batch)
    strategy = strategy_for("strategy", directory)
    make_trainer(strategy, devices=world_size, callbacks=[saves], max_epochs=1).fit(Net())


@pytest.mark.parametrize(("ranks", "absent"), [([0], (1, 2)), ([2], (0, 1)), ([0, 1], (2,))])
def test_a_save_on_some_ranks_names_one_that_did_not_come(
    ranks: list[int], absent: tuple[int, ...], tmp_path: Path
) -> None:
    """`trainer.save_checkpoint` under `if rank == 0` ends on all ranks at once, instead of hanging."""
    outcomes = launch_ranks(fitted, 3, tmp_path, ranks, 0, env=by_hand_env(3), time_limit=20)
    for outcome in outcomes:
        assert outcome.error is not None
        assert "RankAbsentError" in outcome.story()
        assert any(f"rank {rank} (host" in outcome.story() for rank in absent)
        assert f"began saving {tmp_path}/it.ckpt" in outcome.story()
        assert "call it on every rank" in outcome.story()


def test_a_save_after_the_last_step_names_the_rank_that_has_gone(tmp_path: Path) -> None:
    """A rank that has finished without the call is named, too."""
    outcomes = launch_ranks(fitted, 2, tmp_path, [0], 3, env=by_hand_env(2), time_limit=20)
    assert outcomes[0].error is not None
    assert "rank 1 (host" in outcomes[0].story()


def test_ranks_that_all_save_are_left_alone(tmp_path: Path) -> None:
    """However late one of them comes."""
    run_ranks(fitted, 3, tmp_path, [0, 1, 2], 0, env=by_hand_env(3))
    assert (tmp_path / "it.ckpt").exists()


def fitted_then_tested(rank: int, world_size: int, directory: Path) -> None:
    trainer = make_trainer(strategy_for("strategy", directory), max_epochs=1)
    trainer.fit(Net())
    if trainer.is_global_zero:
        trainer.save_checkpoint(directory / "it.ckpt")
    trainer.test(trainer.lightning_module, verbose=False)


def test_a_save_on_one_rank_between_two_calls_is_named(tmp_path: Path) -> None:
    """After `fit`, too, where the others go on to the next call of the Trainer."""
    outcomes = launch_ranks(fitted_then_tested, 2, tmp_path, env=by_hand_env(2), time_limit=20)
    for outcome in outcomes:
        assert "RankMismatchError" in outcome.story()
        assert re.search(
            r"rank 1 \(host .*?\) began broadcast from rank 0 \(.*test_lone_calls.py:\d+\)", outcome.story()
        )
        assert re.search(r"rank 0 \(host .*?\) began saving .*it.ckpt \(.*test_lone_calls.py:\d+\)", outcome.story())


def at_barriers(rank: int, world_size: int, directory: Path, names: list[str | None]) -> None:
    trainer = make_trainer(strategy_for("strategy", directory), devices=world_size, max_epochs=1)
    trainer.fit(Net())
    trainer.strategy.barrier("all")
    trainer.strategy.barrier(names[rank])


def test_ranks_in_different_barriers_are_told_both_places(tmp_path: Path) -> None:
    """Nobody waits for the others: each says who is where."""
    outcomes = launch_ranks(at_barriers, 3, tmp_path, ["data", "model", "data"], env=by_hand_env(3), time_limit=20)
    for outcome in outcomes:
        assert outcome.error is not None
        assert outcome.error.type_name == "RankMismatchError"
        assert re.search(r"rank 1 .*? began barrier 'model' \(.*test_lone_calls.py:\d+\)", outcome.error.message)
        assert re.search(r"rank [02] .*? began barrier 'data' \(.*test_lone_calls.py:\d+\)", outcome.error.message)
    run_ranks(at_barriers, 3, tmp_path, ["data"] * 3, env=by_hand_env(3))


def late_at_a_barrier(rank: int, world_size: int, directory: Path) -> None:
    strategy = DDPExtStrategy(init_method=f"file://{directory}/store", timeout=1)
    trainer = make_trainer(strategy, devices=world_size, max_epochs=1)
    trainer.fit(Net())
    if rank == 1:
        hold("elsewhere")
    strategy.barrier("end")


def test_a_rank_that_does_not_come_to_a_barrier_in_time_is_named(tmp_path: Path) -> None:
    """The ranks that wait, and that one, end with its name."""
    with RankProcesses(late_at_a_barrier, 3, tmp_path, env=by_hand_env(3)) as ranks:
        ranks.wait_for("elsewhere", rank=1)
        for outcome in ranks.wait(0, 2):
            assert outcome.error is not None
            assert re.search(
                r"rank \d began barrier 'end' .*, and rank 1 \(host .*has not come in time", outcome.story()
            )


def one_device_among_ranks(rank: int, world_size: int, directory: Path) -> int:
    """A Trainer of two ranks, one of rank 0's alone, and one of two ranks again."""
    make_trainer(strategy_for("strategy", directory), max_epochs=1).fit(Net())
    if rank == 0:
        callback = RankZeroCheckpoint(directory, "alone")
        alone = make_trainer(
            SingleDeviceStrategy("cpu"), devices=1, max_epochs=1, callbacks=[callback], enable_checkpointing=True
        )
        alone.fit(Net())
        alone.test(ckpt_path=directory / "alone.ckpt", verbose=False)
    trainer = make_trainer(strategy_for("strategy", directory), max_epochs=1)
    trainer.fit(Net())
    return trainer.global_step


def test_a_trainer_for_one_device_is_nobody_elses_business(tmp_path: Path) -> None:
    """What rank 0 saves and restores in a Trainer of its own is no call that other ranks must make."""
    assert run_ranks(one_device_among_ranks, 2, tmp_path, env=by_hand_env(2)) == [4, 4]
