"""After a signal to any rank, all ranks save and stop after the same step, whatever happens
meanwhile and even if a rank is stuck; the user's own signal handlers are called.

``test_stop_files`` shows where they save, and ``test_resume_sweep`` and ``test_stop_sweep``
compare resumed runs with runs that were not stopped.
"""

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch.distributed as dist

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness import ranks, training
from tests.integration import checkpointing, continuing

STOP_CHECKPOINT = "last-preempted.ckpt"  # by default
STEPS = 6  # of two epochs on two ranks
STEP_START = "on_train_batch_start"
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


class Stop(NamedTuple):
    """The callbacks of a run, which send a signal and do other things, its exit status, the
    checkpoints that it leaves, and options of the strategy.
    """

    callbacks: list[L.Callback]
    status: int = training.STOPPED
    checkpoints: Sequence[str] = (STOP_CHECKPOINT,)
    strategy: Mapping[str, Any] = {}


def fit(
    rank: int,
    world_size: int,
    directory: Path,
    *callbacks: L.Callback,
    strategy: Mapping[str, Any] = MappingProxyType({}),
    loaders: Callable[[], Any] | None = None,
) -> End:
    """Train for two epochs, by default of three steps, or until all stop."""
    two_epochs = continuing.Training(
        loaders or continuing.shuffled(),
        directory,
        strategy=dict(strategy),
        options={"max_epochs": 2, "default_root_dir": directory / "run"},
    )
    run = two_epochs.run(callbacks=callbacks)
    return End(run.status, sorted(path.name for path in directory.rglob("*.ckpt")), len(run.steps))


def test_a_failed_run_ends_in_order_after_a_launchers_sigterm(tmp_path: Path) -> None:
    """The rank names the dead one and exits, and does not announce that it would stop."""
    kill = training.signalled(STEP_START, 1, signal.SIGKILL, ranks=[0])
    terminate = training.signalled("on_exception")  # as a launcher does
    _, survivor = ranks.launch_ranks(fit, 2, tmp_path, kill, terminate)
    assert survivor.exit_code == 1, survivor.story()
    assert survivor.failure.type_name == "RankDiedError"
    assert "will finish the current step" not in survivor.output


def lose_wakeup(trainer: L.Trainer) -> None:
    """Do what asyncio does when its loop ends."""
    signal.set_wakeup_fd(-1)


def validate_in_step(trainer: L.Trainer) -> None:
    """Run another Trainer."""
    strategy = training.make_strategy("ours", Path(trainer.default_root_dir).parent)
    training.make_trainer(strategy, limit_val_batches=2).validate(training.Net(), verbose=False)


# What happens beside a signal, and how the run ends.
STOPS = {
    "without a stop checkpoint": Stop(
        [continuing.signal_rank_one()], training.STOPPED, [], {"stop_checkpoint": None}
    ),
    "a step that resets the signal's wake-up descriptor": Stop(
        [training.At(STEP_START, lose_wakeup), continuing.signal_rank_one()]
    ),
    "a step that runs another Trainer": Stop(
        [training.At(STEP_START, validate_in_step), continuing.signal_rank_one()]
    ),
    # As with stock, a second Ctrl-C exits immediately.
    "a second interrupt": Stop(
        [training.signalled(STEP_START, signum=signal.SIGINT) for _ in range(2)], 1, []
    ),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_signal_to_any_rank_stops_all(stop: Stop, tmp_path: Path) -> None:
    """All ranks exit with the same status before their last step, and leave the stop
    checkpoint, unless it is switched off, or a second interrupt asks for an exit.
    """
    for end in ranks.run_ranks(fit, 2, tmp_path, *stop.callbacks, strategy=stop.strategy):
        assert (end.status, end.checkpoints) == (stop.status, [*stop.checkpoints])
        assert end.steps < STEPS


def stop_after_failed_save(rank: int, world_size: int, directory: Path) -> End:
    """Save in the background below a device, and send SIGTERM to rank 1 in this step."""
    save = training.At("on_train_batch_end", lambda trainer: trainer.save_checkpoint(IN_DEVICE))
    stop = training.signalled("on_train_batch_end", ranks=[1])
    strategy = {"checkpoint_io": checkpointing.FailsWhenAwaited(lambda path: path == IN_DEVICE)}
    return fit(rank, world_size, directory, save, stop, strategy=strategy)


def test_the_stop_checkpoint_is_saved_also_after_a_save_that_failed(tmp_path: Path) -> None:
    """The save of the stop does not raise the error of an earlier one in the background."""
    for end in ranks.run_ranks(stop_after_failed_save, 2, tmp_path):
        assert end.status == training.STOPPED
        assert end.checkpoints == [STOP_CHECKPOINT]


def stop_process_group(
    rank: int, world_size: int, directory: Path, context: str, signum: int
) -> End:
    """Send a signal to rank 1 and its loader's worker, in the third of an epoch's 30 steps."""
    os.setpgid(0, 0)  # the rank and its worker are a process group
    loaders = continuing.shuffled(120, num_workers=1, multiprocessing_context=context)
    send = training.At(STEP_START, lambda _: os.killpg(0, signum), earlier=2, ranks=[1])
    return fit(rank, world_size, directory, send, loaders=loaders)


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


def stop_beside_handler(rank: int, world_size: int, directory: Path) -> list[int]:
    """Send SIGTERM to rank 1 of ranks that have a handler for it; return the signals that
    the handler got.
    """
    passed_on: list[int] = []

    def handle(number: int, frame: object) -> None:
        passed_on.append(number)

    signal.signal(signal.SIGTERM, handle)
    end = fit(rank, world_size, directory, continuing.signal_rank_one())
    assert end.status == training.STOPPED
    assert signal.getsignal(signal.SIGTERM) is handle
    return passed_on


def test_a_signal_is_passed_on_to_the_users_handler(tmp_path: Path) -> None:
    """The user's earlier handler is called, and restored afterwards."""
    assert ranks.run_ranks(stop_beside_handler, 2, tmp_path) == [[], [signal.SIGTERM]]


def train_in_background(rank: int, world_size: int, directory: Path) -> End:
    """Ignore Ctrl-C, as in a shell's background; send it to rank 1, and then to all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = fit(rank, world_size, directory, continuing.signal_rank_one(signum=signal.SIGINT))
    os.kill(os.getpid(), signal.SIGINT)  # ends a rank that no longer ignores it
    return end


def test_a_signal_that_a_process_ignores_stops_nothing(tmp_path: Path) -> None:
    """All ranks train to the end, and afterwards still ignore it."""
    for end in ranks.run_ranks(train_in_background, 2, tmp_path):
        assert end == End(None, [], STEPS)


# Each Trainer function that evaluates, and a hook that it calls.
EVALUATIONS = {
    "validate": "on_validation_batch_start",
    "test": "on_test_batch_end",
    "predict": "on_predict_start",
}


def stop_evaluations(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Send SIGTERM to rank 1 in each evaluation; return their exit statuses."""
    statuses = []
    for function, hook in EVALUATIONS.items():
        trainer = training.make_trainer(
            training.make_strategy("ours", directory),
            callbacks=[training.signalled(hook, ranks=[1])],
            default_root_dir=directory / "run",
        )
        evaluate = getattr(trainer, function)
        statuses.append(training.raised(SystemExit, evaluate, training.Net()).code)
    return statuses


def test_an_evaluation_stops_on_all_ranks_without_a_file(tmp_path: Path) -> None:
    """After a signal to one rank, all ranks exit with its status."""
    assert ranks.run_ranks(stop_evaluations, 2, tmp_path) == [[training.STOPPED] * 3] * 2
    assert not list(tmp_path.rglob("*.ckpt"))


class SignalsAtTheEnd(RankZeroCheckpointIO):
    """Sends SIGTERM to this process when the Trainer's run is over on all ranks."""

    def teardown(self) -> None:
        dist.barrier()
        os.kill(os.getpid(), signal.SIGTERM)
        super().teardown()


def test_sigterm_ends_a_process_after_its_last_step(tmp_path: Path) -> None:
    """A signal has its usual effect if it arrives too late to stop a run."""
    for outcome in ranks.launch_ranks(
        fit, 2, tmp_path, strategy={"checkpoint_io": SignalsAtTheEnd()}
    ):
        assert outcome.exit_code == -signal.SIGTERM, outcome.story()


def hold_after_step_1(
    rank: int, world_size: int, directory: Path, deadline: int, point: str
) -> None:
    """Train with a short default timeout for sockets, and hold both ranks at a point after
    step 1. The test releases rank 0, which then waits for rank 1.
    """
    socket.setdefaulttimeout(0.001)
    earlier = {"on_train_batch_end": 0, STEP_START: 1}[point]
    held = training.At(point, lambda _: ranks.hold("after step 1"), earlier=earlier)
    fit(rank, world_size, directory, held, strategy={"save_deadline": deadline})


SAVED = ["RankAbsentError", "saved step 1 to"]


@pytest.mark.parametrize(
    ("point", "signum", "deadline", "exit_code", "findings"),
    [
        pytest.param(
            STEP_START,
            signal.SIGSTOP,
            1,
            training.STOPPED,
            ["not stopped within 1 s (save_deadline), and rank 1 (host"],
            id="no time to find out",
        ),
        pytest.param(
            STEP_START,
            signal.SIGCONT,
            12,
            1,
            [*SAVED, "half of save_deadline, 6 s, but rank 1 (host"],
            id="own code",
        ),
        pytest.param(
            STEP_START,
            signal.SIGSTOP,
            30,
            1,
            [*SAVED, "has not answered", "waited in a collective"],
            id="SIGSTOP, in a step",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "on_train_batch_end",
            signal.SIGSTOP,
            30,
            1,
            [*SAVED, "has not answered; rank 0 has waited at its stop point for half of"],
            id="SIGSTOP, between two steps",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_rank_that_does_not_stop_is_named_in_time_to_save(
    point: str, signum: int, deadline: int, exit_code: int, findings: list[str], tmp_path: Path
) -> None:
    """The rank that can raises and saves, after half of the time to stop; with little time, it
    exits with the signal's status, and names the stuck rank.
    """
    with ranks.RankProcesses(hold_after_step_1, 2, tmp_path, deadline, point) as processes:
        processes.wait_for_all("after step 1")
        processes.kill(1, signum)
        processes.kill(0, signal.SIGTERM)
        processes.release(0)
        [other] = processes.wait(0)
        processes.kill(1, signal.SIGCONT)
        [stuck] = processes.wait(1)
    assert (other.exit_code, stuck.exit_code == 0) == (exit_code, False), other.story()
    assert [finding for finding in findings if finding not in other.output] == []
    saved = [STOP_CHECKPOINT] if exit_code == 1 else []
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == saved
