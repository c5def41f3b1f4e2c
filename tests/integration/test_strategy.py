"""What a user has of the strategy object itself, inside and outside of a run."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist

from lightning_ddp_ext import DDPExtStrategy, World
from tests.harness.ranks import by_hand_env, free_port, launch_ranks, run_ranks
from tests.harness.training import Net, make_trainer

BY_HAND = by_hand_env(2)


def world_of(rank: int, world_size: int, directory: Path) -> list[World]:
    strategy = DDPExtStrategy(init_method=f"file://{directory}/store")
    trainer = make_trainer(strategy)
    before = strategy.world
    trainer.fit(Net())
    return [before, strategy.world]


def test_world_says_who_this_process_is(tmp_path: Path) -> None:
    """It is right as soon as there is a Trainer, and stays it."""
    for rank, worlds in enumerate(run_ranks(world_of, 2, tmp_path, env=BY_HAND)):
        expected = World(
            rank=rank,
            world_size=2,
            local_rank=rank,
            local_world_size=2,
            node_rank=0,
            source="RANK, WORLD_SIZE and LOCAL_RANK",
        )
        assert worlds == [expected, expected]


def test_world_of_ranks_that_are_still_to_be_started() -> None:
    """The process that will start them is the first of them."""
    strategy = DDPExtStrategy()
    make_trainer(strategy, num_nodes=2)
    assert (strategy.world.rank, strategy.world.world_size, strategy.world.local_world_size) == (0, 4, 2)
    assert strategy.world.num_nodes == 2


def test_mpirun_inside_a_slurm_allocation_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's variables are those of the batch script then, the same for all processes: mpirun's own are right."""
    slurm = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for name, value in (slurm | hydra).items():
        monkeypatch.setenv(name, value)
    strategy = DDPExtStrategy()
    trainer = make_trainer(strategy)
    assert (strategy.world.rank, strategy.world.source) == (1, "PMI")
    assert (trainer.global_rank, trainer.local_rank) == (1, 1)


def work_on_rank_zero(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}

    class Worker(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            strategy = trainer.strategy
            assert isinstance(strategy, DDPExtStrategy)
            found["result"] = strategy.on_rank_zero(lambda: f"from rank {rank}")
            with pytest.raises(OSError, match=r"disk of rank 0") as caught:
                strategy.on_rank_zero(fail, what="a test")
            found["notes"] = getattr(caught.value, "__notes__", [])
            if rank == 1:
                (directory / "rank 1 was here").touch()
            strategy.barrier("a name")
            found["seen after barrier"] = (directory / "rank 1 was here").exists()

    def fail() -> None:
        raise OSError(f"disk of rank {rank}")

    make_trainer(DDPExtStrategy(init_method=f"file://{directory}/store"), callbacks=[Worker()]).fit(Net())
    return found


def test_rank_zero_works_for_all_and_a_barrier_holds(tmp_path: Path) -> None:
    """Every rank gets rank 0's result or its error, and passes a barrier when all have come to it."""
    first, second = run_ranks(work_on_rank_zero, 2, tmp_path, env=BY_HAND)
    assert first == {"result": "from rank 0", "notes": [], "seen after barrier": True}
    assert second["result"] == "from rank 0"
    assert second["seen after barrier"]
    has_notes = sys.version_info >= (3, 11)
    assert second["notes"] == (["raised on rank 0 during a test"] if has_notes else [])


def alone_after_an_exception(rank: int, world_size: int, directory: Path) -> Any:
    """The Trainer of rank 0 is interrupted; rank 1 never comes to what rank 0 does then."""
    strategy = DDPExtStrategy(init_method=f"file://{directory}/store")
    trainer = make_trainer(strategy)
    trainer.fit(Net())
    trainer.state.status = L.pytorch.trainer.states.TrainerStatus.INTERRUPTED
    if rank == 1:
        return strategy.on_rank_zero(lambda: "never")
    strategy.barrier()
    trainer.save_checkpoint(directory / "last.ckpt")
    return strategy.on_rank_zero(lambda: "alone")


def test_an_interrupted_trainer_waits_for_nobody(tmp_path: Path) -> None:
    """Rank 0 can save and work alone, where the others may never come."""
    assert run_ranks(alone_after_an_exception, 2, tmp_path, env=BY_HAND) == ["alone", None]
    assert (tmp_path / "last.ckpt").is_file()


def pickle_around_fit(rank: int, world_size: int, directory: Path) -> list[Any]:
    strategy = DDPExtStrategy(init_method=f"file://{directory}/store", timeout=90, find_unused_parameters=True)
    copies = [pickle.loads(pickle.dumps(strategy))]
    make_trainer(strategy).fit(Net())
    copies.append(pickle.loads(pickle.dumps(strategy)))
    return [(str(c.chosen_init_method), c._timeout.total_seconds(), c._ddp_kwargs) for c in copies]


def test_a_strategy_can_be_pickled(tmp_path: Path) -> None:
    """Before and after a run, with all that it was told."""
    told = (f"file://{tmp_path}/store", 90.0, {"find_unused_parameters": True})
    assert run_ranks(pickle_around_fit, 2, tmp_path, env=BY_HAND) == [[told, told]] * 2


def one_device(rank: int, world_size: int, name: str) -> Any:
    trainer = make_trainer(name, devices=1)
    trainer.fit(Net())
    found = trainer.validate(Net(), verbose=False)[0], trainer.world_size, trainer.global_step
    return *found, dist.is_initialized()


@pytest.mark.parametrize(("name", "is_here", "groups"), [("ddp_ext", True, 1), ("ddp_ext_fork", False, 2)])
def test_one_device_is_a_world_of_one(name: str, is_here: bool, groups: int) -> None:
    """`devices=1` trains as with stock: in this process, or in one that is started."""
    outcome = launch_ranks(one_device, 1, name)[0]
    assert outcome.exit_code == 0, outcome
    metrics, world_size, _, has_group = outcome.result
    assert "val_loss" in metrics
    assert (world_size, has_group) == (1, is_here)
    assert outcome.output.count("process group: gloo, 1 rank, env://\n") == groups


def fit_and_test(rank: int, world_size: int, init_method: str | None) -> None:
    trainer = make_trainer(DDPExtStrategy(init_method=init_method))
    trainer.fit(Net())
    trainer.test(Net(), verbose=False)
    make_trainer(DDPExtStrategy(init_method=init_method)).fit(Net())


@pytest.mark.parametrize("init_method", ["file", None])
def test_one_line_says_how_the_ranks_met(init_method: str | None, tmp_path: Path) -> None:
    """On rank 0, once a process, however many Trainers follow."""
    url = init_method and f"file://{tmp_path}/store"
    first, second = launch_ranks(fit_and_test, 2, url, env=by_hand_env(2, port=free_port()))
    assert first.exit_code == second.exit_code == 0
    assert first.output.count("process group:") == 1
    assert f"process group: gloo, 2 ranks, {url or 'env://'}\n" in first.output
    assert "process group:" not in second.output
