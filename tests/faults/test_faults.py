"""After a fault at any time all processes of a run end within the promised bound, and
nothing is lost.

1. A seed draws a case: how ranks are started, and which faults strike when.
2. The run starts, trains, is struck, and must end within the bound of the fault.
3. The exit codes, the output and the checkpoints are checked.
4. The same command runs again, and continues.

``make soak`` tries any number of seeds. This module is also the script that trains, as
``test_faults.py DIRECTORY WORLD_SIZE START_METHOD IS_BACKGROUND``.
"""

import contextlib
import errno
import os
import random
import re
import signal
import sys
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
import torch.distributed.run
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy, RankZeroCheckpoint, RankZeroCheckpointIO
from tests.harness.environment import Network
from tests.harness.ranks import (
    Outcome,
    RankProcesses,
    free_port,
    run_ranks,
)
from tests.harness.scripts import be_the_script, print_line
from tests.harness.training import STOPPED, make_trainer

STEPS = 16  # of an epoch
BATCH = 2
# Seconds; short, so that faults that only a limit ends do not take long.
LIMITS: dict[str, Any] = {"timeout": 6.0, "heartbeat_timeout": 3.0, "save_deadline": 8.0}
FAIL = signal.SIGUSR2  # has the training step raise
# By day a kill, an exception, a dead launching process, and a cut wire; `make nightly`
# draws 60 others.
SEEDS = (2, 18, 24, 37)
FIRST = int(os.environ.get("SOAK_SEED", 0))
COUNT = int(os.environ.get("SOAK_COUNT", 0))
TIME_LIMIT = 400.0  # seconds, of all processes of a run
SECONDS_TO_TRAIN = 240.0  # until all ranks report that they train
SECONDS_TO_DUMP = 60.0

FaultKind = Literal["kill", "raise", "cut", "stop", "term"]
# How ranks are started: by hand, by a script that is rank 0 (popen), or by a process
# that is not a rank itself.
Start = Literal["by hand", "by hand, two hosts", "popen", "torchrun", "fork", "spawn"]

SIGNALS: dict[FaultKind, int] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "raise": FAIL,
}
TWO_HOSTS: Start = "by hand, two hosts"
BY_HAND: tuple[Start, ...] = ("by hand", TWO_HOSTS)
LAUNCHED: tuple[Start, ...] = ("torchrun", "fork", "spawn")
# See "Maximum delays" in docs/guides/hangs.md. After a death the main thread
# raises or the process ends; what then runs, and the end of the process, each have the
# deadline of a save.
TO_END = 2 * LIMITS["save_deadline"]
BOUNDS: dict[FaultKind | Literal["launcher"], float] = {
    "kill": 3 + TO_END,
    "raise": 30 + TO_END,
    "cut": LIMITS["heartbeat_timeout"] + 3 + TO_END,
    "stop": LIMITS["timeout"] + 5 + 5 + TO_END,  # it is asked, and has 5 s to answer
    "term": LIMITS["save_deadline"],
    "launcher": 4 + LIMITS["save_deadline"],
}


@dataclass(frozen=True)
class Fault:
    """The fault of a rank or its launching process, and its time in seconds after all
    ranks began to train, or after the fault before.
    """

    kind: FaultKind
    rank: int | None  # None is the launching process
    after: float

    @property
    def bound(self) -> float:
        """Seconds from the fault to the end of all processes."""
        return BOUNDS["launcher" if self.rank is None else self.kind]

    def __str__(self) -> str:
        target = "launcher" if self.rank is None else self.rank
        return f"{self.kind} {target} after {self.after:.2f} s"


@dataclass(frozen=True)
class Case:
    seed: int
    start: Start
    world_size: int
    is_background: bool  # saves in the background, beside a loader worker
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        faults = ", then ".join(map(str, self.faults))
        during = "background saves" if self.is_background else "saves"
        return f"seed {self.seed}: {faults}, of {self.world_size} {self.start}, {during}"

    @property
    def kinds(self) -> set[FaultKind]:
        return {fault.kind for fault in self.faults}

    @property
    def bound(self) -> float:
        """Seconds from the last fault to the end of all processes."""
        return max(fault.bound for fault in self.faults)


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    chance = random.Random(seed)
    start = chance.choice((*BY_HAND, *BY_HAND, "popen", *LAUNCHED))
    is_start_fast = start in (*BY_HAND, "fork")  # the others import torch anew
    world_size = chance.choice((2, 3)) if is_start_fast else 2
    faults = draw_faults(chance, start, world_size)
    return Case(seed, start, world_size, chance.choice((False, True)), faults)


def draw_faults(chance: random.Random, start: Start, world_size: int) -> tuple[Fault, ...]:
    """Return a fault, and possibly one of another rank soon after it."""
    deadly: list[FaultKind] = ["kill", "kill", "term"]
    local: list[FaultKind] = [*deadly, "raise", "stop"]
    kind = chance.choice([*local, "cut"] if start == TWO_HOSTS else local)
    first, second = chance.sample(range(world_size), 2)
    can_strike_launcher = kind in deadly and start in LAUNCHED
    if can_strike_launcher and chance.random() < 0.4:
        return (Fault(kind, None, chance.uniform(0.0, 1.5)),)
    fault = Fault(kind, first, chance.uniform(0.0, 1.5))
    can_strike_twice = kind in (*deadly, "raise") and world_size == 3
    if can_strike_twice and chance.random() < 0.5:
        another = chance.choice(("kill", "term", "raise"))
        return fault, Fault(another, second, chance.uniform(0.0, 0.5))
    return (fault,)


# What is trained. The weights count the steps, and how often each sample was read. In the
# directory of the run, each rank writes its process id to ``output`` once it trains, and
# rank 0 the steps that it saved.


class Counting(L.LightningModule):
    """A model that counts, with 2 MB of gradients, validations and, on request, a
    loader worker.
    """

    def __init__(self, world_size: int, has_worker: bool) -> None:
        super().__init__()
        self.world_size = world_size
        self.has_worker = has_worker
        self.fails = False
        self.seen = nn.Parameter(torch.zeros(STEPS * BATCH * world_size))
        self.steps = nn.Parameter(torch.zeros(500_000))

    def on_train_start(self) -> None:
        signal.signal(FAIL, lambda *_: setattr(self, "fails", True))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.global_step == 5:
            print_line(f"rank {self.global_rank} trains as process {os.getpid()}")
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        loss: Tensor = -self.seen[batch].sum() - self.steps.sum() / self.world_size
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("seen", self.seen[batch].sum(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.world_size)  # DDP divides gradients by it

    def train_dataloader(self) -> DataLoader[Any]:
        worker: dict[str, Any] = {
            "num_workers": 1,
            "persistent_workers": True,
            "multiprocessing_context": "fork",
        }
        options = worker if self.has_worker else {}
        return DataLoader(range(len(self.seen)), BATCH, shuffle=True, **options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(7), batch_size=BATCH)


class TellingIO(RankZeroCheckpointIO):
    """Prints which step was saved."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        print_line(f"step {checkpoint['global_step']} is saved")


def train(
    directory: Path, devices: int, is_background: bool, max_epochs: int = -1, **options: Any
) -> Counting:
    """Train from the newest checkpoint on, and save every third step; return the model."""
    L.seed_everything(8 if any(directory.rglob("*.ckpt")) else 7, verbose=False)
    io = AsyncCheckpointIO(TellingIO()) if is_background else TellingIO()
    saver = RankZeroCheckpoint(directory, "{step}", every_n_train_steps=3, save_last=True)
    trainer = make_trainer(
        DDPExtStrategy(checkpoint_io=io, **LIMITS, **options),
        devices=devices,
        max_epochs=max_epochs,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[saver],
    )
    model = Counting(devices, has_worker=is_background)
    trainer.fit(model, ckpt_path="last")
    return model


def write_to(directory: Path) -> None:
    """Have this process and its children write to a file, which outlives all of them."""
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())


def train_by_hand(
    rank: int, world_size: int, directory: Path, url: str, is_background: bool
) -> None:
    """Train on one of the ranks that a user starts by hand."""
    write_to(directory)
    train(directory, world_size, is_background, init_method=url)


def run_again(
    rank: int, world_size: int, directory: Path, is_background: bool, max_epochs: int
) -> tuple[Tensor, Tensor]:
    """Run the same command again until ``max_epochs``; return how often each sample was
    read, and the steps.
    """
    model = train(
        directory, world_size, is_background, max_epochs, init_method=f"file://{directory}/again"
    )
    return model.seen.detach(), model.steps.detach()[::500].clone()


def main(directory: str, world_size: str, start_method: str, is_background: str) -> None:
    write_to(Path(directory))
    train(Path(directory), int(world_size), is_background == "True", start_method=start_method)


# The run, and its faults.


class Run:
    """A run in progress: its output, and its ranks and launching process by id, as
    descriptors that become readable when they exit.
    """

    def __init__(self, case: Case, directory: Path, processes: RankProcesses) -> None:
        self.case = case
        self.directory = directory
        self.started = list(processes.pids.values())
        self.descriptors = {pid: os.pidfd_open(pid) for pid in self.started}
        self.ranks = self._wait_until_all_train()
        for pid in set(self.ranks.values()) - set(self.started):
            self.descriptors[pid] = os.pidfd_open(pid)

    @property
    def output(self) -> str:
        path = self.directory / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def _wait_until_all_train(self) -> dict[int, int]:
        """Return the process id of each rank."""
        deadline = time.monotonic() + SECONDS_TO_TRAIN
        pids: dict[int, int] = {}
        while len(pids) < self.case.world_size:
            exited = connection.wait(list(self.descriptors.values()), 0.02)
            assert not exited, f"a rank exited before all trained:\n{self.output}"
            assert time.monotonic() < deadline, f"not all ranks train:\n{self.output}"
            lines = re.findall(r"^rank (\d) trains as process (\d+)$", self.output, re.MULTILINE)
            pids = {int(rank): int(pid) for rank, pid in lines}
        return pids

    def pid_of(self, rank: int | None) -> int:
        """Return the process id of a rank, or of the launching process."""
        return self.started[0] if rank is None else self.ranks[rank]

    def strike(self, fault: Fault, hosts: Network | None) -> None:
        """Strike from outside, at a time that does not depend on the ranks."""
        time.sleep(fault.after)
        if fault.kind == "cut":
            assert hosts is not None
            hosts.cut()
        else:
            self.signal(self.pid_of(fault.rank), SIGNALS[fault.kind])

    def signal(self, pid: int, signum: int) -> None:
        """Send a signal to a process, unless it has exited."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.descriptors[pid], signum)

    def wait(self, pids: Collection[int], seconds: float) -> set[int]:
        """Wait until processes exit; return those that still run after some seconds."""
        deadline = time.monotonic() + seconds
        running = {self.descriptors[pid]: pid for pid in pids}
        while running and time.monotonic() < deadline:
            for descriptor in connection.wait(list(running), deadline - time.monotonic()):
                del running[descriptor]
        return set(running.values())

    def dump_stacks(self, pids: Collection[int]) -> None:
        """Have processes write their stacks and exit."""
        for pid in pids:
            self.signal(pid, signal.SIGABRT)
            self.signal(pid, signal.SIGCONT)
        self.wait(pids, SECONDS_TO_DUMP)

    def close(self) -> None:
        for pid, descriptor in self.descriptors.items():
            self.signal(pid, signal.SIGKILL)
            os.close(descriptor)


def start(case: Case, directory: Path, hosts: Network | None) -> RankProcesses:
    """Start the run."""
    if case.start in BY_HAND:
        return start_by_hand(case, directory, hosts)
    # Scripts and torchrun start in a process that has imported torch and Lightning.
    script = __file__
    # torchrun sets the ranks' variables, which hold for each start method.
    start_method = "popen" if case.start == "torchrun" else case.start
    arguments = [str(directory), str(case.world_size), start_method, str(case.is_background)]
    if case.start == "torchrun":
        nproc = f"--nproc-per-node={case.world_size}"
        arguments = ["--standalone", nproc, script, *arguments]
        script = torch.distributed.run.__file__
    return RankProcesses(
        be_the_script, 1, Path(script), arguments, directory, time_limit=TIME_LIMIT
    )


def start_by_hand(case: Case, directory: Path, hosts: Network | None) -> RankProcesses:
    """Start each rank; with two hosts, the rank that is struck first is alone on one."""
    address = "127.0.0.1"
    places = None
    if hosts is not None:
        places = [hosts[rank == case.faults[0].rank] for rank in range(case.world_size)]
        address = places[0].address
    url = f"tcp://{address}:{free_port()}" if case.seed % 2 else f"file://{directory}/store"
    arguments = (case.world_size, directory, url, case.is_background)
    return RankProcesses(train_by_hand, *arguments, namespaces=places, time_limit=TIME_LIMIT)


def strike_and_wait(
    case: Case, directory: Path, hosts: Network | None
) -> tuple[list[str], list[Outcome], str]:
    """Return the ranks that did not exit in time, the outcomes unless there are such ranks,
    and the output.
    """
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(start(case, directory, hosts))
        run = stack.enter_context(contextlib.closing(Run(case, directory, processes)))
        for fault in case.faults:
            run.strike(fault, hosts)
        late = wait_for_ranks(run)
        for pid in stopped_by_fault(run):
            run.signal(pid, signal.SIGKILL)
        outcomes = [] if late else processes.wait()
        return late, outcomes, run.output + "".join(outcome.output for outcome in outcomes)


def stopped_by_fault(run: Run) -> set[int]:
    """Return the processes that SIGSTOP has stopped, which cannot exit."""
    return {run.pid_of(fault.rank) for fault in run.case.faults if fault.kind == "stop"}


def wait_for_ranks(run: Run) -> list[str]:
    """Wait until the ranks exit; describe those that are late.

    Loader workers that are left fail every test.
    """
    bound = run.case.bound
    late = run.wait(set(run.ranks.values()) - stopped_by_fault(run), bound)
    run.dump_stacks(late)
    return [f"rank process {pid} still runs {bound} s after the fault" for pid in late]


# The checks of the outcome.


def exit_codes(case: Case) -> set[int]:
    """Return the exit codes that processes may have after the first fault."""
    if case.kinds == {"term"} and case.start != "torchrun":
        return {STOPPED}
    expected = {1, -signal.SIGTERM}  # SIGTERM ends a process without a handler
    if "term" in case.kinds:
        expected.add(STOPPED)
    if case.kinds & {"kill", "stop"}:
        expected.add(-signal.SIGKILL)  # also ends a rank that was stopped
    return expected


def wrong_exits(case: Case, outcomes: list[Outcome]) -> Iterator[str]:
    expected = exit_codes(case)
    # A second signal may reach a rank whose interpreter ends, which has no handlers.
    by_second_fault = [(fault.rank, -SIGNALS[fault.kind]) for fault in case.faults[1:]]
    for outcome in outcomes:
        code = outcome.exit_code
        if code not in expected and (outcome.rank, code) not in by_second_fault:
            yield f"process {outcome.rank} exited with {code}"


def wrong_output(case: Case, output: str) -> Iterator[str]:
    if not any(re.search(cause_of(fault), output) for fault in case.faults):
        yield "the output names no cause"
    if case.kinds == {"term"} and "RankDiedError" in output:
        yield "a rank that stops is taken for dead"


def cause_of(fault: Fault) -> str:
    """Return a pattern of the cause that the output names."""
    if fault.kind == "term" or fault.rank is None:  # the kernel sends SIGTERM to the ranks
        return "all ranks stop after step"
    if fault.kind == "cut":
        return "no sign of life from its host"
    return rf"Rank\w+Error: .*\brank {fault.rank} \(host"


def wrong_files(case: Case, directory: Path, output: str) -> Iterator[str]:
    steps = {path: step_of(path) for path in directory.rglob("*.ckpt")}
    for path, step in steps.items():
        if step is None:
            yield f"{path.name} is damaged, or mixes steps"
    reported = [int(step) for step in re.findall(r"^step (\d+) is saved$", output, re.MULTILINE)]
    last_certain = max(reported, default=0)
    if newest_step(steps.values()) < last_certain:
        yield f"step {last_certain} had been saved, and is lost"
    if case.kinds == {"term"} and not list(directory.rglob("last-preempted.ckpt")):
        yield "no checkpoint of the stop"


def newest_step(steps: Iterable[int | None]) -> int:
    return max((step for step in steps if step is not None), default=0)


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint; None if it is damaged, or if its weights are of
    another step.
    """
    try:
        if zipfile.ZipFile(path).testzip() is not None:
            return None
    except zipfile.BadZipFile:
        return None
    content = torch.load(path, weights_only=False)
    step = int(content["global_step"])
    return step if torch.all((content["state_dict"]["steps"] - step).abs() < 0.01) else None


def parameter(seed: int) -> Any:
    case = draw(seed)
    marks = [pytest.mark.netns] if case.start == TWO_HOSTS else []
    return pytest.param(case, marks=marks, id=str(case))


@pytest.mark.parametrize("case", [parameter(seed) for seed in range(FIRST, FIRST + COUNT) or SEEDS])
def test_a_fault_is_survived(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """All processes exit in time and name the culprit.

    The same command then reads each sample once an epoch.
    """
    hosts = request.getfixturevalue("two_hosts") if case.start == TWO_HOSTS else None
    late, outcomes, output = strike_and_wait(case, tmp_path, hosts)
    wrong = late or [*wrong_exits(case, outcomes), *wrong_output(case, output)]
    wrong += wrong_files(case, tmp_path, output)
    assert not wrong, "\n".join([f"make soak SEED={case.seed} COUNT=1", *wrong, output])

    newest = newest_step(map(step_of, tmp_path.rglob("*.ckpt")))
    epochs = newest // STEPS + 2
    for seen, steps in run_ranks(run_again, case.world_size, tmp_path, case.is_background, epochs):
        torch.testing.assert_close(seen, torch.full_like(seen, epochs), rtol=0, atol=0.01)
        torch.testing.assert_close(steps, torch.full_like(steps, epochs * STEPS), rtol=0, atol=0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
