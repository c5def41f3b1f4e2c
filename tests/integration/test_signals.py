"""Signals at other moments than in the middle of training, other signals, and whose
they are besides.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch

from lightning_ddp_ext import RankZeroCheckpoint, RankZeroCheckpointIO
from lightning_ddp_ext.errors import RankDiedError
from lightning_ddp_ext.supervision.signals import StopSignals
from tests.harness import ranks, training
from tests.harness.environment import by_srun
from tests.integration import continuing
from tests.supervision import model as supervision

STEP = "on_train_batch_start"
ALL_STEPS = 6  # of two epochs


class End(NamedTuple):
    """How a run ended on this rank."""

    status: int | None
    checkpoints: list[str]
    steps: int


def fit(
    directory: Path,
    *callbacks: L.Callback,
    strategy: dict[str, Any] | None = None,
    **more: Any,
) -> End:
    """Train for two epochs of three steps, or until all stop."""
    place = directory / "run"
    two_epochs = continuing.Training(
        continuing.shuffled(), directory, strategy=strategy or {}, options={"max_epochs": 2}
    )
    run = two_epochs.run(callbacks=callbacks, default_root_dir=place, **more)
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*.ckpt"))
    return End(run.status, files, len(run.steps))


def run_signalled(directory: Path, *callbacks: L.Callback, signum: int = signal.SIGTERM) -> End:
    """Return a run in whose second step rank 1 gets a signal."""
    send = continuing.signalled("on_train_batch_end", 1, signum, ranks=[1])
    return fit(directory, *callbacks, send)


def informed_and_terminated(rank: int, world_size: int, directory: Path) -> None:
    """After rank 0's death the launcher sends SIGTERM: to rank 1 in a hook, to rank 2
    after its Trainer's run.
    """
    faults = [
        continuing.signalled(STEP, 1, signal.SIGKILL),
        continuing.signalled("on_exception"),
        L.Callback(),
    ]
    try:
        fit(directory, faults[rank], devices=world_size)
    except RankDiedError as error:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        print(error)
        threading.Event().wait()


def test_a_launchers_sigterm_leaves_time_to_name_the_dead_rank(tmp_path: Path) -> None:
    """It follows within a tenth of a second, and ends the process only some seconds
    later.
    """
    _, *others = ranks.launch_ranks(informed_and_terminated, 3, tmp_path)
    for told in others:
        assert told.exit_code == 143, told.story()
        assert "\nrank 0 (host " in told.output


OFTEN = {"every_n_train_steps": 1, "save_top_k": -1}


def saved_beside(
    rank: int, world_size: int, directory: Path, hook: str, background: bool
) -> list[str]:
    """Return the files of a run that saves after each step, and is stopped in a hook of
    the second one.
    """
    saver = RankZeroCheckpoint(directory / "run", "{step}", **OFTEN)
    strategy = {"checkpoint_io": RankZeroCheckpointIO(background=background)}
    callbacks = [saver, continuing.signalled(hook, 1, ranks=[1])]
    end = fit(directory, *callbacks, strategy=strategy, enable_checkpointing=True)
    assert end.status == 143
    return end.checkpoints


@pytest.mark.parametrize(
    ("hook", "background"), [("on_save_checkpoint", False), ("on_train_batch_end", True)]
)
def test_a_save_is_finished_before_the_one_of_the_stop(
    hook: str, background: bool, tmp_path: Path
) -> None:
    """This covers a save that has begun, and one in the background."""
    for files in ranks.run_ranks(saved_beside, 2, tmp_path, hook, background):
        assert {"last-preempted.ckpt", "step=1.ckpt", "step=2.ckpt"} <= set(files)
    for path in tmp_path.rglob("*.ckpt"):
        assert torch.load(path, weights_only=False)["state_dict"]


def stopped_without_a_save(rank: int, world_size: int, directory: Path) -> End:
    send = continuing.signalled("on_train_batch_end", 1, ranks=[1])
    return fit(directory, send, strategy={"stop_checkpoint": None})


def test_nothing_is_saved_without_a_stop_checkpoint(tmp_path: Path) -> None:
    """All ranks stop nevertheless."""
    for end in ranks.run_ranks(stopped_without_a_save, 2, tmp_path):
        assert end.status == 143
        assert end.checkpoints == []


def resumes_in_a_job(
    rank: int,
    world_size: int,
    directory: Path,
    is_stopped: bool,
    ckpt_path: str | None = None,
    **strategy: Any,
) -> bool:
    """Whether a run resumes, in a directory that all jobs share."""
    send = continuing.signalled("on_train_batch_end", 1, signal.SIGUSR1, ranks=[1])
    callbacks = [send] if is_stopped else []
    two_epochs = continuing.Training(
        continuing.shuffled(), directory, options={"max_epochs": 2}, strategy=strategy
    )
    run = two_epochs.run(callbacks=callbacks, default_root_dir=directory, ckpt_path=ckpt_path)
    return run.steps[0].moment != (0, 0)


def test_only_the_requeued_job_resumes(tmp_path: Path) -> None:
    """As with stock, no ``ckpt_path`` has to ask for it, and its newest file is used;
    other jobs of the command begin from the start.
    """
    job = by_srun()
    stopped, _ = ranks.launch_ranks(resumes_in_a_job, 2, tmp_path, True, env=job)
    assert stopped.result is False, stopped.story()
    assert "the ranks will finish the current step, save and stop" in stopped.output, (
        stopped.story()
    )
    assert f"SLURM did not requeue job {job['SLURM_JOB_ID']}" in stopped.output, stopped.story()
    [newest] = tmp_path.rglob("*.ckpt")
    for number in range(1, 8):
        older = shutil.copy(newest, newest.with_stem(f"{newest.stem}-v{number}"))
        os.utime(older, (number, number))
    for env, resumes in ((by_srun(), False), (job, True)):
        runs = ranks.launch_ranks(
            resumes_in_a_job, 2, tmp_path, False, env={**env, "SLURM_RESTART_COUNT": "1"}
        )
        assert [run.result for run in runs] == [resumes] * 2, runs[0].story()
        assert (f"from the checkpoint path at {newest}\n" in runs[0].output) is resumes
        asks = "a requeued job only resumes with trainer.fit(..., ckpt_path='last')"
        assert (asks in runs[0].output) is not resumes, runs[0].story()
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_requeued_job_resumes_without_a_stop_checkpoint(tmp_path: Path) -> None:
    """The job itself saves for its requeue, so ``ckpt_path="last"`` finds that file."""
    job = by_srun()
    options: dict[str, Any] = {"ckpt_path": "last", "stop_checkpoint": None}
    assert ranks.run_ranks(resumes_in_a_job, 2, tmp_path, True, env=job, **options) == [False] * 2
    requeued = {**job, "SLURM_RESTART_COUNT": "1"}
    assert (
        ranks.run_ranks(resumes_in_a_job, 2, tmp_path, False, env=requeued, **options) == [True] * 2
    )


def signalled_in_group(
    rank: int, world_size: int, directory: Path, context: str, signum: int
) -> End:
    """Return the end of a run whose rank 1 gets a signal together with its loader's
    worker, in the third of 30 steps.
    """
    os.setpgid(0, 0)
    loaders = continuing.shuffled(120, num_workers=1, multiprocessing_context=context)
    send = training.At(STEP, lambda _: os.killpg(0, signum), earlier=2, ranks=[1])
    run = continuing.Training(loaders, directory).run(callbacks=[send], default_root_dir=directory)
    return End(run.status, [path.name for path in directory.rglob("*.ckpt")], len(run.steps))


@pytest.mark.parametrize(
    ("context", "signum"),
    [
        ("fork", signal.SIGTERM),
        ("fork", signal.SIGINT),
        ("fork", signal.SIGUSR1),
        pytest.param("spawn", signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_workers_leave_the_signal_of_a_group_to_their_rank(
    context: str, signum: int, tmp_path: Path
) -> None:
    """A rank needs them until it stops; torchrun and terminals send a signal to all
    processes of a group.
    """
    for end in ranks.run_ranks(signalled_in_group, 2, tmp_path, context, signum):
        assert end.status == 128 + signum
        assert end.checkpoints == ["last-preempted.ckpt"]
        assert 3 <= end.steps < 30


class Handled(NamedTuple):
    """A run in which rank 1 got a signal."""

    end: End
    passed_on: list[int]  # to the user's handler
    is_handler_restored: bool


def handle(
    rank: int, world_size: int, directory: Path, signum: int, has_users_handler: bool
) -> Handled:
    passed_on: list[int] = []
    if has_users_handler:
        signal.signal(signum, lambda number, frame: passed_on.append(number))
    before = signal.getsignal(signum)
    end = run_signalled(directory, signum=signum)
    return Handled(end, passed_on, signal.getsignal(signum) is before)


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
LEFT_TO_USERS_HANDLER = (signal.SIGUSR1, signal.SIGHUP)


@pytest.mark.parametrize("has_users_handler", [False, True])
@pytest.mark.parametrize("signum", SIGNALS)
def test_each_signal_ends_with_its_status_and_is_passed_on(
    signum: int, has_users_handler: bool, tmp_path: Path
) -> None:
    """The user's earlier handler is called, and restored afterwards; SIGUSR1 and SIGHUP
    reach only that handler.
    """
    by_rank = ranks.run_ranks(handle, 2, tmp_path, signum, has_users_handler)
    is_stopped = not (has_users_handler and signum in LEFT_TO_USERS_HANDLER)
    for handled in by_rank:
        assert handled.end.status == (128 + signum if is_stopped else None)
        assert handled.end.checkpoints == (["last-preempted.ckpt"] if is_stopped else [])
        assert handled.is_handler_restored
    assert [handled.passed_on for handled in by_rank] == [[], [signum] * has_users_handler]


def lose_wakeup(trainer: L.Trainer) -> None:
    """Do what asyncio does when its loop ends."""
    signal.set_wakeup_fd(-1)


def validate_in_step(trainer: L.Trainer) -> None:
    strategy = training.make_strategy("ours", Path(trainer.default_root_dir).parent)
    inner = training.make_trainer(strategy, limit_val_batches=2)
    inner.validate(continuing.LongValidated(continuing.shuffled()), verbose=False)


def stopped_beside(
    rank: int, world_size: int, directory: Path, do: Callable[[L.Trainer], None]
) -> End:
    return run_signalled(directory, training.At(STEP, do))


@pytest.mark.parametrize("do", [lose_wakeup, validate_in_step])
def test_a_signal_stops_all_whatever_a_step_does(
    do: Callable[[L.Trainer], None], tmp_path: Path
) -> None:
    """This holds beside another loop's wake-up descriptor and after a nested run."""
    for end in ranks.run_ranks(stopped_beside, 2, tmp_path, do):
        assert end.status == 143
        assert end.checkpoints == ["last-preempted.ckpt"]
        assert 2 <= end.steps < ALL_STEPS


def ignored(
    rank: int, world_size: int, directory: Path, signum: int, prepare: Callable[[int], object]
) -> End:
    """Return the end of a run in a process that has prepared for the signal."""
    prepare(signum)
    before = signal.getsignal(signum)
    end = run_signalled(directory, signum=signum)
    assert signal.getsignal(signum) is before
    return end


def ignore(signum: int) -> None:
    signal.signal(signum, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("signum", "prepare"),
    [
        pytest.param(signal.SIGINT, ignore, id="in a shell's background"),
        pytest.param(signal.SIGHUP, ignore, id="nohup"),
        pytest.param(signal.SIGUSR1, faulthandler.register, id="faulthandler"),
    ],
)
def test_a_signal_that_a_process_ignores_or_prints_stacks_at_stops_nothing(
    signum: int, prepare: Callable[[int], object], tmp_path: Path
) -> None:
    """Its handlers are kept."""
    for end in ranks.run_ranks(ignored, 2, tmp_path, signum, prepare):
        assert end == End(None, [], ALL_STEPS)


def signalled_after_a_run(rank: int, world_size: int, directory: Path) -> None:
    """Have a callback raise in on_exception, so that Lightning skips its teardown."""
    with pytest.raises(supervision.BoomError):
        fit(
            directory,
            supervision.Fault(STEP, supervision.boom),
            supervision.Fault("on_exception", supervision.boom),
        )
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_was_not_torn_down_handles_no_signals(tmp_path: Path) -> None:
    """SIGTERM then ends the process, as it does by default."""
    for outcome in ranks.launch_ranks(signalled_after_a_run, 2, tmp_path):
        assert outcome.exit_code == -signal.SIGTERM, outcome.story()


def interrupted_twice(rank: int, world_size: int, directory: Path) -> Any:
    """Run, with Ctrl-C and a second one before the step finishes."""
    return fit(directory, *(continuing.signalled(STEP, signum=signal.SIGINT) for _ in range(2)))[:2]


def test_a_second_interrupt_exits_immediately(tmp_path: Path) -> None:
    """It exits as Lightning does on Ctrl-C, without waiting for the step, and so
    without a checkpoint.
    """
    assert ranks.run_ranks(interrupted_twice, 2, tmp_path) == [(1, [])] * 2


def held(
    rank: int, world_size: int, directory: Path, timeout: float | None, **strategy: Any
) -> None:
    """Run with all ranks but 0 stuck in the middle of a step, and with a default
    timeout for sockets.
    """
    socket.setdefaulttimeout(timeout)
    callbacks = (
        [training.At(STEP, lambda _: ranks.hold("in step 1"), earlier=1)] if rank > 0 else []
    )
    fit(directory, *callbacks, strategy=strategy, devices=world_size)


@pytest.mark.parametrize("timeout", [None, 0.001])
def test_all_end_within_the_deadline_though_a_rank_does_not_stop(
    timeout: float | None, tmp_path: Path
) -> None:
    """They exit with the signal's status, and print where each of them was and which
    one did not reply.
    """
    with ranks.RankProcesses(held, 2, tmp_path, timeout, save_deadline=1) as processes:
        processes.wait_for("in step 1", rank=1)
        processes.kill(1, signal.SIGSTOP)
        processes.kill(0, signal.SIGTERM)
        (first,) = processes.wait(0)
        assert first.exit_code == 143
        assert "not stopped within 1 s (save_deadline), and rank 1 (host" in first.output
        processes.kill(1, signal.SIGCONT)
        (second,) = processes.wait(1)
        assert second.exit_code != 0


def end_while_signalled(rank: int, world_size: int) -> None:
    """Send SIGTERM while the handlers of a rank that failed are restored, as torchrun
    may.
    """
    signals = StopSignals(lambda signum: None)
    signals.install(signal.SIGTERM)
    listener: Any = signals._listener
    join = listener.join
    listener.join = lambda: (os.kill(os.getpid(), signal.SIGTERM), join())
    signals.restore(defers_sigterm=True)


def test_a_signal_does_not_kill_a_failed_rank_before_it_prints_the_cause() -> None:
    """Not even between our handler and the earlier one."""
    (outcome,) = ranks.launch_ranks(end_while_signalled, 1)
    assert outcome.exit_code == 0, outcome.story()
