"""An exception or a death on one rank, on real Trainers: every other rank gets the cause,
none waits for it, and the same processes can train again.

Functions with the arguments ``rank`` and ``world_size`` run on the ranks.
"""

import re
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from tests.harness.ranks import (
    Outcome,
    RankProcesses,
    announce,
    error_of,
    hold,
    launch_ranks,
    rank_name,
    run_ranks,
    stories,
)
from tests.harness.training import (
    At,
    Batch,
    BoomError,
    Net,
    assert_same,
    boom,
    change_timeouts,
    die,
    fit,
    fit_on,
    in_step,
    learned,
    make_strategy,
    make_trainer,
    raised,
    start_fit,
    wait_for_another_ranks_end,
    wait_for_ever,
)

# One rank raises.


def assert_names_culprit(survivor: Outcome, culprit: int, pid: int) -> None:
    """Assert that the rank's error names the culprit, with the culprit's traceback."""
    error = error_of(survivor, RankFailedError, culprit, pid)
    assert (
        str(error)
        == f"{rank_name(culprit, pid)} failed, so this rank stops: BoomError: no such layer"
    )
    assert "in boom\n" in error.traceback_text
    assert error.traceback_text in str(error.__cause__)


def catch_and_stay(rank: int, world_size: int, directory: Path, fault: At) -> None:
    """Train; a rank that fails saves, and continues to run."""
    try:
        fit(
            "ours",
            directory,
            Net(),
            fault,
            OnExceptionCheckpoint(directory),
            enable_checkpointing=True,
            num_sanity_val_steps=0,
        )
    except BoomError:
        hold("caught")


@pytest.mark.parametrize(
    ("fault", "culprit", "saved_step"),
    [
        pytest.param(At("setup", boom, ranks=[0]), 0, 0, id="before training"),
        pytest.param(
            At("on_validation_batch_start", boom, ranks=[1]),
            1,
            4,  # steps of an epoch of ``Net``, on two ranks
            id="in the validation after an epoch",
        ),
    ],
)
def test_others_raise_while_the_failed_rank_continues(
    fault: At, culprit: int, saved_step: int, tmp_path: Path
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
    assert saved["global_step"] == saved_step


def fit_twice(rank: int, world_size: int, directory: Path) -> None:
    trainer = make_trainer(make_strategy("ours", directory), max_epochs=1)
    trainer.fit(Net())
    if rank == 0:
        boom()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net())


def test_a_rank_that_raises_between_two_fits_is_named(tmp_path: Path) -> None:
    """A rank that waits in the second fit raises."""
    failed, survivor = launch_ranks(fit_twice, 2, tmp_path)
    assert failed.exit_code == 1
    assert_names_culprit(survivor, 0, failed.pid)


# A rank blocks for ever after a failure: it exits all the same.


def fit_with_little_time(rank: int, world_size: int, directory: Path, *faults: At) -> None:
    """Train; the main thread has 0.3 s after another rank's end."""
    strategy = make_strategy("ours", directory, save_deadline=1)
    change_timeouts(strategy, grace=dict.fromkeys(("died", "failed", "absent", "hung"), 0.3))
    make_trainer(strategy, callbacks=[*faults], max_epochs=1).fit(Net())


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (boom, "RankFailedError: {} failed, so this rank stops: BoomError: no such layer"),
        (die, "RankDiedError: {} died: its process ended unexpectedly; every rank stops."),
    ],
)
def test_a_rank_that_nothing_can_wake_exits(
    end: Callable[..., None], sentence: str, tmp_path: Path
) -> None:
    """A process whose main thread blocks for ever exits and prints the reason."""
    faults = in_step(end, 0), in_step(wait_for_ever, 1)
    culprit, ended = launch_ranks(fit_with_little_time, 2, tmp_path, *faults)
    assert f"[rank 1] {sentence.format(rank_name(0, culprit.pid))}" in ended.output
    assert ended.exit_code == 1


def leave_a_thread(*_: object) -> None:
    """Raise, and leave a thread that Python waits for at the end of a script."""
    threading.Thread(target=wait_for_ever).start()
    boom()


FORCED = (
    r"process raised an exception and has not exited within 0\.3 s \(save_deadline\), so rank \d"
    r" exits at \S+:\d+"
)


def assert_forced_to_exit(ranks: list[int], directory: Path, *faults: At) -> None:
    """Train with a short deadline on two ranks; assert that both fail, and that these
    print the deadline and the line where they block.
    """
    outcomes = fit_on(2, directory, Net(), *faults, strategy={"save_deadline": 0.3})
    assert [outcome.exit_code for outcome in outcomes] == [1, 1], stories(outcomes)
    for rank in ranks:
        assert re.search(FORCED, outcomes[rank].output), outcomes[rank].story()


def test_ranks_that_block_in_a_hook_exit_within_the_save_deadline(tmp_path: Path) -> None:
    """A rank that raised, and one that failed with it, print the line of the hook."""
    faults = in_step(leave_a_thread, 0), At("on_exception", wait_for_ever)
    assert_forced_to_exit([0, 1], tmp_path, *faults)


def test_a_rank_whose_thread_blocks_exits_within_the_save_deadline(tmp_path: Path) -> None:
    """After its exception, a script waits for its threads only so long."""
    assert_forced_to_exit([0], tmp_path, in_step(leave_a_thread, 0))


# A rank dies while the others run the user's own code.


def fit_work_and_fit(rank: int, world_size: int, directory: Path) -> None:
    """Train, work until another rank has died, and train again."""
    fit_with_little_time(rank, world_size, directory)
    hold("after fit")
    wait_for_another_ranks_end()
    wait_for_forced_exit()
    announce("still there")
    fit("ours", directory, Net())


def wait_for_forced_exit() -> None:
    """Wait until the time has passed after which a blocked rank is forced to exit.

    Nothing announces that a rank is *not* forced, so this finds the thread that counts down.
    """
    while countdowns := [each for each in threading.enumerate() if each.name == "ddpx-exit"]:
        # The list also has a thread whose ``start`` is running, which cannot be joined yet.
        with suppress(RuntimeError):
            countdowns[0].join()


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_death_after_fit_is_raised_by_the_next_fit(culprit: int, tmp_path: Path) -> None:
    """A rank in the user's own code continues after another rank's death.

    It raises immediately when it needs the dead rank again.
    """
    with RankProcesses(fit_work_and_fit, 2, tmp_path) as ranks:
        ranks.wait_for_all("after fit")
        ranks.kill(culprit)
        ranks.release(1 - culprit)
        ranks.wait_for("still there", 1 - culprit)
        outcomes = ranks.wait()
    pid = outcomes[culprit].pid
    error = error_of(outcomes[1 - culprit], RankDiedError, culprit, pid)
    assert str(error).startswith(
        f"{rank_name(culprit, pid)} died: its process ended unexpectedly; every rank stops."
    )


# The processes catch a failure and train again.


class Unprintable(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.unpicklable = threading.Lock()

    def __str__(self) -> str:
        raise TypeError("no text")


# What a rank raises, its number, and how the other rank names the failure.
FAILURES = [
    (SystemExit("the config is empty"), 1, "SystemExit: the config is empty"),
    (BoomError("no such layer"), 0, "BoomError: no such layer"),
    (KeyboardInterrupt(), 1, "KeyboardInterrupt"),
    (Unprintable(), 1, "Unprintable: <its __str__ fails>"),
    (BoomError("no such layer" + 4_000_000 * "!"), 1, "BoomError: no such layer!!!"),
]


def throw(error: BaseException, *_: object) -> None:
    raise error


def fit_after_failures(
    rank: int, world_size: int, directory: Path
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Fit once with each failure, which every rank catches, and once without.

    Return what the rank was told of each failure, nothing for its own, and the weights of the
    last fit.
    """
    told = []
    for failure, culprit, _ in FAILURES:
        expected = BaseException if rank == culprit else RankFailedError
        fault = in_step(partial(throw, failure), culprit)
        error = raised(expected, fit, "ours", directory, Net(), fault)
        told.append("" if rank == culprit else str(error))
    return told, learned("ours", directory, Net())


def test_processes_that_have_caught_a_failure_train_again(tmp_path: Path) -> None:
    """``sys.exit``, Ctrl-C, and exceptions without a text or with megabytes of it are
    reported like any other, and the same processes connect again.
    """
    (told_first, first), (told_second, second) = run_ranks(fit_after_failures, 2, tmp_path)
    for (_, culprit, reason), *told in zip(FAILURES, told_first, told_second, strict=True):
        message = told[1 - culprit]
        assert f"rank {culprit} (host " in message
        assert f"failed, so this rank stops: {reason}" in message
        assert len(message) < 10_000
    assert_same(first, second)


def fit_after_a_group_failed(
    rank: int, world_size: int, directory: Path
) -> dict[str, torch.Tensor]:
    """Fit while rank 1 cannot form its group, and once more; return the weights."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dist, "init_process_group", lambda *_, **__: boom())
        with pytest.raises(BoomError if rank == 1 else RankFailedError):
            fit("ours", directory, Net())
    return learned("ours", directory, Net(), strategy={"init_timeout": 20})


def test_a_group_that_could_not_be_formed_is_formed_again(tmp_path: Path) -> None:
    """One rank had an error of its own, and torch has counted the attempt of the other."""
    first, second = run_ranks(fit_after_a_group_failed, 2, tmp_path)
    assert_same(first, second)


def keeps_handlers(rank: int, world_size: int, directory: Path) -> bool:
    """Fit once with a failure, in whose hook another one follows, and once without; return
    whether SIGTERM has the same handler as before.
    """
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(BoomError):
        fit("ours", directory, Net(), in_step(boom), At("on_exception", boom))
    fit("ours", directory, Net())
    return signal.getsignal(signal.SIGTERM) == before


def test_the_next_fit_removes_handlers_of_one_without_a_teardown(tmp_path: Path) -> None:
    """Lightning skips the teardown if an ``on_exception`` hook raises."""
    assert run_ranks(keeps_handlers, 2, tmp_path) == [True, True]


def keeps_hook(rank: int, world_size: int, directory: Path) -> bool:
    """Set a hook between two fits for which the ranks connect; return whether it is still
    set.
    """
    fit("ours", directory, Net())

    def hook(*_: object) -> None: ...

    sys.excepthook = hook
    dist.destroy_process_group()
    fit("ours", directory, Net())
    return sys.excepthook is hook


def test_a_users_hook_for_exceptions_stays_in_front(tmp_path: Path) -> None:
    """Neither torch's hook nor ours moves in front of it when a group is formed again."""
    assert run_ranks(keeps_hook, 2, tmp_path) == [True, True]


# An exception is a rank's own, whatever its text, unless another rank broke the collective
# in which it was raised.


class LastFailsInBackward(Net):
    """In the second step, the backward pass of the last rank fails in C++, for a reason of its
    own: its loss needs no gradient. Other ranks are busy before theirs.
    """

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        is_last_rank = self.global_rank == self.trainer.world_size - 1
        if index == 1 and not is_last_rank:
            hold("busy")
        loss = self.loss(batch)
        return loss.detach() if index == 1 and is_last_rank else loss


def test_an_error_while_another_rank_works_is_the_ranks_own(tmp_path: Path) -> None:
    """Its rank raises and prints it while another rank is busy for a long time, and that
    rank names the first one.
    """
    with start_fit(2, tmp_path, LastFailsInBackward(), limit_val_batches=0) as ranks:
        ranks.wait_for("busy", 0)
        (failed,) = ranks.wait(1)
        ranks.release(0)
        (survivor,) = ranks.wait(0)
    assert failed.failure.message.startswith("element 0 of tensors does not require grad")
    assert failed.failure.message in failed.output
    error_of(survivor, RankFailedError, 1, failed.pid)


def test_a_single_rank_raises_its_own_error(tmp_path: Path) -> None:
    """It asks no other rank what has broken its backward pass."""
    [failed] = fit_on(1, tmp_path, LastFailsInBackward(), max_epochs=1)
    assert failed.failure.message.startswith("element 0 of tensors does not require grad")


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
    error = RuntimeError("gloo: no socket is left, connection reset by peer")
    failed = failure_after_fit(partial(throw, error), tmp_path)
    assert failed.failure.message.startswith("gloo: no socket is left"), failed.story()
    assert "RuntimeError: gloo: no socket is left" in failed.output


def test_a_collective_after_fit_names_the_rank_that_exited(tmp_path: Path) -> None:
    """The script gets the collective's own error; the rank prints it in one line with the
    script's line, and then one that names the rank that has exited.
    """
    failed = failure_after_fit(partial(dist.all_reduce, torch.ones(1)), tmp_path)
    assert failed.failure.type_name == "RuntimeError", failed.story()
    assert re.search(
        r"this exception probably follows from another rank's failure: RuntimeError: [^\n]*"
        r" \(\S+/test_errors\.py:\d+\)\n(.*\n)*.*RankFailedError: rank 1",
        failed.output,
    ), failed.story()
