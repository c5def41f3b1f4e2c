"""Which signals stop the ranks, at which moments, and what happens to handlers that a
process had before.

``test_stopping`` stops ranks in the middle of training, and resumes.
"""

import os
import signal
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_ddp_ext import RankZeroCheckpoint, RankZeroCheckpointIO
from tests.harness import ranks, training
from tests.integration import continuing
from tests.integration.background_saves import FailsWhenAwaited

STEP = "on_train_batch_start"
ALL_STEPS = 6  # of two epochs
SIGTERM_STATUS = 128 + signal.SIGTERM
STOP_CHECKPOINT = "last-preempted.ckpt"
IN_DEVICE = "/dev/null/it.ckpt"  # cannot be written


class End(NamedTuple):
    """How a run ended on this rank.

    Attributes:
        status: the exit status; ``None`` if no signal stopped the run.
        checkpoints: the names of the files that are left.
        steps: the number of steps.
    """

    status: int | None
    checkpoints: list[str]
    steps: int


def fit(
    rank: int,
    world_size: int,
    directory: Path,
    *callbacks: L.Callback,
    strategy: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> End:
    """Train for two epochs of three steps, or until all stop."""
    place = directory / "run"
    two_epochs = continuing.Training(
        continuing.shuffled(), directory, strategy=dict(strategy), options={"max_epochs": 2}
    )
    run = two_epochs.run(callbacks=callbacks, default_root_dir=place, **options)
    files = sorted(path.name for path in place.rglob("*.ckpt"))
    return End(run.status, files, len(run.steps))


def send(signum: int, trainer: L.Trainer) -> None:
    os.kill(os.getpid(), signum)


def signal_rank_one(hook: str = "on_train_batch_end", signum: int = signal.SIGTERM) -> L.Callback:
    """Return a callback that sends a signal to rank 1 in its second step."""
    return training.At(hook, partial(send, signum), earlier=1, ranks=[1])


def test_a_failed_run_ends_in_order_after_a_launchers_sigterm(tmp_path: Path) -> None:
    """The rank names the dead one and exits, and does not announce that it would stop."""
    kill = training.At(STEP, partial(send, signal.SIGKILL), earlier=1, ranks=[0])
    terminate = training.At("on_exception", partial(send, signal.SIGTERM))  # as a launcher does
    _, survivor = ranks.launch_ranks(fit, 2, tmp_path, kill, terminate)
    assert survivor.exit_code == 1, survivor.story()
    assert survivor.failure.type_name == "RankDiedError"
    assert "will finish the current step" not in survivor.output


def stop_beside_saves(rank: int, world_size: int, directory: Path) -> End:
    """Save each step in the background, and send SIGTERM to rank 1 in the second one."""
    saver = RankZeroCheckpoint(directory / "run", "{step}", every_n_train_steps=1, save_top_k=-1)
    strategy = {"checkpoint_io": AsyncCheckpointIO(RankZeroCheckpointIO())}
    callbacks = saver, signal_rank_one()
    options = {"strategy": strategy, "enable_checkpointing": True}
    return fit(rank, world_size, directory, *callbacks, **options)


def test_a_save_in_the_background_is_finished_before_the_one_of_the_stop(tmp_path: Path) -> None:
    """The files of both saves are whole."""
    for end in ranks.run_ranks(stop_beside_saves, 2, tmp_path):
        assert end.status == SIGTERM_STATUS
        assert {STOP_CHECKPOINT, "step=1.ckpt", "step=2.ckpt"} <= set(end.checkpoints)
    for path in tmp_path.rglob("*.ckpt"):
        assert torch.load(path, weights_only=False)["state_dict"]


def stop_after_failed_save(rank: int, world_size: int, directory: Path) -> End:
    """Save in the background below a device, and send SIGTERM to rank 1 in this step."""
    save = training.At("on_train_batch_end", lambda trainer: trainer.save_checkpoint(IN_DEVICE))
    stop = training.At("on_train_batch_end", partial(send, signal.SIGTERM), ranks=[1])
    strategy = {"checkpoint_io": FailsWhenAwaited(lambda path: path == IN_DEVICE)}
    return fit(rank, world_size, directory, save, stop, strategy=strategy)


def test_the_stop_checkpoint_is_saved_also_after_a_save_that_failed(tmp_path: Path) -> None:
    """The save of the stop does not raise the error of an earlier one in the background."""
    for end in ranks.run_ranks(stop_after_failed_save, 2, tmp_path):
        assert end.status == SIGTERM_STATUS
        assert end.checkpoints == [STOP_CHECKPOINT]


def test_nothing_is_saved_without_a_stop_checkpoint(tmp_path: Path) -> None:
    """All ranks stop nevertheless."""
    strategy = {"stop_checkpoint": None}
    for end in ranks.run_ranks(fit, 2, tmp_path, signal_rank_one(), strategy=strategy):
        assert (end.status, end.checkpoints) == (SIGTERM_STATUS, [])


def stop_process_group(
    rank: int, world_size: int, directory: Path, context: str, signum: int
) -> End:
    """Send a signal to rank 1 and its loader's worker, in the third of an epoch's 30 steps."""
    os.setpgid(0, 0)  # the rank and its worker are a process group
    loaders = continuing.shuffled(120, num_workers=1, multiprocessing_context=context)
    send = training.At(STEP, lambda _: os.killpg(0, signum), earlier=2, ranks=[1])
    run = continuing.Training(loaders, directory).run(callbacks=[send], default_root_dir=directory)
    return End(run.status, [path.name for path in directory.rglob("*.ckpt")], len(run.steps))


@pytest.mark.parametrize(
    ("context", "signum"),
    [
        ("fork", signal.SIGTERM),
        ("fork", signal.SIGINT),
        pytest.param("spawn", signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_workers_leave_the_signal_of_a_group_to_their_rank(
    context: str, signum: int, tmp_path: Path
) -> None:
    """A rank needs its workers until it stops.

    torchrun and terminals send a signal to all processes of a group.
    """
    for end in ranks.run_ranks(stop_process_group, 2, tmp_path, context, signum):
        assert end.status == 128 + signum
        assert end.checkpoints == [STOP_CHECKPOINT]
        assert 3 <= end.steps < 30


def stop_beside_handler(
    rank: int, world_size: int, directory: Path, signum: int, has_users_handler: bool
) -> list[int]:
    """Send a signal to rank 1, which may have a handler for it; return the signals that
    the handler got.
    """
    passed_on: list[int] = []
    if has_users_handler:
        signal.signal(signum, lambda number, frame: passed_on.append(number))
    before = signal.getsignal(signum)
    end = fit(rank, world_size, directory, signal_rank_one(signum=signum))
    assert (end.status, end.checkpoints) == (128 + signum, [STOP_CHECKPOINT])
    assert signal.getsignal(signum) is before
    return passed_on


@pytest.mark.parametrize(
    ("signum", "has_users_handler"), [(signal.SIGTERM, True), (signal.SIGINT, False)]
)
def test_each_signal_ends_with_its_status_and_is_passed_on(
    signum: int, has_users_handler: bool, tmp_path: Path
) -> None:
    """The user's earlier handler is called, and restored afterwards."""
    passed_on = ranks.run_ranks(stop_beside_handler, 2, tmp_path, signum, has_users_handler)
    assert passed_on == [[], [signum] if has_users_handler else []]


def lose_wakeup(trainer: L.Trainer) -> None:
    """Do what asyncio does when its loop ends."""
    signal.set_wakeup_fd(-1)


def validate_in_step(trainer: L.Trainer) -> None:
    """Run another Trainer."""
    strategy = training.make_strategy("ours", Path(trainer.default_root_dir).parent)
    inner = training.make_trainer(strategy, limit_val_batches=2)
    inner.validate(continuing.LongValidated(continuing.shuffled()), verbose=False)


@pytest.mark.parametrize("do", [lose_wakeup, validate_in_step])
def test_a_signal_stops_all_whatever_a_step_does(
    do: Callable[[L.Trainer], None], tmp_path: Path
) -> None:
    """A step may reset the signal's wake-up descriptor, or run another Trainer."""
    for end in ranks.run_ranks(fit, 2, tmp_path, training.At(STEP, do), signal_rank_one()):
        assert end.status == SIGTERM_STATUS
        assert end.checkpoints == [STOP_CHECKPOINT]
        assert 2 <= end.steps < ALL_STEPS


def train_in_background(rank: int, world_size: int, directory: Path) -> End:
    """Ignore Ctrl-C, as in a shell's background; send it to rank 1, and then to all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = fit(rank, world_size, directory, signal_rank_one(signum=signal.SIGINT))
    os.kill(os.getpid(), signal.SIGINT)  # ends a rank that no longer ignores it
    return end


def test_a_signal_that_a_process_ignores_stops_nothing(tmp_path: Path) -> None:
    """All ranks train to the end, and afterwards still ignore it."""
    for end in ranks.run_ranks(train_in_background, 2, tmp_path):
        assert end == End(None, [], ALL_STEPS)


class SignalsAtTheEnd(RankZeroCheckpointIO):
    """Sends SIGTERM to this process when the Trainer's run is over on all ranks."""

    def teardown(self) -> None:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGTERM)
        super().teardown()


def test_sigterm_ends_a_process_after_its_last_step(tmp_path: Path) -> None:
    """A signal has its usual effect if it arrives too late to stop a run."""
    strategy = {"checkpoint_io": SignalsAtTheEnd()}
    for outcome in ranks.launch_ranks(fit, 2, tmp_path, strategy=strategy):
        assert outcome.exit_code == -signal.SIGTERM, outcome.story()


def test_a_second_interrupt_exits_immediately(tmp_path: Path) -> None:
    """A second Ctrl-C has the effect that it has with stock: no checkpoint is saved."""
    twice = [training.At(STEP, partial(send, signal.SIGINT)) for _ in range(2)]
    for end in ranks.run_ranks(fit, 2, tmp_path, *twice):
        assert (end.status, end.checkpoints) == (1, [])


def hold_rank_one(rank: int, world_size: int, directory: Path, deadline: int = 1) -> None:
    """Train with a short default timeout for sockets, while rank 1 is stuck in a step."""
    socket.setdefaulttimeout(0.001)
    stick = training.At(STEP, lambda _: ranks.hold("in step 1"), earlier=1, ranks=[1])
    fit(rank, world_size, directory, stick, strategy={"save_deadline": deadline})


def test_all_end_within_the_deadline_though_a_rank_does_not_stop(tmp_path: Path) -> None:
    """The other rank exits with the signal's status, and names the stuck rank."""
    with ranks.RankProcesses(hold_rank_one, 2, tmp_path) as processes:
        processes.wait_for("in step 1", rank=1)
        processes.kill(1, signal.SIGSTOP)
        processes.kill(0, signal.SIGTERM)
        [other] = processes.wait(0)
        assert other.exit_code == SIGTERM_STATUS
        assert "not stopped within 1 s (save_deadline), and rank 1 (host" in other.output
        processes.kill(1, signal.SIGCONT)
        [stuck] = processes.wait(1)
        assert stuck.exit_code != 0


@pytest.mark.parametrize(
    ("is_stopped", "deadline", "finding"),
    [
        pytest.param(False, 6, "half of save_deadline, 3 s, but rank 1 (host", id="own code"),
        pytest.param(True, 30, "has not answered", id="SIGSTOP", marks=pytest.mark.nightly),
    ],
)
def test_the_last_step_is_saved_though_a_rank_does_not_stop(
    is_stopped: bool, deadline: int, finding: str, tmp_path: Path
) -> None:
    """The rank that can raises and saves, after half of the time to stop."""
    with ranks.RankProcesses(hold_rank_one, 2, tmp_path, deadline=deadline) as processes:
        processes.wait_for("in step 1", rank=1)
        if is_stopped:
            processes.kill(1, signal.SIGSTOP)
        processes.kill(0, signal.SIGTERM)
        [other] = processes.wait(0)
        assert other.exit_code == 1
        assert "RankAbsentError" in other.output
        assert finding in other.output
        assert "saved step 1 to" in other.output
        processes.kill(1, signal.SIGCONT)
        [stuck] = processes.wait(1)
        assert stuck.exit_code != 0
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == [STOP_CHECKPOINT]
