"""All processes of a run end if one of its ranks does, or the process that started them.

First the ranks are scripts, which a script started; then they are functions, which a process
that is not a rank forked (the other start methods differ only in their imports). The process
that starts ranks is one of the harness, which has imported everything. Every test fails if
one of its processes is left.

``tests.launchers.test_launchers`` has torchrun, and ``tests.faults`` kills in the middle of
training.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.supervision.started_ranks import ChildScripts
from tests.harness.environment import MARK, marked, wait_until_exited
from tests.harness.ranks import (
    RankProcesses,
    announce,
    free_port,
    rank_name,
)
from tests.harness.scripts import be_the_script, run_script
from tests.harness.training import At, Net, boom, die, in_step, make_trainer, wait_for_ever

# Ranks are scripts.


# Trains with the strategy of the first argument. Each rank prints that it begins before it
# imports anything. The second argument is what rank 1 then does: it ``stays`` there; or,
# after the training, it ``lingers``, ``raises`` or ``dies``.
SCRIPT = """
import atexit
import multiprocessing
import os
import re
import sys
import threading


def rank_by_variables():
    found = re.match(r"SpawnProcess-(?:.*:)?(\\d+)$", multiprocessing.current_process().name)
    if found:
        return int(found[1]) - 1
    return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None


def print_line(text):
    sys.stdout.write(f"{text}\\n")
    sys.stdout.flush()


started = rank_by_variables()
if started is not None:
    print_line(f"rank {started} begins as process {os.getpid()}")
    if started == 1 and "stays" in sys.argv:
        threading.Event().wait()

import lightning_ddp_ext
from tests.harness import training

AFTER_FIT = {
    "lingers": training.wait_for_another_ranks_end,
    "raises": training.boom,
    "dies": training.die,
}


def main(strategy, end):
    trainer = training.make_trainer(strategy, max_epochs=1, limit_val_batches=0)
    if end in AFTER_FIT:
        atexit.register(print, "exit handlers ran")  # buffered, and registered before ours
    trainer.fit(training.Net())
    if trainer.global_rank == 1 and end in AFTER_FIT:
        AFTER_FIT[end]()
    print_line(f"rank {trainer.global_rank} is at the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def training_script(
    directory: Path, strategy: str, rank_one: str = "", **env: str
) -> RankProcesses:
    """Return the processes of the harness that run the script: one, which starts the ranks."""
    path = directory / "script.py"
    path.write_text(SCRIPT)
    return RankProcesses(
        be_the_script,
        1,
        path,
        (strategy, rank_one),
        directory,
        env={**env, MARK: mark_of_script()},
    )


def mark_of_script() -> str:
    """Return the mark of the script and all processes that it starts."""
    return f"{os.environ[MARK]}/script"


def wait_for_rank_one(script: RankProcesses) -> int:
    """Wait until rank 1 has started, before it imports anything; return its process id."""
    output = script.wait_for_output("rank 1 begins as process", 0)
    return int(re.findall(r"^rank 1 begins as process (\d+)$", output, re.MULTILINE)[0])


@pytest.mark.parametrize(
    ("strategy", "verdict"),
    [
        ("ddp_ext", "was killed by SIGKILL before all ranks had connected"),
        pytest.param("ddp_ext_spawn", "died: it was killed by SIGKILL", marks=pytest.mark.nightly),
    ],
)
def test_a_kill_during_start_up_is_reported_by_the_launcher(
    strategy: str, verdict: str, tmp_path: Path
) -> None:
    """The error names a rank that was killed before it imported anything, long before
    ``init_timeout``.
    """
    with training_script(tmp_path, strategy, "stays") as script:
        pid = wait_for_rank_one(script)
        os.kill(pid, signal.SIGKILL)
        (done,) = script.wait()
    assert done.exit_code == 1
    assert f"local {rank_name(1, pid)} {verdict}" in done.output, done.output


@pytest.mark.nightly
def test_a_rank_that_is_orphaned_while_it_starts_ends(tmp_path: Path) -> None:
    """If its launcher is killed during the imports, the rank exits once it looks for it."""
    with training_script(
        tmp_path, "ddp_ext", DDPX_INIT_METHOD=f"tcp://127.0.0.1:{free_port()}"
    ) as script:
        wait_for_rank_one(script)
        script.kill(0)
        script.wait()
        assert not wait_until_exited(lambda: marked(mark_of_script()), 60.0)


@pytest.mark.nightly
def test_the_launching_rank_waits_for_those_that_still_work(tmp_path: Path) -> None:
    """Rank 0 started the others and exits after them; a rank that still works after
    ``fit`` is not an orphan.
    """
    url = f"file://{tmp_path}/store"
    with training_script(tmp_path, "ddp_ext", "lingers", DDPX_INIT_METHOD=url) as script:
        (done,) = script.wait()
        assert not marked(mark_of_script())
    assert done.exit_code == 0, done.output
    assert "rank 1 is at the end" in done.output.splitlines(), done.output
    assert f"process group: gloo, 2 ranks, {url}" in done.output


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        pytest.param("raises", "exited with status 1", marks=pytest.mark.nightly),
        ("dies", "was killed by SIGKILL"),
    ],
)
def test_a_script_reports_a_rank_that_failed_after_fit(end: str, verdict: str) -> None:
    """It started this rank, and exits with its own status."""
    output = run_script(SCRIPT, "ddp_ext", end)
    # Not at the beginning of a line: a library's report at exit may lack a final line break.
    assert re.search(rf"local rank 1 \(pid \d+\) {verdict}$", output, re.MULTILINE), output
    # A killed rank runs none of its exit handlers.
    assert output.count("exit handlers ran\n") == (2 if end == "raises" else 1), output


class InTheKernel(subprocess.Popen[bytes]):
    """A process that no signal ends, as one that waits for a broken device."""

    def send_signal(self, sig: int) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "save_within", "status", "verdict"),
    [
        (subprocess.Popen, 60.0, -signal.SIGTERM, "did not exit within 0.1 s and was stopped"),
        (InTheKernel, 0.1, None, "is still running although it was killed"),
    ],
)
def test_a_stuck_child_is_stopped_after_the_time_limit(
    kind: type[subprocess.Popen[bytes]],
    save_within: float,
    status: int | None,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script that has finished stops a rank that it started, and names it, even if the
    rank does not exit.
    """
    monkeypatch.delattr(sys, "last_value", raising=False)  # of another test that has failed
    with kind(["sleep", "99"]) as child:
        ChildScripts([child], {}, exit_within=0.1, save_within=save_within).join_at_exit()
        assert child.returncode == status
        subprocess.Popen.send_signal(child, signal.SIGKILL)  # does nothing if it has exited
    assert capsys.readouterr().err == f"local rank 1 (pid {child.pid}) {verdict}\n"


# Ranks are forked functions.


def train(
    rank: int, world_size: int, directory: Path, *callbacks: At, max_epochs: int, save_deadline: int
) -> None:
    """Start two ranks from this process, which is not a rank; the deadline is also that of
    a survivor in its step.
    """
    make_trainer(
        ddpx.DDPExtStrategy(start_method="fork", save_deadline=save_deadline),
        callbacks=[*callbacks],
        max_epochs=max_epochs,
        limit_val_batches=0,
        default_root_dir=directory,
    ).fit(Net())


def announce_step(*_: object) -> None:
    announce("at work", (dist.get_rank(), os.getpid()))


def pids_of_ranks(launching: RankProcesses) -> dict[int, int]:
    """Wait until both ranks have announced a step; their process ids by rank."""
    return dict(launching.wait_for("at work", 0) for _ in range(2))


def leave(*_: object) -> None:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("faults", "culprit", "sentences"),
    [
        pytest.param(
            [in_step(boom, 1)],
            1,
            [
                "[rank 0] RankFailedError: {} failed, so this rank stops: BoomError: no such layer",
                '    raise BoomError("no such layer")',  # in the traceback of rank 1
            ],
            id="raises",
        ),
        pytest.param(
            [in_step(wait_for_ever, 0), in_step(die, 1)],
            1,
            [
                "[rank 0] RankDiedError: {} died: its process ended unexpectedly; every rank"
                " stops.",
                "errors.RankDiedError: local {} died: it was killed by SIGKILL; the other ranks"
                " were",
            ],
            id="dies",
        ),
        pytest.param(
            [in_step(leave)],
            0,
            ["errors.RankFailedError: local {} exited with status 0 before it finished its work;"],
            id="exits with status 0",
        ),
    ],
)
def test_the_launching_process_names_a_rank_that_ends_early(
    faults: list[At], culprit: int, sentences: list[str], tmp_path: Path
) -> None:
    """It raises the exception of the rank, or an error with the reason; a rank in its step
    prints a line.
    """
    with RankProcesses(
        train,
        1,
        tmp_path,
        At("setup", announce_step),
        *faults,
        max_epochs=1,
        save_deadline=5,
    ) as launching:
        pids = pids_of_ranks(launching)
        (outcome,) = launching.wait()
    assert outcome.exit_code == 1, outcome.story()
    for sentence in sentences:
        assert sentence.format(rank_name(culprit, pids[culprit])) in outcome.output, outcome.story()


@pytest.mark.parametrize(
    ("number", "status", "sentence"),
    [
        (signal.SIGTERM, 143, "all ranks stop after step"),
        (signal.SIGINT, 1, "Detected KeyboardInterrupt"),
    ],
)
def test_a_signal_to_the_launching_process_alone_ends_the_ranks(
    number: int, status: int, sentence: str, tmp_path: Path
) -> None:
    """The ranks save and stop; SIGTERM and Ctrl-C give different exit statuses.

    In a notebook, only the kernel gets Ctrl-C, not its children.
    """
    with RankProcesses(
        train,
        1,
        tmp_path,
        At("on_train_batch_start", announce_step, earlier=2),
        max_epochs=-1,
        save_deadline=60,
    ) as launching:
        pids_of_ranks(launching)
        launching.kill(0, number)
        (outcome,) = launching.wait()
    assert outcome.exit_code == status, outcome.story()
    assert sentence in outcome.output, outcome.story()
    assert list(tmp_path.rglob("last-preempted.ckpt"))
