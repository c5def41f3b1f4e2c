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
from tests.harness.ranks import by_hand_env, free_port, launch_ranks
from tests.harness.training import At, Kind, Net, make_strategy, make_trainer, on_ranks


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


def use_strategy(kind: Kind, directory: Path) -> dict[str, Any]:
    """What the strategy gives before, in and after a run, and rank 0 alone after an interrupted one."""
    strategy = make_strategy("ours", directory, find_unused_parameters=True)
    assert isinstance(strategy, DDPExtStrategy)
    found: dict[str, Any] = {}

    def fail() -> None:
        raise OSError(f"disk of rank {dist.get_rank()}")

    def work(trainer: L.Trainer) -> None:
        found["result"] = strategy.on_rank_zero(lambda: f"from rank {trainer.global_rank}")
        with pytest.raises(OSError, match=r"disk of rank 0") as caught:
            strategy.on_rank_zero(fail, what="a test")
        found["notes"] = getattr(caught.value, "__notes__", [])
        if trainer.global_rank == 1:
            (directory / "rank 1 was here").touch()
        strategy.barrier("a name")
        found["seen after barrier"] = (directory / "rank 1 was here").exists()

    trainer = make_trainer(strategy, callbacks=[At("on_train_start", work)])
    found["worlds"], copies = [strategy.world], [pickle.loads(pickle.dumps(strategy))]
    trainer.fit(Net())
    found["worlds"].append(strategy.world)
    copies.append(pickle.loads(pickle.dumps(strategy)))
    found["copies"] = [str(copy.chosen_init_method) for copy in copies]
    trainer.state.status = L.pytorch.trainer.states.TrainerStatus.INTERRUPTED
    if trainer.is_global_zero:
        strategy.barrier()
        trainer.save_checkpoint(directory / "last.ckpt")
    found["alone"] = strategy.on_rank_zero(lambda: "alone")
    return found


def test_the_strategy_serves_its_user(tmp_path: Path) -> None:
    """`world`, `on_rank_zero` and `barrier` do what they say, it is pickled, and an interrupted rank waits for nobody.

    `world` is right as soon as there is a Trainer; every rank gets rank 0's result, or its error.
    """
    for rank, found in enumerate(on_ranks("ours", use_strategy, tmp_path)):
        counts = {"world_size": 2, "local_world_size": 2, "node_rank": 0}
        world = World(rank=rank, local_rank=rank, source="RANK, WORLD_SIZE and LOCAL_RANK", **counts)
        has_notes = rank == 1 and sys.version_info >= (3, 11)
        assert found == {
            "worlds": [world, world],
            "copies": [f"file://{tmp_path}/ours/store"] * 2,
            "result": "from rank 0",
            "notes": ["raised on rank 0 during a test"] if has_notes else [],
            "seen after barrier": True,
            "alone": "alone" if rank == 0 else None,
        }
    assert (tmp_path / "ours" / "last.ckpt").is_file()


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
