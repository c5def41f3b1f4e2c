"""An exception or a death on one rank, on real Trainers: every other rank gets the
cause, and none waits for it.
"""

import re
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from tests.harness.ranks import (
    Outcome,
    RankProcesses,
    announce,
    hold,
    launch_ranks,
    rank_name,
    run_ranks,
)
from tests.harness.training import At, Batch, Net, assert_same, fit, make_strategy, weights
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
    assert "in boom\n" in error.traceback_text
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
    culprit, ended = launch_ranks(model.fit, 2, tmp_path, *faults, grace=0.3, save_deadline=1)
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


def fit_twice(rank: int, world_size: int, directory: Path) -> None:
    trainer = model.make_trainer(world_size, make_strategy("ours", directory))
    trainer.fit(Net())
    if rank == 0:
        model.boom()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net())


def test_a_rank_that_raises_between_two_fits_is_named(tmp_path: Path) -> None:
    """A rank that waits in the second fit raises."""
    failed, survivor = launch_ranks(fit_twice, 2, tmp_path)
    assert failed.exit_code == 1
    assert_names_culprit(survivor, 0, failed.pid)


def wait_for_forced_exit() -> None:
    """Wait until the time has passed after which a blocked rank is forced to exit."""
    while countdowns := [each for each in threading.enumerate() if each.name == "ddpx-exit"]:
        # The list also has a thread whose ``start`` is running, which cannot be joined yet.
        with suppress(RuntimeError):
            countdowns[0].join()


def fit_work_and_fit(rank: int, world_size: int, directory: Path) -> None:
    """Train, work until another rank has died, and train again."""
    model.fit(rank, world_size, directory, grace=0.3)
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


# What rank 1 or rank 0 raises in one fit after another, and how the other rank names it.
FAILURES: list[tuple[Callable[..., None], int, str]] = [
    (exit_with_text, 1, "SystemExit: the config is empty"),
    (model.boom, 0, "BoomError: no such layer"),
    (model.interrupt, 1, "KeyboardInterrupt"),
    (raise_unprintable, 1, "Unprintable: <its __str__ fails>"),
    (raise_megabytes, 1, "BoomError: no such layer!!!"),
]


def fit_again(rank: int, world_size: int, directory: Path) -> dict[str, Tensor]:
    """Fit once with each failure, which every rank catches, and once without; return the
    weights of the last fit.
    """
    for action, culprit, reason in FAILURES:
        expected = BaseException if rank == culprit else RankFailedError
        with pytest.raises(expected) as caught:
            model.fit(rank, world_size, directory, model.in_step(action, culprit))
        if rank != culprit:
            message = str(caught.value)
            assert f"rank {culprit} (host " in message
            assert f"failed, so this rank stops: {reason}" in message
            assert len(message) < 10_000
    net = Net()
    model.fit(rank, world_size, directory, net=net)
    return weights(net)


def test_processes_that_have_caught_a_failure_train_again(tmp_path: Path) -> None:
    """``sys.exit``, Ctrl-C, and exceptions without a text or with megabytes of it are
    reported like any other, and the same processes connect again.
    """
    first, second = run_ranks(fit_again, 2, tmp_path)
    assert_same(first, second)


def keeps_handlers(rank: int, world_size: int, directory: Path) -> bool:
    """Fit once with a failure, in whose hook another one follows, and once without; return
    whether SIGTERM has the same handler as before.
    """
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(model.BoomError):
        model.fit(
            rank, world_size, directory, model.in_step(model.boom), At("on_exception", model.boom)
        )
    model.fit(rank, world_size, directory)
    return signal.getsignal(signal.SIGTERM) == before


def test_the_next_fit_removes_handlers_of_one_without_a_teardown(tmp_path: Path) -> None:
    """Lightning skips the teardown if an ``on_exception`` hook raises."""
    assert run_ranks(keeps_handlers, 2, tmp_path) == [True, True]


def hook_after_reconnecting(rank: int, world_size: int, directory: Path) -> bool:
    """Set a hook between two runs for which the ranks connect; whether it is still set."""
    model.fit(rank, world_size, directory)

    def hook(*_: object) -> None: ...

    sys.excepthook = hook
    dist.destroy_process_group()
    model.fit(rank, world_size, directory)
    return sys.excepthook is hook


def test_a_users_hook_for_exceptions_stays_in_front(tmp_path: Path) -> None:
    """Neither torch's hook nor ours moves in front of it when a group is formed again."""
    assert run_ranks(hook_after_reconnecting, 2, tmp_path) == [True, True]


# An exception is a rank's own, whatever its text, unless another rank broke the collective
# in which it was raised.


class FailsInBackward(Net):
    """The backward pass of rank 1 fails in C++ for its own reason, while rank 0 works."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        if index == 1 and self.global_rank == 0:
            hold("busy")
        loss = self.loss(batch)
        return loss.detach() if index == 1 and self.global_rank == 1 else loss


def fail_in_backward(rank: int, world_size: int, directory: Path) -> None:
    fit("ours", directory, FailsInBackward(), max_epochs=1, limit_val_batches=0)


def test_an_error_while_another_rank_works_is_the_ranks_own(tmp_path: Path) -> None:
    """Its rank raises and prints it while another rank is busy for a long time, and that
    rank names the first one.
    """
    with RankProcesses(fail_in_backward, 2, tmp_path) as ranks:
        ranks.wait_for("busy", 0)
        (failed,) = ranks.wait(1)
        ranks.release(0)
        (survivor,) = ranks.wait(0)
    assert failed.failure.message.startswith("element 0 of tensors does not require grad")
    assert failed.failure.message in failed.output
    model.error_of(survivor, RankFailedError, 1, failed.pid)


def use_socket() -> None:
    raise RuntimeError("gloo: no socket is left, connection reset by peer")


def fail_after_fit(rank: int, world_size: int, directory: Path, work: Callable[[], object]) -> None:
    fit("ours", directory, Net(), max_epochs=1)
    if rank == 0:
        hold("after fit")
        work()


def failure_after_fit(work: Callable[[], object], directory: Path) -> Outcome:
    """Do some work on rank 0 after rank 1 has finished and exited; return rank 0's end."""
    with RankProcesses(fail_after_fit, 2, directory, work) as ranks:
        ranks.wait_for("after fit", 0)
        ranks.wait(1)
        ranks.release(0)
        (failed,) = ranks.wait(0)
    return failed


def test_an_error_after_fit_is_the_ranks_own(tmp_path: Path) -> None:
    """Whatever its text, it is raised and printed, although another rank has exited."""
    failed = failure_after_fit(use_socket, tmp_path)
    assert failed.failure.message.startswith("gloo: no socket is left"), failed.story()
    assert "RuntimeError: gloo: no socket is left" in failed.output


def need_another_rank() -> None:
    dist.all_reduce(torch.ones(1))


def test_a_collective_after_fit_names_the_rank_that_exited(tmp_path: Path) -> None:
    """The script gets the collective's own error; the rank prints it in one line with the
    script's line, and then one that names the rank that has exited.
    """
    failed = failure_after_fit(need_another_rank, tmp_path)
    assert failed.failure.type_name == "RuntimeError", failed.story()
    assert re.search(
        r"this exception probably follows from another rank's failure: RuntimeError: [^\n]*"
        r" \(\S+/test_errors\.py:\d+\)\n(.*\n)*.*RankFailedError: rank 1",
        failed.output,
    ), failed.story()
