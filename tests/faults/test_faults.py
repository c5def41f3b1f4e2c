"""After a fault at any time all processes of a run end within the promised bound, and
nothing is lost.

1. Draw: a seed gives a case: how ranks are started, and which faults strike when.
2. Play: the run (``tests.faults.train``) starts, trains, is struck, and exits.
3. Judge: the time, the exit codes, the output and the checkpoints are checked.
4. Repeat: the same command runs again, and continues.

``make soak`` tries any number of seeds.
"""

import contextlib
import json
import os
import random
import re
import signal
import time
import zipfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.run

from tests.faults import train
from tests.faults.train import LIMITS, STEPS
from tests.harness.environment import Network
from tests.harness.ranks import Outcome, RankProcesses, free_port, run_ranks
from tests.harness.scripts import be_the_script
from tests.harness.training import STOPPED

# By day a kill, an exception, a dead launching process, and a cut wire; `make nightly`
# draws 60 others.
SEEDS = (2, 18, 24, 37)
FIRST = int(os.environ.get("SOAK_SEED", 0))
COUNT = int(os.environ.get("SOAK_COUNT", 0))
# Seconds:
TIME_LIMIT = 400.0  # of all processes of a run
SECONDS_TO_TRAIN = 240.0  # until all ranks report that they train
SECONDS_TO_DUMP = 60.0  # until a late rank has written its stacks

FaultKind = Literal["kill", "raise", "cut", "stop", "term"]
# How ranks are started: by hand, by a script that is rank 0 (popen), or by a process
# that is not a rank itself.
Start = Literal["by hand", "by hand, two hosts", "popen", "torchrun", "fork", "spawn"]

LAUNCHER = "launcher"  # the process that starts the ranks, as the target of a fault
TWO_HOSTS: Start = "by hand, two hosts"
BY_HAND: tuple[Start, ...] = ("by hand", TWO_HOSTS)
LAUNCHED: tuple[Start, ...] = ("torchrun", "fork", "spawn")
# ``draw`` takes each element with the same chance: what is listed twice, with twice that.
STARTS: tuple[Start, ...] = (*BY_HAND, *BY_HAND, "popen", *LAUNCHED)
DEADLY: tuple[FaultKind, ...] = ("kill", "kill", "term")
OF_ONE_RANK: tuple[FaultKind, ...] = (*DEADLY, "raise", "stop")
OF_A_SECOND_RANK: tuple[FaultKind, ...] = ("kill", "term", "raise")
SIGNALS: dict[FaultKind, int] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "raise": train.FAIL,
}
# See "Maximum delays" in docs/guides/hangs.md. After a death the main thread
# raises or the process ends; what then runs, and the end of the process, each have the
# deadline of a save.
TO_END = 2 * LIMITS["save_deadline"]
BOUNDS: dict[FaultKind | str, float] = {
    "kill": 3 + TO_END,
    "raise": 30 + TO_END,
    "cut": LIMITS["heartbeat_timeout"] + 3 + TO_END,
    "stop": LIMITS["timeout"] + 5 + 5 + TO_END,  # it is asked, and has 5 s to answer
    "term": LIMITS["save_deadline"],
    LAUNCHER: 4 + LIMITS["save_deadline"],
}
# What a process may exit with after a fault of this kind; see also ``exit_codes``.
EXIT_CODES_AFTER: dict[FaultKind, set[int]] = {
    "kill": {-signal.SIGKILL},
    "stop": {-signal.SIGKILL},  # by which the test ends a stopped rank
    "term": {STOPPED},
    "raise": set(),
    "cut": set(),
}


# Draw a case.


@dataclass(frozen=True)
class Fault:
    """The fault of a rank or its launching process, and its time in seconds after all
    ranks began to train, or after the fault before.
    """

    kind: FaultKind
    target: int | str
    after: float

    @property
    def bound(self) -> float:
        """Seconds from the fault to the end of all processes."""
        return BOUNDS[LAUNCHER if self.target == LAUNCHER else self.kind]

    def __str__(self) -> str:
        return f"{self.kind} {self.target} after {self.after:.2f} s"


@dataclass(frozen=True)
class Case:
    """A run, and the faults that strike it one after another.

    Attributes:
        seed: draws the case again.
        start: how the ranks start.
        init_method: of ranks that start by hand.
        world_size: their number.
        has_helpers: whether a thread saves in the background, and a worker loads.
        faults: the faults, in order.
    """

    seed: int
    start: Start
    init_method: Literal["tcp", "file"]
    world_size: int
    has_helpers: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        faults = ", then ".join(map(str, self.faults))
        during = "background saves" if self.has_helpers else "saves"
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
    start = chance.choice(STARTS)
    is_start_fast = start in (*BY_HAND, "fork")  # the others import torch anew
    world_size = chance.choice((2, 3)) if is_start_fast else 2
    faults = draw_faults(chance, start, world_size)
    return Case(
        seed=seed,
        start=start,
        init_method="tcp" if seed % 2 else "file",
        world_size=world_size,
        has_helpers=chance.choice((False, True)),
        faults=faults,
    )


def draw_faults(chance: random.Random, start: Start, world_size: int) -> tuple[Fault, ...]:
    """Return a fault, and possibly one of another rank soon after it."""
    kind = chance.choice((*OF_ONE_RANK, "cut") if start == TWO_HOSTS else OF_ONE_RANK)
    first, second = chance.sample(range(world_size), 2)
    can_strike_launcher = kind in DEADLY and start in LAUNCHED
    if can_strike_launcher and chance.random() < 0.4:
        return (Fault(kind, LAUNCHER, chance.uniform(0.0, 1.5)),)
    fault = Fault(kind, first, chance.uniform(0.0, 1.5))
    can_strike_twice = kind in OF_A_SECOND_RANK and world_size == 3
    if can_strike_twice and chance.random() < 0.5:
        another = chance.choice(OF_A_SECOND_RANK)
        return fault, Fault(another, second, chance.uniform(0.0, 0.5))
    return (fault,)


# Play the case: start the run.


def start(case: Case, directory: Path, hosts: Network | None) -> RankProcesses:
    """Start the run: all of its ranks, or the one process that starts them."""
    if case.start in BY_HAND:
        return start_by_hand(case, directory, hosts)
    # Scripts and torchrun start in a process that has imported torch and Lightning.
    script = train.__file__
    # torchrun sets the ranks' variables, which hold for each start method.
    start_method = "popen" if case.start == "torchrun" else case.start
    options = {
        "directory": str(directory),
        "world_size": case.world_size,
        "start_method": start_method,
        "has_helpers": case.has_helpers,
    }
    arguments = [json.dumps(options)]
    if case.start == "torchrun":
        arguments = [
            "--standalone",
            f"--nproc-per-node={case.world_size}",
            script,
            *arguments,
        ]
        script = torch.distributed.run.__file__
    return RankProcesses(
        be_the_script, 1, Path(script), arguments, directory, time_limit=TIME_LIMIT
    )


def start_by_hand(case: Case, directory: Path, hosts: Network | None) -> RankProcesses:
    """Start each rank; with two hosts, the rank that is struck first is alone on one."""
    address = "127.0.0.1"
    places = None
    if hosts is not None:
        places = [hosts[rank == case.faults[0].target] for rank in range(case.world_size)]
        address = places[0].address
    urls = {"tcp": f"tcp://{address}:{free_port()}", "file": f"file://{directory}/store"}
    return RankProcesses(
        train_by_hand,
        case.world_size,
        directory,
        urls[case.init_method],
        case.has_helpers,
        namespaces=places,
        time_limit=TIME_LIMIT,
    )


def train_by_hand(rank: int, world_size: int, directory: Path, url: str, has_helpers: bool) -> None:
    """Train on one of the ranks that a user starts by hand."""
    train.write_to_output(directory)
    train.train(directory, world_size, has_helpers, init_method=url)


# Play the case: watch the processes of the run.


class Process:
    """A process, which may exit at any time; for ``connection.wait``, it is ready once it
    has exited.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._descriptor

    def signal(self, signum: int) -> None:
        """Send a signal, unless the process has exited."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signum)

    def close(self) -> None:
        """Kill the process if it still runs."""
        self.signal(signal.SIGKILL)
        os.close(self._descriptor)


@dataclass(frozen=True)
class Run:
    """A run in which all ranks train.

    Attributes:
        launcher: the process that starts the ranks; by hand, the first rank.
        ranks: the process of each rank, which may be the launcher.
    """

    launcher: Process
    ranks: dict[int, Process]


@contextlib.contextmanager
def all_train(processes: RankProcesses, directory: Path, world_size: int) -> Iterator[Run]:
    """Wait until all ranks train; after the block, kill what still runs."""
    with contextlib.ExitStack() as stack:

        def watch(pid: int) -> Process:
            return stack.enter_context(contextlib.closing(Process(pid)))

        started = [watch(pid) for pid in processes.pids.values()]
        deadline = time.monotonic() + SECONDS_TO_TRAIN
        pids: dict[int, int] = {}
        while len(pids) < world_size:
            exited = connection.wait(started, 0.02)
            output = train.output_in(directory)
            assert not exited, f"a rank exited before all trained:\n{output}"
            assert time.monotonic() < deadline, f"not all ranks train:\n{output}"
            pids = train.ranks_in(output)
        yield Run(started[0], {rank: watch(pid) for rank, pid in pids.items()})


def wait_for_exits(processes: Collection[Process], seconds: float) -> list[str]:
    """Wait until processes exit; end those that are late with their stacks, and return a
    line for each of them.
    """
    late = still_running(processes, seconds)
    for process in late:
        process.signal(signal.SIGABRT)  # writes the stacks
        process.signal(signal.SIGCONT)
    still_running(late, SECONDS_TO_DUMP)
    return [f"rank process {each.pid} still runs {seconds} s after the fault" for each in late]


def still_running(processes: Collection[Process], seconds: float) -> set[Process]:
    """Wait until processes exit; return those that still run after some seconds."""
    deadline = time.monotonic() + seconds
    running = set(processes)
    while running and time.monotonic() < deadline:
        running.difference_update(connection.wait(running, deadline - time.monotonic()))
    return running


# Play the case: strike, and wait.


@dataclass(frozen=True)
class Ending:
    """How a run ended after its faults.

    Attributes:
        late: a line for each rank that did not exit within the bound.
        outcomes: of the processes that the test started; none if ranks were late.
        output: the text that all processes have written.
    """

    late: list[str]
    outcomes: list[Outcome]
    output: str


def strike_and_wait(case: Case, directory: Path, hosts: Network | None) -> Ending:
    """Play a case up to the end of its processes. Loader workers that are left fail every
    test.
    """
    stopped: set[Process] = set()  # these cannot exit
    with (
        start(case, directory, hosts) as processes,
        all_train(processes, directory, case.world_size) as run,
    ):
        for fault in case.faults:
            time.sleep(fault.after)  # not an event of the ranks: a fault strikes at any time
            stopped |= strike(fault, run, hosts)
        late = wait_for_exits(set(run.ranks.values()) - stopped, case.bound)
        for process in stopped:
            process.signal(signal.SIGKILL)
        outcomes = [] if late else processes.wait()
        outputs = [train.output_in(directory), *(outcome.output for outcome in outcomes)]
        return Ending(late, outcomes, "".join(outputs))


def strike(fault: Fault, run: Run, hosts: Network | None) -> set[Process]:
    """Cause a fault; return the process that it stopped (SIGSTOP), if any."""
    if fault.kind == "cut":
        assert hosts is not None
        hosts.cut()
        return set()
    struck = {LAUNCHER: run.launcher, **run.ranks}[fault.target]
    struck.signal(SIGNALS[fault.kind])
    return {struck} if fault.kind == "stop" else set()


# Judge how the run ended. Each function yields a line for each thing that is wrong.


def wrong_exits(case: Case, outcomes: list[Outcome]) -> Iterator[str]:
    expected = exit_codes(case)
    # A second signal may reach a rank whose interpreter ends, which has no handlers.
    by_second_fault = [(fault.target, -SIGNALS[fault.kind]) for fault in case.faults[1:]]
    for outcome in outcomes:
        code = outcome.exit_code
        if code not in expected and (outcome.rank, code) not in by_second_fault:
            yield f"process {outcome.rank} exited with {code}"


def exit_codes(case: Case) -> set[int]:
    """Return the exit codes that processes may have after the first fault."""
    if case.kinds == {"term"} and case.start != "torchrun":
        return {STOPPED}
    # After any fault: an error, or SIGTERM, which ends a process that has no handler.
    return {1, -signal.SIGTERM}.union(*(EXIT_CODES_AFTER[kind] for kind in case.kinds))


def wrong_output(case: Case, output: str) -> Iterator[str]:
    if not any(re.search(cause_of(fault), output) for fault in case.faults):
        yield "the output names no cause"
    if case.kinds == {"term"} and "RankDiedError" in output:
        yield "a rank that stops is taken for dead"


def cause_of(fault: Fault) -> str:
    """Return a pattern of the cause that the output names."""
    if fault.kind == "term" or fault.target == LAUNCHER:  # the kernel sends SIGTERM to the ranks
        return "all ranks stop after step"
    if fault.kind == "cut":
        return "no sign of life from its host"
    return rf"Rank\w+Error: .*\brank {fault.target} \(host"


def wrong_files(case: Case, directory: Path, output: str) -> Iterator[str]:
    steps = {path: step_of(path) for path in directory.rglob("*.ckpt")}
    for path, step in steps.items():
        if step is None:
            yield f"{path.name} is damaged, or mixes steps"
    last_certain = max(train.saved_steps_in(output), default=0)
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


# Repeat: run the same command again.


def run_again(
    rank: int, world_size: int, directory: Path, has_helpers: bool, max_epochs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continue on one of the ranks until ``max_epochs``; return how often each sample was
    read, and the steps.
    """
    url = f"file://{directory}/again"
    model = train.train(directory, world_size, has_helpers, max_epochs, init_method=url)
    return model.seen.detach(), model.steps.detach()[::500].clone()


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
    ending = strike_and_wait(case, tmp_path, hosts)
    wrong = [
        *ending.late,
        *wrong_exits(case, ending.outcomes),
        *wrong_output(case, ending.output),
        *wrong_files(case, tmp_path, ending.output),
    ]
    assert not wrong, "\n".join([f"make soak SEED={case.seed} COUNT=1", *wrong, ending.output])

    newest = newest_step(map(step_of, tmp_path.rglob("*.ckpt")))
    epochs = newest // STEPS + 2
    for seen, steps in run_ranks(run_again, case.world_size, tmp_path, case.has_helpers, epochs):
        torch.testing.assert_close(seen, torch.full_like(seen, epochs), rtol=0, atol=0.01)
        torch.testing.assert_close(steps, torch.full_like(steps, epochs * STEPS), rtol=0, atol=0.01)
