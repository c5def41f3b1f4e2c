"""Several Trainers one after another in one process: each gets its settings, or an
error with the reason.
"""

import os
import re
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import ConfigurationError
from tests.harness import ranks, training
from tests.harness.environment import environment_of, free_port
from tests.harness.scripts import run_script
from tests.harness.training import Net
from tests.supervision import model as supervision

HOOKS = ("setup", "on_train_batch_start", "on_train_batch_end", "on_validation_epoch_end")


def continue_after_each(kind: training.Kind, directory: Path) -> int:
    """Catch an exception that all ranks raise in each hook; return the steps of the next
    fit.
    """
    for hook in HOOKS:
        with pytest.raises(supervision.BoomError):
            training.fit(kind, directory, Net(), training.At(hook, supervision.boom))
    return training.fit(kind, directory, Net()).global_step


def test_ranks_that_catch_an_exception_of_all_train_again(tmp_path: Path) -> None:
    """As with stock, after a pruned trial each rank has its own exception, and the next
    Trainer works.
    """
    ours, stock = training.on_both(continue_after_each, tmp_path)
    assert ours == stock


class Group(NamedTuple):
    """The process group of a Trainer."""

    timeout: float  # of collectives, in seconds
    number: int  # by the order in which groups are formed


@dataclass(frozen=True)
class InTurn:
    """A Trainer in one process with others.

    Attributes:
        expected: the group that it gets.
        options: of its strategy; None for a strategy by name.
        after_destroy: whether the script destroys the group before.
    """

    expected: Group
    options: dict[str, Any] | None = None
    after_destroy: bool = False


TRAINERS = [
    InTurn(Group(1800, 0)),
    InTurn(Group(600, 0), {"timeout": timedelta(seconds=600)}),
    InTurn(Group(77.5, 0), {"timeout": 77.5}),
    InTurn(Group(1800, 0), {"timeout": None}),
    InTurn(Group(1800, 0)),
    InTurn(Group(1800, 1), {"process_group_backend": "cpu:gloo"}),
    InTurn(Group(1800, 2), after_destroy=True),
]


def timeout_of_collectives() -> float:
    group = dist.distributed_c10d._get_default_group()
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds()


def groups_of_trainers(rank: int, world_size: int, directory: Path) -> list[Group]:
    """Fit in turn, and return the group of each Trainer."""
    formed: list[Any] = []
    groups = []
    for trainer in TRAINERS:
        if trainer.after_destroy:
            dist.barrier()
            dist.destroy_process_group()
        strategy: Any = "ddp_ext"
        if trainer.options is not None:
            strategy = training.make_strategy("ours", directory, **trainer.options)
        training.make_trainer(strategy).fit(Net())
        if dist.group.WORLD not in formed:
            formed.append(dist.group.WORLD)
        groups.append(Group(timeout_of_collectives(), formed.index(dist.group.WORLD)))
    return groups


def test_a_further_trainer_gets_its_own_timeout_in_the_same_group(tmp_path: Path) -> None:
    """It may leave the init method out; another backend, or a group that was destroyed,
    means a new group.
    """
    env = {**ranks.by_hand_env(2), "DDPX_INIT_METHOD": f"file://{tmp_path}/store"}
    expected = [trainer.expected for trainer in TRAINERS]
    assert ranks.run_ranks(groups_of_trainers, 2, tmp_path, env=env) == [expected] * 2


def refusal(trainer: L.Trainer) -> str:
    with pytest.raises(ConfigurationError) as refused:
        trainer.fit(Net())
    return str(refused.value)


class Refused(NamedTuple):
    """The errors of Trainers with another device and with another init method."""

    more_devices: str
    elsewhere: str


def fit_then_fit(rank: int, world_size: int, directory: Path) -> Refused:
    training.fit("ours", directory, Net())
    same_place = training.make_strategy("ours", directory)
    elsewhere = training.make_strategy("ours", Path("/elsewhere"))
    return Refused(
        refusal(training.make_trainer(same_place, devices=3)),
        refusal(training.make_trainer(elsewhere)),
    )


def test_other_ranks_or_another_init_method_are_refused(tmp_path: Path) -> None:
    """A Trainer whose world differs from that of its process raises on every rank."""
    # Without RANK the contradiction only shows when the second Trainer starts.
    by_rank = ranks.run_ranks(fit_then_fit, 2, tmp_path, env={"LOCAL_RANK": str})
    for rank, refused in enumerate(by_rank):
        assert refused.more_devices.startswith(
            f"this process is already rank {rank} of 2, but this Trainer needs it to be rank {rank}"
            " of 3; use"
        )
        assert refused.elsewhere == (
            f"this process's group was formed with init_method 'file://{tmp_path}/store', but"
            " this Trainer requests 'file:///elsewhere/store'; use the same init_method for"
            " every Trainer of a script"
        )


OTHER_CODES_GROUP = "using a process group that other code opened: init_timeout and timeout have"


def train_in_stocks_group(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    L.seed_everything(1)
    model = Net()
    with training.stock_group(rank, world_size, directory):
        for name in ("ddp", "ddp_ext", "ddp"):
            training.make_trainer(name).fit(model)
    return training.weights(model)


def train_in_our_group(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    L.seed_everything(1)
    model = Net()
    for strategy in (training.make_strategy("ours", directory), "ddp", "ddp_ext"):
        training.make_trainer(strategy).fit(model)
    return training.weights(model)


def test_ours_and_stock_take_turns(tmp_path: Path) -> None:
    """Ours works in a group that is already open, with a warning, and stock in ours; the
    numbers are the same.
    """
    for name in ("stock first", "ours first"):
        (tmp_path / name).mkdir()
    stock_first = ranks.launch_ranks(train_in_stocks_group, 2, tmp_path / "stock first")
    ranks.output_of_all(stock_first)
    ours_first = ranks.run_ranks(train_in_our_group, 2, tmp_path / "ours first")
    training.assert_same([outcome.result for outcome in stock_first], ours_first)
    assert [outcome.output.count(OTHER_CODES_GROUP) for outcome in stock_first] == [1, 0]


def train_alone_and_then_together(rank: int, world_size: int, directory: Path) -> float:
    """Train on one device, and then in a group of ranks that this script opens."""
    training.make_trainer("ddp_ext", devices=1).fit(Net())
    dist.destroy_process_group()
    os.environ.update(environment_of(rank, ranks.by_hand_env(world_size)))
    with training.stock_group(rank, world_size, directory):
        group = dist.group.WORLD
        trainer = training.make_trainer("ddp_ext")
        trainer.fit(Net())
        assert dist.group.WORLD is group
        return float(trainer.strategy.reduce(torch.tensor(1.0), reduce_op="sum"))


def test_a_group_that_is_opened_after_a_run_on_one_device_is_used(tmp_path: Path) -> None:
    """The earlier Trainer's own group, which the script destroyed, does not matter."""
    assert ranks.run_ranks(train_alone_and_then_together, 2, tmp_path, env={}) == [2.0, 2.0]


def train_again_at_our_address(rank: int, world_size: int) -> int:
    """Train, and then in a group that the script opens by the variables that ours used."""
    trainer = training.make_trainer("ddp_ext")
    trainer.fit(Net())
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        assert trainer.log_dir  # without a group, no rank needs the others
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    training.make_trainer("ddp_ext").fit(Net())
    ranks_there = torch.ones(())
    dist.all_reduce(ranks_there)
    dist.destroy_process_group()
    return int(ranks_there)


def test_a_script_may_open_a_group_at_the_address_of_ours() -> None:
    """After a run, rank 0 no longer listens there.

    Rank 0 logs a warning, because settings of ours do not apply in the new group.
    """
    env = ranks.by_hand_env(2, free_port())
    outcomes = ranks.launch_ranks(train_again_at_our_address, 2, env=env)
    ranks.output_of_all(outcomes)
    assert [outcome.result for outcome in outcomes] == [2, 2]
    assert [outcome.output.count(OTHER_CODES_GROUP) for outcome in outcomes] == [1, 0]


def choose_init_method(kind: training.Kind, directory: Path) -> str:
    refused = refusal(training.make_trainer(training.make_strategy("ours", directory)))
    dist.barrier()  # the group, which is not ours, still works
    return refused


def test_an_init_method_is_refused_in_a_group_that_is_already_open(tmp_path: Path) -> None:
    """The group has its own address; the error names two remedies."""
    for rank, refused in enumerate(training.on_ranks("stock", choose_init_method, tmp_path)):
        assert (
            f"needs rank {rank} of 2 with init_method file://{tmp_path}/stock/store; call"
            " torch.distributed." in refused
        )
        assert refused.endswith("or omit init_method")


TESTS_ALONE = """
    import os
    import sys

    import torch.distributed as dist

    import lightning_ddp_ext
    from tests.harness.training import At, Net, make_trainer


    def show_world_size(trainer):
        sys.stdout.write(f"{trainer.num_test_batches} tested by {os.environ['WORLD_SIZE']}\\n")


    for method in (f"file://{sys.argv[1]}", None):  # the next fit connects there again
        strategy = lightning_ddp_ext.DDPExtStrategy(method, init_timeout=30)
        model, trainer = Net(), make_trainer(strategy, max_steps=2)
        trainer.fit(model)
        sys.stdout.write(f"rank {trainer.global_rank} of {dist.get_world_size()} trained\\n")
        dist.barrier()
        dist.destroy_process_group()
        if trainer.global_rank == 0:
            show = At("on_test_start", show_world_size)
            make_trainer("ddp_ext", devices=1, callbacks=[show]).test(model, verbose=False)
"""


def test_rank_zero_tests_alone_between_fits(tmp_path: Path) -> None:
    """A script may destroy the group and test each sample once, on one device; the next
    fit uses all ranks again, also if it leaves out the init method.
    """
    done = run_script(TESTS_ALONE, str(tmp_path / "rank0"))
    assert done.exit_code == 0, done.output
    lines = re.findall(r"^(rank . of . trained|.* tested by .)$", done.output, re.MULTILINE)
    once = ["[4] tested by 1", "rank 0 of 2 trained", "rank 1 of 2 trained"]
    assert sorted(lines) == sorted(once * 2), done.output


def save_where_ranks_were_started(
    rank: int, world_size: int, directory: Path, strategy: str
) -> list[set[str]]:
    """Save a model that other processes have trained, also after another Trainer used it."""
    model = Net()
    trainer = training.make_trainer(strategy, default_root_dir=directory)
    trainer.fit(model)
    trainer.save_checkpoint(directory / "first.ckpt")
    training.make_trainer("auto", devices=1).fit(model)
    trainer.save_checkpoint(directory / "second.ckpt")
    return [set(torch.load(directory / name)) for name in ("first.ckpt", "second.ckpt")]


def test_a_process_that_has_started_ranks_saves_as_with_stock(tmp_path: Path) -> None:
    """A notebook saves the model after `fit`; the file says nothing of the ranks' data."""
    ours, stock = (
        ranks.run_ranks(save_where_ranks_were_started, 1, tmp_path, strategy, env={})
        for strategy in ("ddp_ext_fork", "ddp_fork")
    )
    assert ours == stock


class Turn(NamedTuple):
    """A Trainer's start method and number of devices."""

    start_method: str
    devices: int


class Seen(NamedTuple):
    """What rank 0 sees of its group within a fit."""

    ranks: float
    timeout: float
    has_channel: float


def log_group(trainer: L.Trainer) -> None:
    """Log what a rank sees of its group; the launching process gets the metrics."""
    threads = [thread.name for thread in threading.enumerate()]
    seen = Seen(dist.get_world_size(), timeout_of_collectives(), "ddpx-channel" in threads)
    for name, value in seen._asdict().items():
        trainer.lightning_module.log(name, float(value))


def fit_in_turn(rank: int, world_size: int, turns: list[Turn]) -> list[Seen]:
    """Fit and validate in each turn, with a timeout of one more second."""
    seen = []
    for number, turn in enumerate(turns):
        strategy = DDPExtStrategy(start_method=turn.start_method, timeout=60 + number)
        look = training.At("on_train_epoch_end", log_group)
        trainer = training.make_trainer(
            strategy, devices=turn.devices, max_epochs=1, callbacks=[look]
        )
        model = Net()
        trainer.fit(model)
        seen.append(Seen(*(trainer.callback_metrics[name].item() for name in Seen._fields)))
        assert trainer.validate(model, verbose=False)[0].keys() == {"val_loss"}
    return seen


def test_worlds_of_other_sizes_in_turn() -> None:
    """The order is free, without a launcher and without an address; a single rank has
    no connections.
    """
    turns = [Turn("popen", 1), Turn("fork", 2), Turn("popen", 1), Turn("fork", 3), Turn("fork", 1)]
    # A forked process cannot use OpenMP threads that its parent has started.
    env = {"OMP_NUM_THREADS": "1"}
    expected = [
        Seen(turn.devices, 60 + number, turn.devices > 1) for number, turn in enumerate(turns)
    ]
    assert ranks.run_ranks(fit_in_turn, 1, turns, env=env) == [expected]
