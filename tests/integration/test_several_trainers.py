"""Several Trainers one after another in one process: each gets its settings, or an
error with the reason.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext import DDPExtStrategy, HangWatchdog, RankZeroCheckpointIO
from lightning_ddp_ext.errors import GroupInUseError
from tests.harness import ranks, training
from tests.harness.scripts import run_script
from tests.harness.training import Net
from tests.supervision import model as supervision


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def timeout_of_collectives() -> float:
    group = dist.distributed_c10d._get_default_group()
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds()


def refusal(trainer: L.Trainer) -> str:
    with pytest.raises(GroupInUseError) as refused:
        trainer.fit(Net())
    return str(refused.value)


def trials(kind: training.Kind, directory: Path) -> list[Any]:
    """Return the results of calls after a script caught an exception that all ranks
    raised, in each of these hooks.
    """
    found: list[Any] = []
    for hook in ("setup", "on_train_batch_start", "on_train_batch_end", "on_validation_epoch_end"):
        trainer = training.make_trainer(
            training.make_strategy(kind, directory),
            callbacks=[supervision.Fault(hook, supervision.boom)],
        )
        path = directory / hook
        group = dist.group.WORLD
        try:
            trainer.fit(Net())
        except supervision.BoomError:
            if hook != "setup":
                trainer.save_checkpoint(path)
                found.append(path.exists())
        trainer.strategy.barrier()
        total = torch.ones(1)
        dist.all_reduce(total)
        found += [float(total), dist.group.WORLD is group or hook == "setup"]
    trainer = training.fit(kind, directory, Net())
    return [*found, trainer.global_step]


def test_an_exception_that_all_ranks_raise_and_catch_parts_none_of_them(tmp_path: Path) -> None:
    """As with stock, after a pruned trial the group is the same, a save waits for its
    file, the next Trainer works.
    """
    ours, stock = training.on_both(trials, tmp_path)
    assert ours == stock


class Formed(NamedTuple):
    """A Trainer's strategy, by options or by name, and what it gets."""

    timeout: float  # of collectives, in seconds
    group: int  # by the order in which groups are formed
    options: dict[str, Any] | None = None
    after_destroy: bool = False


TRAINERS = [
    Formed(1800, 0),
    Formed(600, 0, {"timeout": timedelta(seconds=600)}),
    Formed(77.5, 0, {"timeout": 77.5}),
    Formed(1800, 0, {"timeout": None}),
    Formed(1800, 0),
    Formed(1800, 1, {"process_group_backend": "cpu:gloo"}),
    Formed(1800, 2, after_destroy=True),
]


def groups_of_trainers(rank: int, world_size: int, directory: Path) -> list[tuple[float, int]]:
    """Return the timeout and the group of each Trainer."""
    groups: list[Any] = []
    found = []
    for each in TRAINERS:
        if each.after_destroy:
            dist.barrier()
            dist.destroy_process_group()
        strategy: Any = "ddp_ext"
        if each.options is not None:
            strategy = training.make_strategy("ours", directory, **each.options)
        training.make_trainer(strategy).fit(Net())
        if dist.group.WORLD not in groups:
            groups.append(dist.group.WORLD)
        found.append((timeout_of_collectives(), groups.index(dist.group.WORLD)))
    return found


def test_a_further_trainer_gets_its_own_timeout_in_the_same_group(tmp_path: Path) -> None:
    """It may leave the init method out; another backend, or a group that was destroyed,
    means a new group.
    """
    env = {**ranks.by_hand_env(2), "DDPX_INIT_METHOD": f"file://{tmp_path}/store"}
    for found in ranks.run_ranks(groups_of_trainers, 2, tmp_path, env=env):
        assert found == [(each.timeout, each.group) for each in TRAINERS]


def resources_of_trainers(
    rank: int, world_size: int, directory: Path, *, is_destroyed: bool
) -> list[list[int]]:
    """Count descriptors and threads after each Trainer, whose group differs from the
    one before.
    """
    found = []
    for number in range(5):
        interface = None if is_destroyed or number % 2 else "lo"
        training.make_trainer(
            DDPExtStrategy(f"file://{directory}/store", interface=interface), max_steps=1
        ).fit(Net())
        if is_destroyed:
            dist.destroy_process_group()
        gc.collect()
        found.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
    return found


@pytest.mark.parametrize("is_destroyed", [True, False])
def test_groups_formed_one_after_another_free_their_sockets_and_threads(
    is_destroyed: bool, tmp_path: Path
) -> None:
    """A script may destroy the group after each fit, or alternate between network
    interfaces.
    """
    for found in ranks.run_ranks(resources_of_trainers, 2, tmp_path, is_destroyed=is_destroyed):
        # A thread that looks for deadlocks may be reading at that moment; a leak adds
        # some for each group.
        assert all(last <= first + 1 for first, last in zip(found[1], found[4], strict=True)), found


def objects_of_run(directory: Path, end: Callable[[], object]) -> dict[str, weakref.ref[Any]]:
    """Return references to what a run used, which ends in its second step as ``end``
    does.
    """
    strategy = training.make_strategy(
        "ours", directory, checkpoint_io=RankZeroCheckpointIO(background=True)
    )
    callbacks = [training.At("on_train_batch_start", lambda _: end(), earlier=1), HangWatchdog(600)]
    options = {"enable_checkpointing": True, "default_root_dir": directory}
    trainer = training.make_trainer(strategy, callbacks=callbacks, **options)
    model = Net()
    with suppress(supervision.BoomError, SystemExit):
        trainer.fit(model)
    used = {
        "Trainer": trainer,
        "strategy": strategy,
        "module": model,
        "optimiser": trainer.optimizers[0],
        "loader": trainer.train_dataloader,
        "validation loader": trainer.val_dataloaders,
    }
    return {name: weakref.ref(each) for name, each in used.items() if each is not None}


def left_after_run(
    rank: int, world_size: int, directory: Path, end: Callable[[], object]
) -> list[str]:
    used = objects_of_run(directory, end)
    assert {"Trainer", "strategy", "module", "optimiser", "loader"} <= set(used)
    gc.collect()
    return [name for name, reference in used.items() if reference() is not None]


@pytest.mark.parametrize(
    "end", [int, supervision.boom, stop], ids=["finished", "failed", "stopped"]
)
def test_a_run_that_ended_holds_no_memory(end: Callable[[], object], tmp_path: Path) -> None:
    """What a run used is freed with the script's last reference to it, before the next
    run.
    """
    assert ranks.run_ranks(left_after_run, 2, tmp_path, end) == [[], []]


def fit_then_fit(rank: int, world_size: int, directory: Path) -> list[str]:
    training.fit("ours", directory, Net())
    ours = training.make_strategy("ours", directory)
    further = [
        training.make_trainer(ours, devices=3),
        training.make_trainer(training.make_strategy("ours", Path("/elsewhere"))),
    ]
    return [refusal(trainer) for trainer in further]


def test_other_ranks_or_another_init_method_are_refused(tmp_path: Path) -> None:
    """A Trainer whose world differs from that of its process raises on every rank."""
    # Without RANK the contradiction only shows when the second Trainer starts.
    found = ranks.run_ranks(fit_then_fit, 2, tmp_path, env={"LOCAL_RANK": str})
    for rank, (devices, place) in enumerate(found):
        wants = (
            f"this process is already rank {rank} of 2, but this Trainer needs it to be rank {rank}"
            " of 3; use"
        )
        assert devices.startswith(wants)
        assert (
            place
            == f"this process's group was formed with init_method 'file://{tmp_path}/store', but"
            " this Trainer requests 'file:///elsewhere/store'; use the same init_method for"
            " every Trainer of a script"
        )


def ours_between_stock(rank: int, world_size: int, directory: Path) -> list[Any]:
    L.seed_everything(1)
    model = Net()
    with training.stock_group(rank, world_size, directory):
        for name in ("ddp", "ddp_ext", "ddp"):
            training.make_trainer(name).fit(model)
        refused = refusal(training.make_trainer(training.make_strategy("ours", directory)))
        dist.barrier()  # the group that it leaves alone still works
        return [training.weights(model), refused]


def ours_then_stock(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    L.seed_everything(1)
    model = Net()
    for strategy in (training.make_strategy("ours", directory), "ddp", "ddp_ext"):
        training.make_trainer(strategy).fit(model)
    return training.weights(model)


def test_ours_and_stock_take_turns(tmp_path: Path) -> None:
    """Ours works in a group that is already open, with a warning, and stock in ours;
    the numbers are the same.

    An init method of the user's own cannot be followed there, and is refused.
    """
    first = tmp_path / "stock first"
    second = tmp_path / "ours first"
    first.mkdir()
    second.mkdir()
    adopted = ranks.launch_ranks(ours_between_stock, 2, first)
    lent = ranks.run_ranks(ours_then_stock, 2, second)
    for rank, outcome in enumerate(adopted):
        assert outcome.exit_code == 0, outcome
        said = outcome.output.count(
            "using a process group that other code opened: init_timeout and timeout have"
        )
        assert said == (rank == 0), "only one rank logs a line that is the same on all"
        found, refused = outcome.result
        training.assert_same(found, lent[rank])
        assert (
            f"needs rank {rank} of 2 with init_method file://{first}/store; call torch.distributed."
            in refused
        )
        assert refused.endswith("or omit init_method")


TESTS_ALONE = """
    import sys

    import torch.distributed as dist

    import lightning_ddp_ext
    from tests.harness.training import Net, make_trainer

    for _ in range(2):
        model, trainer = Net(), make_trainer("ddp_ext", max_steps=2)
        trainer.fit(model)
        sys.stdout.write(f"rank {trainer.global_rank} of {dist.get_world_size()} trained\\n")
        dist.barrier()
        dist.destroy_process_group()
        if trainer.global_rank == 0:
            alone = make_trainer("ddp_ext", devices=1)
            alone.test(model, verbose=False)
            sys.stdout.write(f"{alone.num_test_batches} tested by {alone.world_size}\\n")
"""


def test_rank_zero_tests_alone_between_fits() -> None:
    """A script may destroy the group and test each sample once, on one device; the next
    fit uses all ranks again.
    """
    done = run_script(TESTS_ALONE)
    assert done.exit_code == 0, done.output
    trained = ["rank 0 of 2 trained"] * 2 + ["rank 1 of 2 trained"] * 2
    assert sorted(re.findall(r"^rank .* trained", done.output, re.MULTILINE)) == trained, (
        done.output
    )
    assert (
        re.findall(r"^\[?.* tested by \d", done.output, re.MULTILINE) == ["[4] tested by 1"] * 2
    ), done.output


def measure(trainer: L.Trainer) -> None:
    """Report what a rank sees of its group by the metrics that the launching process
    gets.
    """
    names = [thread.name for thread in threading.enumerate()]
    trainer.lightning_module.log("ranks", float(dist.get_world_size()))
    trainer.lightning_module.log("timeout", timeout_of_collectives())
    trainer.lightning_module.log("channel", float("ddpx-channel" in names))


def fit_in_turn(rank: int, world_size: int, worlds: list[tuple[Any, int]]) -> list[list[float]]:
    """Fit and validate with each start method and number of devices; what each Trainer
    has seen.
    """
    found = []
    for number, (start_method, devices) in enumerate(worlds):
        model = Net()
        strategy = DDPExtStrategy(start_method=start_method, timeout=60 + number)
        trainer = training.make_trainer(
            strategy,
            devices=devices,
            max_epochs=1,
            callbacks=[training.At("on_train_epoch_end", measure)],
        )
        trainer.fit(model)
        found.append(
            [trainer.callback_metrics[name].item() for name in ("ranks", "timeout", "channel")]
        )
        assert sorted(trainer.validate(model, verbose=False)[0]) == ["val_loss"]
    return found


def test_worlds_of_other_sizes_in_turn() -> None:
    """The order is free, without a launcher and without an address; a single rank has
    no connections.
    """
    worlds = [("popen", 1), ("fork", 2), ("popen", 1), ("fork", 3), ("fork", 1)]
    # A forked process cannot use OpenMP threads that its parent has started.
    env = {"OMP_NUM_THREADS": "1"}
    expected = [[devices, 60 + number, devices > 1] for number, (_, devices) in enumerate(worlds)]
    assert ranks.run_ranks(fit_in_turn, 1, worlds, env=env) == [expected]
