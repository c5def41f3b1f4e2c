"""Several Trainers one after another in one process: each gets its settings, or an
error with the reason.
"""

import re
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext import ConfigurationError, DDPExtStrategy
from tests.harness import ranks, training
from tests.harness.environment import free_port
from tests.harness.scripts import run_script

# The options of the strategies of Trainers in turn (None: a strategy by name), and the
# timeout in seconds and the number of the group that each gets.
IN_TURN: list[tuple[dict[str, Any] | None, float, int]] = [
    (None, 1800, 0),
    ({"timeout": timedelta(seconds=600)}, 600, 0),
    ({"timeout": 77.5}, 77.5, 0),
    (None, 1800, 0),
    ({"process_group_backend": "cpu:gloo"}, 1800, 1),
]


def groups_of_trainers(rank: int, world_size: int, directory: Path) -> list[tuple[float, int]]:
    """Fit in turn, and return the timeout and the number of each Trainer's group."""
    formed: list[Any] = []
    groups = []
    for options, _, _ in IN_TURN:
        ours = None if options is None else training.make_strategy("ours", directory, **options)
        training.make_trainer(ours or "ddp_ext").fit(training.Net())
        group: Any = dist.group.WORLD
        if group not in formed:
            formed.append(group)
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        groups.append((timeout.total_seconds(), formed.index(group)))
    return groups


def test_a_further_trainer_gets_its_own_timeout_in_the_same_group(tmp_path: Path) -> None:
    """It may leave the init method out; another backend means a new group."""
    env = {**ranks.by_hand_env(2), "DDPX_INIT_METHOD": f"file://{tmp_path}/store"}
    expected = [(timeout, number) for _, timeout, number in IN_TURN]
    assert ranks.run_ranks(groups_of_trainers, 2, tmp_path, env=env) == [expected] * 2


def refusal(trainer: L.Trainer) -> str:
    return str(training.raised(ConfigurationError, trainer.fit, training.Net()))


def fit_then_fit(rank: int, world_size: int, directory: Path) -> tuple[str, str]:
    """Return the errors of Trainers with another device and with another init method."""
    training.fit("ours", directory, training.Net())
    same_place = training.make_strategy("ours", directory)
    elsewhere = training.make_strategy("ours", directory / "elsewhere")
    return (
        refusal(training.make_trainer(same_place, devices=3)),
        refusal(training.make_trainer(elsewhere)),
    )


def test_other_ranks_or_another_init_method_are_refused(tmp_path: Path) -> None:
    """A Trainer whose world differs from that of its process raises on every rank."""
    # Without RANK the contradiction only shows when the second Trainer starts.
    by_rank = ranks.run_ranks(fit_then_fit, 2, tmp_path, env={"LOCAL_RANK": str})
    for rank, (more_devices, elsewhere) in enumerate(by_rank):
        assert more_devices.startswith(
            f"this process is already rank {rank} of 2, but this Trainer needs it to be rank {rank}"
            " of 3; use"
        )
        assert elsewhere == (
            f"this process's group was formed with init_method 'file://{tmp_path}/store', but"
            f" this Trainer requests 'file://{tmp_path}/elsewhere/store'; use the same init_method"
            " for every Trainer of a script"
        )


OTHER_CODES_GROUP = "using a process group that other code opened: init_timeout and timeout have"


def train_in_turn(
    rank: int, world_size: int, directory: Path, in_stocks_group: bool, names: list[str]
) -> dict[str, Any]:
    """Train a model with one strategy after another; return its weights."""
    L.seed_everything(1)
    model = training.Net()
    group = training.stock_group(rank, world_size, directory) if in_stocks_group else nullcontext()
    with group:
        for name in names:
            training.make_trainer(name).fit(model)
    return training.weights(model)


def test_ours_and_stock_take_turns(tmp_path: Path) -> None:
    """Ours works in a group that is already open, with a warning, and stock in ours; the
    numbers are the same.
    """
    stock_first = ranks.launch_ranks(
        train_in_turn, 2, tmp_path, in_stocks_group=True, names=["ddp", "ddp_ext", "ddp"]
    )
    ranks.output_of_all(stock_first)
    env = {**ranks.by_hand_env(2), "DDPX_INIT_METHOD": f"file://{tmp_path}/ours"}
    ours_first = ranks.run_ranks(
        train_in_turn,
        2,
        tmp_path,
        in_stocks_group=False,
        names=["ddp_ext", "ddp", "ddp_ext"],
        env=env,
    )
    training.assert_same([outcome.result for outcome in stock_first], ours_first)
    assert [outcome.output.count(OTHER_CODES_GROUP) for outcome in stock_first] == [1, 0]


def train_again_at_our_address(rank: int, world_size: int) -> int:
    """Train, and then in a group that the script opens by the variables that ours used."""
    trainer = training.make_trainer("ddp_ext")
    trainer.fit(training.Net())
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        assert trainer.log_dir  # without a group, no rank needs the others
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    training.make_trainer("ddp_ext").fit(training.Net())
    ranks_there = torch.ones(())
    dist.all_reduce(ranks_there)
    dist.destroy_process_group()
    return int(ranks_there)


def test_a_script_may_open_a_group_at_the_address_of_ours() -> None:
    """After a run, rank 0 no longer listens there.

    Rank 0 logs a warning, because settings of ours do not apply in the new group.
    """
    outcomes = ranks.launch_ranks(
        train_again_at_our_address, 2, env=ranks.by_hand_env(2, free_port())
    )
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


@pytest.mark.nightly
def test_rank_zero_tests_alone_between_fits(tmp_path: Path) -> None:
    """A script may destroy the group and test each sample once, on one device; the next
    fit uses all ranks again, also if it leaves out the init method.
    """
    output = run_script(TESTS_ALONE, str(tmp_path / "rank0"))
    lines = re.findall(r"^(rank . of . trained|.* tested by .)$", output, re.MULTILINE)
    once = ["[4] tested by 1", "rank 0 of 2 trained", "rank 1 of 2 trained"]
    assert sorted(lines) == sorted(once * 2), output


def save_where_ranks_were_started(
    rank: int, world_size: int, directory: Path, strategy: str
) -> set[str]:
    """Save a model that other processes have trained; return the keys of the file."""
    model = training.Net()
    trainer = training.make_trainer(strategy, default_root_dir=directory)
    trainer.fit(model)
    trainer.save_checkpoint(directory / "it.ckpt")
    return set(torch.load(directory / "it.ckpt"))


def test_a_process_that_has_started_ranks_saves_as_with_stock(tmp_path: Path) -> None:
    """A notebook saves the model after `fit`; the file says nothing of the ranks' data."""
    ours, stock = (
        ranks.run_ranks(save_where_ranks_were_started, 1, tmp_path, strategy, env={})
        for strategy in ("ddp_ext_fork", "ddp_fork")
    )
    assert ours == stock


def log_ranks(trainer: L.Trainer) -> None:
    """Log the number of ranks; the launching process gets the metrics."""
    trainer.lightning_module.log("ranks", float(dist.get_world_size()))


def fit_in_turn(rank: int, world_size: int) -> list[float]:
    """Fit and validate with other start methods and numbers of devices in turn; return
    the numbers of ranks.
    """
    seen = []
    for start_method, devices in (
        ("popen", 1),
        ("fork", 2),
        ("popen", 1),
        ("fork", 3),
        ("fork", 1),
    ):
        strategy = DDPExtStrategy(start_method=start_method)
        look = training.At("on_train_epoch_end", log_ranks)
        trainer = training.make_trainer(strategy, devices=devices, max_epochs=1, callbacks=[look])
        model = training.Net()
        trainer.fit(model)
        seen.append(trainer.callback_metrics["ranks"].item())
        assert trainer.validate(model, verbose=False)[0].keys() == {"val_loss"}
    return seen


def test_trainers_in_turn_start_their_own_number_of_ranks() -> None:
    """Start methods and numbers of devices may follow each other in any order, without a
    launcher and without an address.
    """
    # A forked process cannot use OpenMP threads that its parent has started.
    assert ranks.run_ranks(fit_in_turn, 1, env={"OMP_NUM_THREADS": "1"}) == [[1, 2, 1, 3, 1]]
