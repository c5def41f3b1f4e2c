"""After a signal to any rank, all ranks save and stop after the same step, and the same
command continues there. On SLURM, the ranks save before the time limit, and the requeued job
resumes. Handlers that a process had before are called, and restored.

``test_resume_sweep`` and ``test_stop_sweep`` compare resumed runs with runs that were
not stopped.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness import ranks, training
from tests.harness.environment import Environment, by_srun
from tests.harness.scripts import run_script
from tests.integration import checkpointing, continuing

SIGTERM_STATUS = 128 + signal.SIGTERM
FROM_START = "from the start"
RESUMED = "resumed"


class Place(NamedTuple):
    """Where a run saves when it is stopped, below its root directory, and the options
    that choose this, made on a rank from that directory.
    """

    pattern: str
    options: Callable[[Path], dict[str, Any]]


STOP_CHECKPOINT = "last-preempted.ckpt"  # by default
OF_COMMAND = "checkpoints/*-????????-1/last-preempted.ckpt"
PLACES = {
    "as Lightning chooses": Place(OF_COMMAND, lambda root: {"logger": True}),
    "no logger": Place(OF_COMMAND, lambda root: {}),
    "no callback": Place(OF_COMMAND, lambda root: {"logger": True, "enable_checkpointing": False}),
    "dirpath": Place(
        "own/*-????????-1/last-preempted.ckpt",
        lambda root: {"callbacks": [ModelCheckpoint(root / "own")]},
    ),
    "name": Place(
        "checkpoints/*-????????-1/stop.ckpt", lambda root: {"stop_checkpoint": "stop.ckpt"}
    ),
    "path": Place(
        "given/stop.ckpt",
        lambda root: {"logger": True, "stop_checkpoint": f"{root}/given/stop.ckpt"},
    ),
}
STEPS = 6  # of two epochs on two ranks


def run_command(place: Place, root: Path, *callbacks: L.Callback, **options: Any) -> continuing.Run:
    """Run a command for two epochs, from its last checkpoint if there is one."""
    defaults = {"enable_checkpointing": True, "ckpt_path": "last"}
    chosen: dict[str, Any] = {**defaults, **place.options(root), **options}
    strategy = {"stop_checkpoint": chosen.pop("stop_checkpoint", STOP_CHECKPOINT)}
    chosen["callbacks"] = [*chosen.pop("callbacks", ()), *callbacks]
    command = continuing.Training(continuing.shuffled(), root.parent, strategy=strategy)
    run = command.run(max_epochs=2, default_root_dir=root, **chosen)
    dist.barrier()  # loggers of the next run look for directories of this one
    return run


def begin_of(run: continuing.Run) -> str:
    return FROM_START if run.steps[0].moment == (0, 0) else RESUMED


def signal_rank_one(signum: int = signal.SIGTERM) -> L.Callback:
    """Return a callback that sends a signal to rank 1 in its second step."""
    return training.signalled("on_train_batch_end", 1, signum, ranks=[1])


def run_twice(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Run a command that is stopped, and run it again."""
    place = PLACES[name]
    root = directory / name
    stopped = run_command(place, root, signal_rank_one())
    assert stopped.status == SIGTERM_STATUS
    assert len(list(root.glob(place.pattern))) == 1
    dist.barrier()
    resumed = run_command(place, root)
    assert (resumed.status, begin_of(resumed)) == (None, RESUMED)
    assert len(stopped.steps + resumed.steps) == STEPS
    assert [*root.rglob(Path(place.pattern).name), *root.rglob("*-????????-1")] == []


@pytest.mark.parametrize(
    "name",
    [  # one of them is enough for `make fast`
        pytest.param(name, marks=[pytest.mark.lowest] * (name == "no logger")) for name in PLACES
    ],
)
def test_the_same_command_continues_wherever_it_saves(name: str, tmp_path: Path) -> None:
    """The directory may be new in each run. A finished run leaves neither the stop checkpoint
    nor its folder.
    """
    ranks.run_ranks(run_twice, 2, tmp_path, name)


def run_alone(
    rank: int,
    world_size: int,
    directory: Path,
    *words: str,
    stops: bool,
    ckpt_path: str | None = "last",
    trial: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Run a command with these words, to its end or until a stop in its second step;
    return where it begins.
    """
    sys.argv = ["train.py", *words]
    command = continuing.Training(continuing.shuffled(), directory, devices=1)
    run = command.run(
        callbacks=[training.signalled("on_train_batch_end", 1)] if stops else [],
        ckpt_path=ckpt_path,
        logger=True,
        enable_checkpointing=True,
        max_epochs=2,
        default_root_dir=directory,
        **trial,
    )
    return begin_of(run) if run.steps else "without a step"


def launch_alone(directory: Path, *words: str, **options: Any) -> ranks.Outcome:
    [outcome] = ranks.launch_ranks(run_alone, 1, directory, *words, **options)
    assert outcome.exit_code == 0, outcome.story()
    return outcome


def test_another_command_leaves_a_stop_checkpoint(tmp_path: Path) -> None:
    """Two experiments may share a directory. One line names the folder that is left.

    A first run logs where it would save.
    """
    first = launch_alone(tmp_path, "--lr", "1", stops=True)
    assert first.result == FROM_START
    line = "ckpt_path='last': no checkpoint yet; if the run ends early, it saves "
    assert first.output.count(line) == 1
    [left] = tmp_path.glob("checkpoints/*-????????-1")
    other = launch_alone(tmp_path, "--lr", "2", stops=False)
    assert other.result == FROM_START
    assert f"in {left.parent}, {left.name} belong to other commands or fits" in other.output
    same = launch_alone(tmp_path, "--lr", "1", "--ckpt_path", "last", stops=False)
    assert same.result == RESUMED


def test_a_trial_run_keeps_the_stop_checkpoint(tmp_path: Path) -> None:
    """A trial run finishes without a step, so the next run still needs the file."""
    launch_alone(tmp_path, stops=True)
    for trial in ({"fast_dev_run": True}, {"limit_train_batches": 0}):
        assert launch_alone(tmp_path, stops=False, trial=trial).result == "without a step"
    assert launch_alone(tmp_path, stops=False).result == RESUMED


def cross_validate(
    rank: int, world_size: int, directory: Path, stopped_fold: int | None
) -> list[str]:
    """Return where each fold begins, until one is stopped."""
    begins = []
    for fold in range(3):
        callbacks = [signal_rank_one()] if fold == stopped_fold else []
        run = run_command(PLACES["as Lightning chooses"], directory / "folds", *callbacks)
        begins.append(begin_of(run))
        if run.status is not None:
            break
    return begins


def test_each_fit_of_a_script_finds_its_own_stop_checkpoint(tmp_path: Path) -> None:
    """No fold of a cross-validation resumes from or replaces another fold's file."""

    def run_again(stopped_fold: int | None) -> list[str]:
        first, second = ranks.run_ranks(cross_validate, 2, tmp_path, stopped_fold)
        assert first == second
        return list(first)

    assert run_again(1) == [FROM_START, FROM_START]
    assert run_again(0) == [FROM_START]
    assert len(list(tmp_path.rglob("*preempted*.ckpt"))) == 2
    assert run_again(None) == [RESUMED, RESUMED, FROM_START]
    assert not [path for path in tmp_path.rglob("*.ckpt") if "epoch" not in path.name]


def save_by_a_callback(rank: int, world_size: int, directory: Path, stops: bool) -> str:
    """Run a command whose ``ModelCheckpoint`` saves to the path of the stop checkpoint;
    return where it begins.
    """
    saver = ModelCheckpoint(directory, save_last=True)
    place = Place("last.ckpt", lambda root: {"stop_checkpoint": directory / "last.ckpt"})
    callbacks = [saver, signal_rank_one()] if stops else [saver]
    return begin_of(run_command(place, directory / "run", *callbacks))


def test_a_finished_run_keeps_a_file_that_it_has_written_again(tmp_path: Path) -> None:
    """Only the file that it resumed from is removed, and only if it is unchanged since."""
    ranks.run_ranks(save_by_a_callback, 2, tmp_path, True)
    assert ranks.run_ranks(save_by_a_callback, 2, tmp_path, False) == [RESUMED, RESUMED]
    [last] = tmp_path.glob("last*.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == STEPS


COMMAND = """
import os
import signal
from pathlib import Path

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_ddp_ext


class Ending(L.Callback):
    def on_train_start(self, trainer, module):
        print(f"starts at step {trainer.global_step}", flush=True)

    def on_train_batch_start(self, trainer, *_):
        if str(trainer.global_step) == os.environ["ENDS_AT"]:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    trainer = L.Trainer(
        strategy="ddp_ext",
        devices=1,
        accelerator="cpu",
        max_epochs=1,
        default_root_dir="run",
        enable_progress_bar=False,
        callbacks=[Ending()],
    )
    trainer.fit(BoringModel(), ckpt_path="last")
"""
BY_TORCHRUN = "python -m torch.distributed.run --nproc-per-node=1 $0"


def test_a_command_continues_however_it_is_started(tmp_path: Path) -> None:
    """Each of three runs continues the one before, with a relative root directory."""
    script = tmp_path / "train.py"
    script.write_text(COMMAND)
    (tmp_path / "elsewhere").mkdir()
    starts = ["python train.py", "cd elsewhere; python ../train.py", BY_TORCHRUN]
    ends = [("10", SIGTERM_STATUS), ("20", SIGTERM_STATUS), ("", 0)]
    for start, step, (ends_at, exit_code) in zip(starts, (0, 11, 21), ends, strict=True):
        options = {"launcher": ("sh", "-c", start), "env": {"ENDS_AT": ends_at}}
        output = run_script(script, cwd=tmp_path, exit_code=exit_code, **options)
        assert f"starts at step {step}\n" in output
    assert not list(tmp_path.rglob("*preempted*"))
    assert not list(tmp_path.rglob("train-*"))


# Jobs of SLURM.


def run_job(
    rank: int, world_size: int, directory: Path, *, is_stopped: bool, ckpt_path: str | None = None
) -> str:
    """Train in a directory that all jobs share; return where the run begins.

    If ``is_stopped``, the signal that announces the time limit of a job stops the run.
    """
    time_limit = training.signalled("on_train_batch_end", 1, signal.SIGUSR1, ranks=[1])
    callbacks = [time_limit] if is_stopped else []
    place = PLACES["no callback"]
    return begin_of(run_command(place, directory / "run", *callbacks, ckpt_path=ckpt_path))


def requeued(job: Environment) -> Environment:
    return {**job, "SLURM_RESTART_COUNT": "1"}


def stop_job(directory: Path, job: Environment) -> Path:
    """Stop a job; return its checkpoint."""
    earlier = set(directory.rglob("*.ckpt"))
    outcome, _ = ranks.launch_ranks(run_job, 2, directory, env=job, is_stopped=True)
    assert outcome.result == FROM_START, outcome.story()
    assert "the ranks will finish the current step, save and stop" in outcome.output
    assert f"SLURM did not requeue job {job['SLURM_JOB_ID']}" in outcome.output
    [saved] = set(directory.rglob("*.ckpt")) - earlier
    assert job["SLURM_JOB_ID"] in saved.parent.name
    return saved


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_a_requeued_job_resumes_from_its_own_file(ckpt_path: str | None, tmp_path: Path) -> None:
    """As with stock, no ``ckpt_path`` is needed. Another job of the same command leaves a newer
    file, which stays; a finished job leaves none.
    """
    job = by_srun()
    own = stop_job(tmp_path, job)
    newer = stop_job(tmp_path, by_srun())
    options = {"env": requeued(job), "is_stopped": False, "ckpt_path": ckpt_path}
    outcomes = ranks.launch_ranks(run_job, 2, tmp_path, **options)
    assert [outcome.result for outcome in outcomes] == [RESUMED] * 2, outcomes[0].story()
    assert f"from the checkpoint path at {own}\n" in outcomes[0].output
    assert list(tmp_path.rglob("*.ckpt")) == [newer]


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_another_job_resumes_only_if_it_is_asked_to(ckpt_path: str | None, tmp_path: Path) -> None:
    """A job without a file of its own, requeued or not, continues an earlier one with "last"."""
    saved = stop_job(tmp_path, by_srun())
    options = {"env": requeued(by_srun()), "is_stopped": False, "ckpt_path": ckpt_path}
    outcomes = ranks.launch_ranks(run_job, 2, tmp_path, **options)
    begin = FROM_START if ckpt_path is None else RESUMED
    assert [outcome.result for outcome in outcomes] == [begin] * 2, outcomes[0].story()
    assert saved.exists() is (ckpt_path is None)


# Signals, and what happens beside them.


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
    """The callbacks and the strategy of a run, and how it ends."""

    callbacks: list[L.Callback]
    status: int = SIGTERM_STATUS
    checkpoints: Sequence[str] = (STOP_CHECKPOINT,)
    strategy: Mapping[str, Any] = {}


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
    inner = training.make_trainer(strategy, limit_val_batches=2)
    inner.validate(training.Net(), verbose=False)


# What happens beside a signal, the exit status, and the files.
STOPS = {
    "without a stop checkpoint": Stop(
        [signal_rank_one()], SIGTERM_STATUS, [], {"stop_checkpoint": None}
    ),
    "a step that resets the signal's wake-up descriptor": Stop(
        [training.At(STEP_START, lose_wakeup), signal_rank_one()]
    ),
    "a step that runs another Trainer": Stop(
        [training.At(STEP_START, validate_in_step), signal_rank_one()]
    ),
    # As with stock, a second Ctrl-C exits immediately.
    "a second interrupt": Stop(
        [training.signalled(STEP_START, signum=signal.SIGINT) for _ in range(2)], 1, []
    ),
}


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_a_signal_to_any_rank_stops_all(stop: Stop, tmp_path: Path) -> None:
    """All ranks exit with the same status before their last step, and leave the stop
    checkpoint.
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
        assert end.status == SIGTERM_STATUS
        assert end.checkpoints == [STOP_CHECKPOINT]


def stop_process_group(
    rank: int, world_size: int, directory: Path, context: str, signum: int
) -> End:
    """Send a signal to rank 1 and its loader's worker, in the third of an epoch's 30 steps."""
    os.setpgid(0, 0)  # the rank and its worker are a process group
    loaders = continuing.shuffled(120, num_workers=1, multiprocessing_context=context)
    send = training.At(STEP_START, lambda _: os.killpg(0, signum), earlier=2, ranks=[1])
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


def stop_beside_handler(rank: int, world_size: int, directory: Path) -> list[int]:
    """Send SIGTERM to rank 1 of ranks that have a handler for it; return the signals that
    the handler got.
    """
    passed_on: list[int] = []

    def handle(number: int, frame: object) -> None:
        passed_on.append(number)

    signal.signal(signal.SIGTERM, handle)
    end = fit(rank, world_size, directory, signal_rank_one())
    assert end.status == SIGTERM_STATUS
    assert signal.getsignal(signal.SIGTERM) is handle
    return passed_on


def test_a_signal_is_passed_on_to_the_users_handler(tmp_path: Path) -> None:
    """The user's earlier handler is called, and restored afterwards."""
    assert ranks.run_ranks(stop_beside_handler, 2, tmp_path) == [[], [signal.SIGTERM]]


def train_in_background(rank: int, world_size: int, directory: Path) -> End:
    """Ignore Ctrl-C, as in a shell's background; send it to rank 1, and then to all."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = fit(rank, world_size, directory, signal_rank_one(signum=signal.SIGINT))
    os.kill(os.getpid(), signal.SIGINT)  # ends a rank that no longer ignores it
    return end


def test_a_signal_that_a_process_ignores_stops_nothing(tmp_path: Path) -> None:
    """All ranks train to the end, and afterwards still ignore it."""
    for end in ranks.run_ranks(train_in_background, 2, tmp_path):
        assert end == End(None, [], STEPS)


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


def hold_rank_one(rank: int, world_size: int, directory: Path, deadline: int) -> None:
    """Train with a short default timeout for sockets, while rank 1 is stuck in a step."""
    socket.setdefaulttimeout(0.001)
    stick = training.At(STEP_START, lambda _: ranks.hold("in step 1"), earlier=1, ranks=[1])
    fit(rank, world_size, directory, stick, strategy={"save_deadline": deadline})


SAVED = ["RankAbsentError", "saved step 1 to"]


@pytest.mark.parametrize(
    ("signum", "deadline", "exit_code", "findings"),
    [
        pytest.param(
            signal.SIGSTOP,
            1,
            SIGTERM_STATUS,
            ["not stopped within 1 s (save_deadline), and rank 1 (host"],
            id="no time to find out",
        ),
        pytest.param(
            signal.SIGCONT,
            6,
            1,
            [*SAVED, "half of save_deadline, 3 s, but rank 1 (host"],
            id="own code",
        ),
        pytest.param(
            signal.SIGSTOP,
            30,
            1,
            [*SAVED, "has not answered"],
            id="SIGSTOP",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_last_step_is_saved_though_a_rank_does_not_stop(
    signum: int, deadline: int, exit_code: int, findings: list[str], tmp_path: Path
) -> None:
    """The rank that can raises and saves, after half of the time to stop; with little time, it
    exits with the signal's status, and names the stuck rank.
    """
    with ranks.RankProcesses(hold_rank_one, 2, tmp_path, deadline) as processes:
        processes.wait_for("in step 1", rank=1)
        processes.kill(1, signum)
        processes.kill(0, signal.SIGTERM)
        [other] = processes.wait(0)
        processes.kill(1, signal.SIGCONT)
        [stuck] = processes.wait(1)
    assert (other.exit_code, stuck.exit_code == 0) == (exit_code, False), other.story()
    assert [finding for finding in findings if finding not in other.output] == []
    saved = [STOP_CHECKPOINT] if exit_code == 1 else []
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == saved
