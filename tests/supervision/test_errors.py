"""An exception or a death on one rank, on real Trainers: every other rank gets the
cause, and none waits for it.
"""

import re
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor

from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from lightning_ddp_ext.integration.strategy_ranks import ranks_of
from lightning_ddp_ext.rendezvous.process_group import ProcessGroups
from tests.harness.ranks import (
    Outcome,
    RankProcesses,
    announce,
    error_of,
    hold,
    launch_ranks,
    rank_name,
    run_ranks,
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
    interrupt,
    learned,
    make_strategy,
    make_trainer,
    raised,
    start_fit,
    wait_for_another_ranks_end,
    wait_for_ever,
)

STEPS_OF_EPOCH = 4  # of ``Net``, on two ranks
STUCK = (
    r"process raised an exception and has not exited within 0\.3 s \(save_deadline\), so rank \d"
    r" exits at \S+:\d+"
)


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
    saver = OnExceptionCheckpoint(directory)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 0}
    try:
        fit("ours", directory, Net(), fault, saver, **options)
    except BoomError:
        hold("caught")


@pytest.mark.parametrize(
    ("fault", "culprit", "steps"),
    [
        pytest.param(At("setup", boom, ranks=[0]), 0, 0, id="before training"),
        pytest.param(
            At("on_validation_batch_start", boom, ranks=[1]),
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
    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=False)["global_step"] == steps


def fit_with_little_time(rank: int, world_size: int, directory: Path, *faults: At) -> None:
    """Train; the main thread has 0.3 s after another rank's end."""
    strategy = make_strategy("ours", directory, save_deadline=1)
    events = ("died", "failed", "absent", "hung")
    change_timeouts(strategy, grace=dict.fromkeys(events, 0.3))
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
    threading.Thread(target=wait_for_ever).start()
    boom()


@pytest.mark.parametrize(
    ("faults", "stuck"),
    [
        pytest.param([At("on_exception", wait_for_ever)], [0, 1], id="in a hook of both ranks"),
        pytest.param([], [0], id="at the end, in a thread of rank 0"),
    ],
)
def test_a_rank_that_raised_exits_within_the_save_deadline(
    faults: list[At], stuck: list[int], tmp_path: Path
) -> None:
    """A rank exits even if hooks, or threads of its script, block.

    The message has the line where they do.
    """
    faults = [in_step(leave_a_thread, 0), *faults]
    outcomes = fit_on(2, tmp_path, Net(), *faults, strategy={"save_deadline": 0.3})
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
    raise BoomError("no such layer" + 4_000_000 * "!")


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


def wait_for_forced_exit() -> None:
    """Wait until the time has passed after which a blocked rank is forced to exit."""
    while countdowns := [each for each in threading.enumerate() if each.name == "ddpx-exit"]:
        # The list also has a thread whose ``start`` is running, which cannot be joined yet.
        with suppress(RuntimeError):
            countdowns[0].join()


def fit_work_and_fit(rank: int, world_size: int, directory: Path) -> None:
    """Train, work until another rank has died, and train again."""
    fit_with_little_time(rank, world_size, directory)
    hold("after fit")
    wait_for_another_ranks_end()
    wait_for_forced_exit()
    announce("still there")
    fit("ours", directory, Net())


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


# What rank 1 or rank 0 raises in one fit after another, and how the other rank names it.
FAILURES: list[tuple[Callable[..., None], int, str]] = [
    (exit_with_text, 1, "SystemExit: the config is empty"),
    (boom, 0, "BoomError: no such layer"),
    (interrupt, 1, "KeyboardInterrupt"),
    (raise_unprintable, 1, "Unprintable: <its __str__ fails>"),
    (raise_megabytes, 1, "BoomError: no such layer!!!"),
]


def fit_again(rank: int, world_size: int, directory: Path) -> dict[str, Tensor]:
    """Fit once with each failure, which every rank catches, and once without; return the
    weights of the last fit.
    """
    for action, culprit, reason in FAILURES:
        expected = BaseException if rank == culprit else RankFailedError
        error = raised(expected, fit, "ours", directory, Net(), in_step(action, culprit))
        if rank != culprit:
            message = str(error)
            assert f"rank {culprit} (host " in message
            assert f"failed, so this rank stops: {reason}" in message
            assert len(message) < 10_000
    return learned("ours", directory, Net())


def test_processes_that_have_caught_a_failure_train_again(tmp_path: Path) -> None:
    """``sys.exit``, Ctrl-C, and exceptions without a text or with megabytes of it are
    reported like any other, and the same processes connect again.
    """
    first, second = run_ranks(fit_again, 2, tmp_path)
    assert_same(first, second)


def form_again(rank: int, world_size: int, directory: Path) -> dict[str, Tensor]:
    """Fit while rank 1 cannot form its group, and once more; return the weights."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(dist, "init_process_group", lambda *_, **__: boom())
        with pytest.raises(BoomError if rank == 1 else RankFailedError):
            fit("ours", directory, Net())
    return learned("ours", directory, Net(), strategy={"init_timeout": 20})


def test_a_group_that_could_not_be_formed_is_formed_again(tmp_path: Path) -> None:
    """One rank had an error of its own, and torch has counted the attempt of the other."""
    first, second = run_ranks(form_again, 2, tmp_path)
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


def hook_after_reconnecting(rank: int, world_size: int, directory: Path) -> bool:
    """Set a hook between two runs for which the ranks connect; whether it is still set."""
    fit("ours", directory, Net())

    def hook(*_: object) -> None: ...

    sys.excepthook = hook
    dist.destroy_process_group()
    fit("ours", directory, Net())
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


def test_an_error_while_another_rank_works_is_the_ranks_own(tmp_path: Path) -> None:
    """Its rank raises and prints it while another rank is busy for a long time, and that
    rank names the first one.
    """
    with start_fit(2, tmp_path, FailsInBackward(), limit_val_batches=0) as ranks:
        ranks.wait_for("busy", 0)
        (failed,) = ranks.wait(1)
        ranks.release(0)
        (survivor,) = ranks.wait(0)
    assert failed.failure.message.startswith("element 0 of tensors does not require grad")
    assert failed.failure.message in failed.output
    error_of(survivor, RankFailedError, 1, failed.pid)


class NeedsNoGradient(Net):
    """The backward pass fails in C++."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        return self.loss(batch).detach()


def fail_alone(rank: int, world_size: int, directory: Path) -> None:
    fit("ours", directory, NeedsNoGradient(), devices=1, max_epochs=1)


def test_a_single_rank_raises_its_own_error(tmp_path: Path) -> None:
    """It asks no other rank what has broken its backward pass."""
    [failed] = launch_ranks(fail_alone, 1, tmp_path)
    assert failed.failure.message.startswith("element 0 of tensors does not require grad")


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


# With NCCL, an aborted collective returns arbitrary values, and an abort may never return;
# gloo plays its part.


class LikeNCCL:
    """Makes collectives of this process wait for their abort, and then return zeros, as
    NCCL's do.
    """

    def __init__(self, *, abort_returns: bool) -> None:
        self.abort_returns = abort_returns
        self.is_aborted = threading.Event()

    def install(self) -> None:
        ProcessGroups.uses_nccl = property(lambda self: True)
        dist.distributed_c10d._abort_process_group = self.abort
        dist.broadcast = partial(self.call, dist.broadcast)
        dist.all_reduce = partial(self.call, dist.all_reduce)

    def abort(self) -> None:
        self.is_aborted.set()
        if not self.abort_returns:
            threading.Event().wait()

    def call(self, collective: Any, received: torch.Tensor, *args: Any, **options: Any) -> None:
        try:
            collective(received, *args, **options)
        except RuntimeError:
            self.is_aborted.wait()
            received.zero_()


def exchange(trainer: Any) -> None:
    """Wait for work of rank 0, which dies in it."""
    ranks_of(trainer.strategy).on_rank_zero(lambda: hold("working"), "work")


def compare(trainer: Any) -> None:
    """Use a reduced value in a way that fails if it is arbitrary."""
    if trainer.global_rank == 0:
        hold("working")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == trainer.world_size


def train(
    rank: int, world_size: int, directory: Path, work: Any, *, abort_returns: bool = True
) -> None:
    """Do some work after each step; rank 1 behaves as if it used NCCL."""
    stand_in = LikeNCCL(abort_returns=abort_returns)
    install = At("on_fit_start", lambda trainer: stand_in.install(), ranks=[1])
    fit("ours", directory, Net(), install, At("on_train_batch_end", work))


@pytest.mark.parametrize("work", [exchange, compare])
def test_arbitrary_values_after_a_death_name_the_dead_rank(work: Any, tmp_path: Path) -> None:
    """A survivor raises the same error as with gloo, in the place of one that follows
    from arbitrary values.
    """
    with RankProcesses(train, 2, tmp_path, work) as ranks:
        ranks.wait_for("working", 0)
        ranks.kill(0)
        died, survivor = ranks.wait()
    error_of(survivor, RankDiedError, 0, died.pid)


def test_an_abort_that_never_returns_does_not_keep_the_process(tmp_path: Path) -> None:
    """The survivor raises the error, and exits."""
    with RankProcesses(train, 2, tmp_path, exchange, abort_returns=False) as ranks:
        ranks.wait_for("working", 0)
        ranks.kill(0)
        _, survivor = ranks.wait()
    assert survivor.exit_code == 1, survivor.story()
    assert "RankDiedError: rank 0" in survivor.output, survivor.story()
