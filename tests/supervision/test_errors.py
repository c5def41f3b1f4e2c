"""An exception or a death on one rank, on real Trainers: every other rank gets the
cause, and none waits for it.
"""

import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from lightning_ddp_ext.ranks import RemoteTraceback
from tests.harness.ranks import (
    Outcome,
    RankProcesses,
    announce,
    hold,
    launch_ranks,
    rank_name,
    run_ranks,
)
from tests.harness.training import At, Net, make_strategy
from tests.supervision import model

BOOM = "BoomError: no such layer"
STEPS_OF_EPOCH = 4  # of ``Net``, on two ranks
STUCK = (
    r"process raised an exception and has not exited within 0\.3 s \(save_deadline\), so rank \d"
    r" exits at \S+:\d+"
)


def assert_names_culprit(survivor: Outcome, culprit: int, pid: int) -> None:
    """Assert that the rank's error names the culprit, with the culprit's traceback."""
    error = model.error_of(survivor, RankFailedError, culprit, pid)
    assert str(error) == f"{rank_name(culprit, pid)} failed, so this rank stops: {BOOM}"
    assert error.traceback_text.startswith("Traceback (most recent call last):\n")
    assert "in boom\n" in error.traceback_text
    assert error.traceback_text.rstrip().endswith(BOOM)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert error.traceback_text in str(error.__cause__)


def catch_and_stay(rank: int, world_size: int, directory: Path, fault: At) -> None:
    """Train; a rank that fails saves, and continues to run."""
    strategy = make_strategy("ours", directory)
    saver = OnExceptionCheckpoint(directory)
    trainer = model.make_trainer(world_size, strategy, fault, saver, enable_checkpointing=True)
    try:
        trainer.fit(Net())
    except model.BoomError:
        hold("caught")


@pytest.mark.parametrize(
    ("fault", "culprit", "steps"),
    [
        pytest.param(At("setup", model.boom, ranks=[0]), 0, 0, id="before training"),
        pytest.param(model.in_step(model.boom, 0), 0, 1, id="in a step"),
        pytest.param(
            At("on_validation_batch_start", model.boom, ranks=[1]),
            1,
            STEPS_OF_EPOCH,
            id="in the validation after an epoch",
        ),
    ],
)
def test_others_raise_while_the_failed_rank_continues(
    fault: At, culprit: int, steps: int, tmp_path: Path
) -> None:
    """The other rank exits and names the cause while the failed one keeps running.

    Rank 0 can still save.
    """
    with RankProcesses(catch_and_stay, 2, tmp_path, fault) as ranks:
        ranks.wait_for("caught", culprit)
        (survivor,) = ranks.wait(1 - culprit)
        ranks.release(culprit)
        (failed,) = ranks.wait(culprit)
    assert_names_culprit(survivor, culprit, failed.pid)
    assert failed.exit_code == 0, failed.story()
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["state_dict"].keys() == Net().state_dict().keys()
    assert saved["global_step"] == steps


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (model.boom, "RankFailedError: {} failed, so this rank stops: BoomError: no such layer"),
        (model.die, "RankDiedError: {} died: its process ended unexpectedly; every rank stops."),
    ],
)
def test_a_rank_that_nothing_can_wake_exits(
    end: Callable[..., None], sentence: str, tmp_path: Path
) -> None:
    """A process whose main thread blocks for ever exits and prints the reason."""
    faults = model.in_step(end, 0), model.in_step(model.wait_for_ever, 1)
    culprit, ended = launch_ranks(
        model.fit, 2, tmp_path, *faults, grace={"failed": 0.1, "died": 0.3}, save_deadline=1
    )
    assert f"[rank 1] {sentence.format(rank_name(0, culprit.pid))}" in ended.output
    assert ended.exit_code == 1


def leave_a_thread(*_: object) -> None:
    threading.Thread(target=model.wait_for_ever).start()
    model.boom()


@pytest.mark.parametrize(
    ("faults", "stuck"),
    [
        pytest.param(
            [At("on_exception", model.wait_for_ever)], [0, 1], id="in a hook of both ranks"
        ),
        pytest.param([], [0], id="at the end, in a thread of rank 0"),
    ],
)
def test_a_rank_that_raised_exits_within_the_save_deadline(
    faults: list[At], stuck: list[int], tmp_path: Path
) -> None:
    """A rank exits even if hooks, or threads of its script, block.

    The message has the line where they do.
    """
    outcomes = launch_ranks(
        model.fit, 2, tmp_path, model.in_step(leave_a_thread, 0), *faults, save_deadline=0.3
    )
    for outcome in outcomes:
        assert outcome.exit_code == 1, outcome.story()
    for rank in stuck:
        assert re.search(STUCK, outcomes[rank].output), outcomes[rank].story()


def exit_with_text(*_: object) -> None:
    sys.exit("the config is empty")


class Unprintable(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.unpicklable = threading.Lock()

    def __str__(self) -> str:
        raise TypeError("no text")


def raise_unprintable(*_: object) -> None:
    raise Unprintable


def raise_megabytes(*_: object) -> None:
    raise model.BoomError("no such layer" + 4_000_000 * "!")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (exit_with_text, "SystemExit: the config is empty"),
        (model.interrupt, "KeyboardInterrupt"),
        (raise_unprintable, "Unprintable: <its __str__ fails>"),
        (raise_megabytes, "BoomError: no such layer!!!"),
    ],
)
def test_unusual_exceptions_reach_the_other_ranks(
    action: Callable[..., None], reason: str, tmp_path: Path
) -> None:
    """``sys.exit``, Ctrl-C, and exceptions without a text or with megabytes of it are
    reported like any other.
    """
    survivor, culprit = launch_ranks(model.fit, 2, tmp_path, model.in_step(action, 1))
    assert survivor.failure.type_name == "RankFailedError", survivor.story()
    assert f"failed, so this rank stops: {reason}" in survivor.failure.message
    assert len(survivor.failure.message) < 10_000
    assert survivor.exit_code == 1
    assert culprit.exit_code == 1


def fit_twice(
    rank: int, world_size: int, directory: Path, end: Callable[..., None], culprit: int
) -> None:
    trainer = model.make_trainer(world_size, make_strategy("ours", directory))
    trainer.fit(Net())
    if rank == culprit:
        end()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net())


@pytest.mark.parametrize(
    ("end", "culprit", "status", "sentence"),
    [
        (
            model.boom,
            0,
            1,
            "RankFailedError: {} failed, so this rank stops: BoomError: no such layer",
        ),
        (sys.exit, 1, 0, "RankFailedError: {} finished and exited, but this rank still needs it"),
    ],
)
def test_a_rank_that_ends_between_two_fits_is_named(
    end: Callable[..., None], culprit: int, status: int, sentence: str, tmp_path: Path
) -> None:
    """Ranks that wait in the second fit raise.

    The other rank raised outside of Trainer calls, or exited early.
    """
    outcomes = launch_ranks(fit_twice, 2, tmp_path, end, culprit)
    ended = outcomes[culprit]
    survivor = outcomes[1 - culprit]
    error = f"{survivor.failure.type_name}: {survivor.failure.message}"
    assert error.startswith(sentence.format(rank_name(culprit, ended.pid)))
    assert ended.exit_code == status
    assert survivor.exit_code == 1


def wait_for_forced_exit() -> None:
    """Wait until the time has passed after which a blocked rank is forced to exit."""
    while countdowns := [each for each in threading.enumerate() if each.name == "ddpx-exit"]:
        # The list also has a thread whose ``start`` is running, which cannot be joined yet.
        with suppress(RuntimeError):
            countdowns[0].join()


def fit_work_and_fit(rank: int, world_size: int, directory: Path) -> None:
    """Train, work until another rank has died, and train again."""
    model.fit(rank, world_size, directory, grace={"died": 0.3})
    hold("after fit")
    model.wait_for_another_ranks_end()
    wait_for_forced_exit()
    announce("still there")
    model.fit(rank, world_size, directory)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_death_after_fit_is_raised_by_the_next_fit(culprit: int, tmp_path: Path) -> None:
    """A rank in the user's own code continues after another rank's death.

    It raises immediately when it needs the dead rank again.
    """
    with RankProcesses(fit_work_and_fit, 2, tmp_path) as ranks:
        for rank in range(2):
            ranks.wait_for("after fit", rank)
        ranks.kill(culprit)
        ranks.release(1 - culprit)
        ranks.wait_for("still there", 1 - culprit)
        outcomes = ranks.wait()
    pid = outcomes[culprit].pid
    error = model.error_of(outcomes[1 - culprit], RankDiedError, culprit, pid)
    assert str(error).startswith(
        f"{rank_name(culprit, pid)} died: its process ended unexpectedly; every rank stops."
    )


def fit_again(rank: int, world_size: int, directory: Path) -> tuple[list[str], list[float]]:
    """Fit three times; the first two fits fail, on rank 1 and on rank 0.

    Return the caught errors with the rank that failed, and weights of the third fit.
    """
    caught = []
    for culprit in (1, 0):
        try:
            model.fit(rank, world_size, directory, model.in_step(model.boom, culprit))
        except (model.BoomError, RankFailedError) as error:
            caught.append(f"{type(error).__name__} {getattr(error, 'rank', rank)}")
    net = Net()
    model.fit(rank, world_size, directory, net=net)
    return caught, net.layers[0].weight.tolist()


def test_processes_that_have_caught_the_failure_train_again(tmp_path: Path) -> None:
    """The same processes connect again after failures that every rank caught."""
    errors_by_rank, weights_by_rank = zip(*run_ranks(fit_again, 3, tmp_path), strict=True)
    assert errors_by_rank[0] == ["RankFailedError 1", "BoomError 0"]
    assert errors_by_rank[1] == ["BoomError 1", "RankFailedError 0"]
    assert errors_by_rank[2] == ["RankFailedError 1", "RankFailedError 0"]
    assert weights_by_rank[0] == weights_by_rank[1] == weights_by_rank[2]
