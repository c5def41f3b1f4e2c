"""Several Trainers one after another in one process: each gets what it asks for, or an error that says why not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import by_hand_env, launch_ranks, run_ranks
from tests.harness.training import (
    Kind,
    Net,
    Recorder,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
    stock_group,
    weights,
)

BY_HAND = by_hand_env(2)


def file_strategy(directory: Path, **options: Any) -> Any:
    return make_strategy("ours", directory, **options)


def timeout_of_collectives() -> timedelta:
    group = dist.distributed_c10d._get_default_group()
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return timeout


def train_in_turn(kind: Kind, directory: Path) -> list[Any]:
    """One model by two Trainers, another model by a third; the first Trainer is asked again at the end."""
    L.seed_everything(1)
    recorder, first, second = Recorder(), Net(), Net()
    trainers = [make_trainer(make_strategy(kind, directory), callbacks=[recorder]) for _ in range(3)]
    trainers[0].fit(first)
    trainers[1].fit(first)
    trainers[2].fit(second)
    trainers[1].fit_loop.max_epochs = 3
    trainers[1].fit(first)
    tests = [trainers[0].test(model, verbose=False) for model in (first, second)]
    return [recorder.metrics, tests, weights(first), weights(second)]


def test_trainers_in_turn_give_the_numbers_of_stock(tmp_path: Path) -> None:
    """Ranks and group are used again, and nothing of one Trainer colours the next."""
    ours, stock = on_both(train_in_turn, tmp_path)
    assert_same(ours, stock)


def groups_of_two_trainers(rank: int, world_size: int, directory: Path) -> list[Any]:
    found = []
    for timeout in (timedelta(seconds=600), 77.5, None):
        make_trainer(file_strategy(directory, timeout=timeout)).fit(Net())
        found.append((id(dist.group.WORLD), timeout_of_collectives()))
    make_trainer("ddp_ext").fit(Net())
    return [*found, (id(dist.group.WORLD), timeout_of_collectives())]


def test_a_second_trainer_gets_its_own_timeout_in_the_same_group(tmp_path: Path) -> None:
    """The timeout of collectives is what the Trainer says that runs now; by default half an hour, as Lightning's."""
    for found in run_ranks(groups_of_two_trainers, 2, tmp_path, env=BY_HAND):
        assert [timeout.total_seconds() for _, timeout in found] == [600, 77.5, 1800, 1800]
        assert len({group for group, _ in found}) == 1


def ways_to_say_it(rank: int, world_size: int, directory: Path) -> list[int]:
    groups = []
    for strategy in (file_strategy(directory), "ddp_ext", file_strategy(directory), "ddp_ext"):
        make_trainer(strategy).fit(Net())
        groups.append(id(dist.group.WORLD))
    return groups


def test_a_later_trainer_may_leave_the_init_method_out(tmp_path: Path) -> None:
    """It meets the same ranks; and the method they have met by stays the one that may be named again."""
    for groups in run_ranks(ways_to_say_it, 2, tmp_path, env=BY_HAND):
        assert groups == groups[:1] * 4


def fit_then_fit(rank: int, world_size: int, directory: Path, second: dict[str, Any]) -> None:
    make_trainer(file_strategy(directory)).fit(Net())
    options = dict(second)
    make_trainer(file_strategy(options.pop("directory", directory)), **options).fit(Net())


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"devices": 1}, ("world_size is 2 already, and this Trainer wants 1", "the same devices and num_nodes")),
        ({"devices": 3}, ("world_size is 2 already, and this Trainer wants 3",)),
        ({"num_nodes": 2}, ("world_size is 2 already, and this Trainer wants 4",)),
        (
            {"directory": Path("/tmp/elsewhere")},
            ("was formed with init_method 'file://", "asks for 'file:///tmp/elsewhere/store'", "one init method"),
        ),
    ],
)
def test_other_ranks_or_another_meeting_place_are_refused(
    second: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    """A Trainer that wants another world than the one that its process is in gets none: every rank says why."""
    # Without RANK it is only when the second Trainer starts that anybody knows of a contradiction.
    env = {"LOCAL_RANK": str}
    for outcome in launch_ranks(fit_then_fit, 2, tmp_path, second, env=env):
        assert outcome.error is not None
        assert outcome.error.type_name == "GroupInUseError"
        for word in words:
            assert word in outcome.error.message


def ours_between_stock(rank: int, world_size: int, directory: Path) -> list[Any]:
    from lightning_ddp_ext.rendezvous.process_context import current

    L.seed_everything(1)
    model = Net()
    with stock_group(rank, world_size, directory):
        for name in ("ddp", "ddp_ext", "ddp"):
            make_trainer(name).fit(model)
        return [weights(model), current() is None]


def ours_then_stock(rank: int, world_size: int, directory: Path) -> list[Any]:
    L.seed_everything(1)
    model = Net()
    for strategy in (file_strategy(directory), "ddp", "ddp_ext"):
        make_trainer(strategy).fit(model)
    return [weights(model), dist.get_world_size()]


def test_ours_and_stock_take_turns(tmp_path: Path) -> None:
    """Ours works in a group that is open already, with a warning, and stock in ours; the numbers are the same."""
    for name in ("stock first", "ours first"):
        (tmp_path / name).mkdir()
    adopted = launch_ranks(ours_between_stock, 2, tmp_path / "stock first", env=BY_HAND)
    lent = run_ranks(ours_then_stock, 2, tmp_path / "ours first", env=BY_HAND)
    for rank, outcome in enumerate(adopted):
        assert outcome.exit_code == 0, outcome
        said = outcome.output.count("using the process group that is open already: init_timeout and timeout have")
        assert said == (rank == 0), "a line that is the same on all ranks comes from one"
        assert outcome.result[1], "a group that is not ours must not be closed by us"
        assert_same(outcome.result[0], lent[rank][0])


def ours_in_a_foreign_group(rank: int, world_size: int, directory: Path) -> None:
    with stock_group(rank, world_size, directory):
        try:
            make_trainer(file_strategy(directory)).fit(Net())
        finally:
            dist.barrier()  # the group that it leaves alone still works


def test_an_explicit_init_method_is_refused_in_a_foreign_group(tmp_path: Path) -> None:
    """It cannot be followed any more, and ignoring it would be a lie."""
    for outcome in launch_ranks(ours_in_a_foreign_group, 2, tmp_path, env=BY_HAND):
        assert outcome.error is not None
        assert outcome.error.type_name == "GroupInUseError"
        assert f"file://{tmp_path}/store" in outcome.error.message
        assert "give the Trainer no init_method" in outcome.error.message


def launched_one_after_another(rank: int, world_size: int, directory: Path) -> list[Any]:
    found: list[Any] = []
    for number, devices in enumerate((2, 3)):
        model = Net()
        strategy = make_strategy("ours", directory / str(number), start_method="fork", timeout=60 + number)
        trainer = make_trainer(strategy, devices=devices, callbacks=[Measure()])
        trainer.fit(model)
        found.append({name: float(value) for name, value in trainer.callback_metrics.items() if name in Measure.names})
        again = trainer.validate(model, verbose=False)
        found.append(sorted(again[0]))
    with pytest.raises(NotImplementedError, match="fit\\(\\)` twice on the same Trainer"):
        trainer.fit(model)
    return found


class Measure(L.Callback):
    """Reports what a rank sees of its group by the metrics that the launching process gets."""

    names = ("ranks", "timeout")

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.log("ranks", float(dist.get_world_size()))
        module.log("timeout", timeout_of_collectives().total_seconds())


def test_each_launch_of_processes_has_a_group_of_its_own(tmp_path: Path) -> None:
    """By fork, the second Trainer may differ in everything; the same one validates after `fit`, as with stock."""
    for number in ("0", "1"):
        (tmp_path / number).mkdir()
    found = run_ranks(launched_one_after_another, 1, tmp_path)[0]
    assert found == [
        {"ranks": 2.0, "timeout": 60.0},
        ["val_loss"],
        {"ranks": 3.0, "timeout": 61.0},
        ["val_loss"],
    ]
