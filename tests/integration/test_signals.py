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
from tests.integration.continuing import Training
from tests.supervision import model as supervision

STEP = "on_train_batch_start"


class End(NamedTuple):
    """How a run ended on this rank."""

    status: int | None
    checkpoints: list[str]
    steps: int


def on_rank_one(
    rank: int, hook: str, number: int = 0, signum: int = signal.SIGTERM
) -> list[L.Callback]:
    return [continuing.signalled(hook, number, signum)] if rank == 1 else []


def fit(
    directory: Path,
    name: str,
    *callbacks: L.Callback,
    strategy: dict[str, Any] | None = None,
    **more: Any,
) -> End:
    """Train for two epochs of three steps, or until all stop."""
    place = directory / name
    two_epochs = Training(
        continuing.shuffled(), directory, strategy=strategy or {}, options={"max_epochs": 2}
    )
    run = two_epochs.run(callbacks=callbacks, default_root_dir=place, **more)
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*.ckpt"))
    return End(run.status, files, len(run.steps))


def run(
    rank: int, directory: Path, name: str, *callbacks: L.Callback, signum: int = signal.SIGTERM
) -> End:
    """Return a run in whose second step rank 1 gets a signal."""
    return fit(directory, name, *callbacks, *on_rank_one(rank, "on_train_batch_end", 1, signum))


class Evaluated(continuing.LongValidated):
    """Counts its steps, of which there are sixty on each rank."""

    evaluated = 0

    def test_step(self, batch: torch.Tensor, index: int) -> None:
        self.evaluated += 1
        torch.distributed.all_reduce(torch.zeros(1))

    validation_step = predict_step = test_step

    def on_validation_end(self) -> None:
        pass


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
        fit(directory, "run", faults[rank], devices=world_size)
    except RankDiedError as error:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        print(error)
        threading.Event().wait()


def test_a_launchers_sigterm_leaves_time_to_name_the_dead_rank(tmp_path: Path) -> None:
    """It follows within a tenth of a second, and ends the process only some seconds
    later.
    """
    for told in ranks.launch_ranks(informed_and_terminated, 3, tmp_path, env=ranks.by_hand_env(3))[
        1:
    ]:
        assert told.exit_code == 143, told.story()
        assert "\nrank 0 (host " in told.output


def saved_elsewhere(rank: int, world_size: int, directory: Path) -> list[list[str]]:
    """Return the files of runs that save in the background, that are stopped in a save,
    and that shall not save.
    """

    def files_of(
        name: str, *callbacks: L.Callback, hook: str = "on_train_batch_end", **strategy: Any
    ) -> list[str]:
        own = [*callbacks, *on_rank_one(rank, hook, 1)]
        status, files, _ = fit(
            directory, name, *own, strategy=strategy, enable_checkpointing=bool(callbacks)
        )
        assert status == 143
        return files

    often = {"every_n_train_steps": 1, "save_top_k": -1}
    background = RankZeroCheckpointIO(background=True)
    return [
        files_of(
            "background",
            RankZeroCheckpoint(directory / "background", **often),
            checkpoint_io=background,
        ),
        files_of(
            "saving",
            RankZeroCheckpoint(directory / "saving", "{step}", **often),
            hook="on_save_checkpoint",
        ),
        files_of("nothing", stop_checkpoint=None),
    ]


def test_a_save_is_finished_before_the_one_of_the_stop(tmp_path: Path) -> None:
    """This covers a save that has begun, and one in the background;
    ``stop_checkpoint=None`` saves nothing.
    """
    for background, saving, nothing in ranks.run_ranks(
        saved_elsewhere, 2, tmp_path, env=ranks.by_hand_env(2)
    ):
        assert "last-preempted.ckpt" in background
        assert len(background) >= 3
        assert {"last-preempted.ckpt", "step=1.ckpt", "step=2.ckpt"} <= set(saving)
        assert nothing == []
    for path in tmp_path.rglob("*.ckpt"):
        assert torch.load(path, weights_only=False)["state_dict"]


def resumes_in_a_job(
    rank: int,
    world_size: int,
    directory: Path,
    is_stopped: bool,
    ckpt_path: str | None = None,
    **strategy: Any,
) -> bool:
    """Whether a run resumes, in a directory that all jobs share."""
    callbacks = on_rank_one(rank, "on_train_batch_end", 1, signal.SIGUSR1) if is_stopped else []
    two_epochs = Training(
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


IN_GROUPS = {"fork": (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), "spawn": (signal.SIGTERM,)}


def signalled_in_groups(rank: int, world_size: int, directory: Path, context: str) -> list[End]:
    """Return the ends of runs whose rank 1 gets a signal together with its loader's
    workers.
    """
    os.setpgid(0, 0)
    ends = []
    for signum in IN_GROUPS[context]:
        loaders = continuing.shuffled(120, num_workers=1, multiprocessing_context=context)
        callbacks = (
            [training.At(STEP, lambda _, signum=signum: os.killpg(0, signum), earlier=2)]
            if rank == 1
            else []
        )
        place = directory / str(signum)
        stopped = Training(loaders, directory).run(callbacks=callbacks, default_root_dir=place)
        ends.append(
            (
                stopped.status,
                [path.name for path in place.rglob("*.ckpt")],
                3 <= len(stopped.steps) < 30,
            )
        )
    return ends


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_leave_the_signal_of_a_group_to_their_rank(context: str, tmp_path: Path) -> None:
    """A rank needs them until it stops; torchrun and terminals send a signal to all
    processes of a group.
    """
    expected = [(128 + signum, ["last-preempted.ckpt"], True) for signum in IN_GROUPS[context]]
    assert (
        ranks.run_ranks(signalled_in_groups, 2, tmp_path, context, env=ranks.by_hand_env(2))
        == [expected] * 2
    )


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def by_each_signal(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Return the ends of runs by signal, with and without a user's handler, and whether
    handlers are restored.
    """
    found: list[Any] = []

    def users(number: int, frame: Any) -> None:
        found.append(number)

    for signum in SIGNALS:
        before = signal.getsignal(signum)
        for handler in (before, users):
            signal.signal(signum, handler)
            end = run(rank, directory, f"{signum}-{handler is users}", signum=signum)
            found.append((*end[:2], signal.getsignal(signum) is handler))
        signal.signal(signum, before)
    return found


def test_each_signal_ends_with_its_status_and_is_passed_on(tmp_path: Path) -> None:
    """The user's earlier handler is called, and restored afterwards; SIGUSR1 and SIGHUP
    reach only that handler.
    """
    expected: list[Any] = []
    for signum in SIGNALS:
        stopped = (128 + signum, ["last-preempted.ckpt"], True)
        is_left_to_user = signum in (signal.SIGUSR1, signal.SIGHUP)
        expected += [stopped, signum, (None, [], True) if is_left_to_user else stopped]
    first, second = ranks.run_ranks(by_each_signal, 2, tmp_path, env=ranks.by_hand_env(2))
    assert second == expected
    assert first == [each for each in expected if not isinstance(each, int)]


def beside_others(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Return exit statuses of runs with other handlers for signals: 143, or None if the
    signal is not ours.
    """
    # As asyncio does.
    ends = [run(rank, directory, "woken", training.At(STEP, lambda _: signal.set_wakeup_fd(-1)))]
    inner = training.make_trainer(training.make_strategy("ours", directory), limit_val_batches=2)
    nested = training.At(
        STEP, lambda _: inner.validate(Evaluated(continuing.shuffled()), verbose=False), earlier=1
    )
    ends.append(run(rank, directory, "nested", nested))
    # As for what a shell runs in the background.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends.append(run(rank, directory, "ignored", signum=signal.SIGINT))
    assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    ends.append(run(rank, directory, "nohup", signum=signal.SIGHUP))
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN
    faulthandler.register(signal.SIGUSR1)
    ends.append(run(rank, directory, "stacks", signum=signal.SIGUSR1))
    faulthandler.unregister(signal.SIGUSR1)
    return ends


def test_signals_with_other_handlers(tmp_path: Path) -> None:
    """Ours act beside another loop's wake-up descriptor and after a nested run; the
    user's handlers are kept.
    """
    for woken, nested, ignored, nohup, stacks in ranks.run_ranks(
        beside_others, 2, tmp_path, env=ranks.by_hand_env(2)
    ):
        assert woken[:2] == nested[:2] == (143, ["last-preempted.ckpt"])
        assert woken[2] in range(2, 6)
        assert nested[2] in range(2, 6)
        assert ignored == nohup == stacks == (None, [], 6)


def signalled_after_a_run(rank: int, world_size: int, directory: Path) -> None:
    """Have a callback raise in on_exception, so that Lightning skips its teardown."""
    with pytest.raises(supervision.BoomError):
        fit(
            directory,
            "run",
            supervision.Fault(STEP, supervision.boom),
            supervision.Fault("on_exception", supervision.boom),
        )
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_was_not_torn_down_handles_no_signals(tmp_path: Path) -> None:
    """SIGTERM then ends the process, as it does by default."""
    for outcome in ranks.launch_ranks(signalled_after_a_run, 2, tmp_path, env=ranks.by_hand_env(2)):
        assert outcome.exit_code == -signal.SIGTERM, outcome.story()


def interrupted_twice(rank: int, world_size: int, directory: Path) -> Any:
    """Run, with Ctrl-C and a second one before the step finishes."""
    return fit(
        directory, "run", *(continuing.signalled(STEP, signum=signal.SIGINT) for _ in range(2))
    )[:2]


def test_a_second_interrupt_exits_immediately(tmp_path: Path) -> None:
    """It exits as Lightning does on Ctrl-C, without waiting for the step, and so
    without a checkpoint.
    """
    assert (
        ranks.run_ranks(interrupted_twice, 2, tmp_path, env=ranks.by_hand_env(2)) == [(1, [])] * 2
    )


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
    fit(directory, "run", *callbacks, strategy=strategy, devices=world_size)


@pytest.mark.parametrize("timeout", [None, 0.001])
def test_all_end_within_the_deadline_though_a_rank_does_not_stop(
    timeout: float | None, tmp_path: Path
) -> None:
    """They exit with the signal's status, and print where each of them was and which
    one did not reply.
    """
    with ranks.RankProcesses(
        held, 2, tmp_path, timeout, env=ranks.by_hand_env(2), save_deadline=1
    ) as processes:
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
