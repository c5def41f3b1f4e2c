"""After a fault at any time all processes of a run end within the promised bound, and
nothing is lost.

``make soak`` tries any number of seeds. ``faults.csv`` in the directory of the tests
(``--basetemp``) lists how long each took, beside the bound.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
import torch.distributed.run

from tests.faults import training
from tests.faults.training import FAIL, LIMITS, STEPS, run_again, train_by_hand
from tests.harness.network import Network
from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, free_port, run_ranks
from tests.harness.scripts import be_the_script

# By day a kill, an exception, a dead launching process, and a cut wire; `make nightly`
# draws 60 others.
SEEDS = (2, 18, 24, 37)
FIRST = int(os.environ.get("SOAK_SEED", 0))
COUNT = int(os.environ.get("SOAK_COUNT", 0))
ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_TRAIN = 240.0  # until all ranks report that they train
# Until workers miss their rank, and torchrun has killed a rank that was stopped.
SECONDS_TO_TIDY = 60.0
SECONDS_TO_DUMP = 60.0

What = Literal["kill", "raise", "cut", "stop", "term"]
# How ranks are started: by hand, by a script that is rank 0 (popen), or by a process
# that is not a rank itself.
Started = Literal["by hand", "by hand, two hosts", "popen", "torchrun", "fork", "spawn"]
During = Literal["saves", "background saves", "rescue"]

SIGNALS: dict[What, int] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "raise": FAIL,
}
TWO_HOSTS: Started = "by hand, two hosts"
BY_HAND: tuple[Started, ...] = ("by hand", TWO_HOSTS)
LAUNCHED: tuple[Started, ...] = ("torchrun", "fork", "spawn")
DURING: tuple[During, ...] = ("saves", "background saves", "rescue")
FAILED = 1  # the exit status of a rank that raises
STOPPED = 128 + signal.SIGTERM  # the exit status of a rank that stops on SIGTERM
# See "Maximum delays" in docs/guides/hangs.md. After a death the main thread
# raises or the process ends; what then runs, and the end of the process, each have the
# deadline of a save.
TO_END = 2 * LIMITS["save_deadline"]
BOUNDS: dict[What | Literal["launcher"], float] = {
    "kill": 3 + TO_END,
    "raise": 30 + TO_END,
    "cut": LIMITS["heartbeat_timeout"] + 3 + TO_END,
    "stop": LIMITS["timeout"] + 5 + 5 + TO_END,  # it is asked, and has 5 s to answer
    "term": LIMITS["save_deadline"],
    "launcher": 4 + LIMITS["save_deadline"],
}


@dataclass(frozen=True)
class Strike:
    """The fault of a rank or its launching process, and its time in seconds after all
    ranks began to train.
    """

    what: What
    whom: int | None  # None is the launching process
    after: float

    def __str__(self) -> str:
        return (
            f"{self.what} {'launcher' if self.whom is None else self.whom} after {self.after:.2f} s"
        )


@dataclass(frozen=True)
class Case:
    seed: int
    started: Started
    world_size: int
    during: During
    strikes: tuple[Strike, ...]

    def __str__(self) -> str:
        strikes = ", then ".join(map(str, self.strikes))
        return f"seed {self.seed}: {strikes}, of {self.world_size} {self.started}, {self.during}"

    @property
    def bound(self) -> float:
        """Seconds from the last strike to the end of all processes."""
        return max(
            BOUNDS["launcher" if strike.whom is None else strike.what] for strike in self.strikes
        )


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    chance = random.Random(seed)
    ways: tuple[Started, ...] = (*BY_HAND * 2, "popen", *LAUNCHED)
    started = chance.choice(ways)
    # The others import torch anew.
    world_size = chance.choice((2, 3)) if started in (*BY_HAND, "fork") else 2
    faults: list[What] = ["kill", "kill", "term", "raise", "stop"]
    if started == TWO_HOSTS:
        faults.append("cut")
    what = chance.choice(faults)
    one, other = chance.sample(range(world_size), 2)
    to_launcher = what in ("kill", "term") and started in LAUNCHED and chance.random() < 0.4
    strikes = [Strike(what, None if to_launcher else one, chance.uniform(0.0, 1.5))]
    if (
        what in ("kill", "term", "raise")
        and world_size == 3
        and not to_launcher
        and chance.random() < 0.5
    ):
        second: list[What] = ["kill", "term", "raise"]
        strikes.append(Strike(chance.choice(second), other, chance.uniform(0.0, 0.5)))
    return Case(seed, started, world_size, chance.choice(DURING), tuple(strikes))


# The run, and its faults.


class Run:
    """A run in progress: its output, and its processes by id, as descriptors that
    become readable when they exit.
    """

    def __init__(self, case: Case, directory: Path, processes: RankProcesses) -> None:
        self.case = case
        self.directory = directory
        self.started = list(processes.pids.values())
        self.descriptors = {pid: os.pidfd_open(pid) for pid in self.started}
        self.ranks = self._wait_until_all_train()
        children = {
            child.pid
            for pid in self.started
            for child in psutil.Process(pid).children(recursive=True)
        }
        self.descriptors |= {pid: os.pidfd_open(pid) for pid in children}

    @property
    def output(self) -> str:
        path = self.directory / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def _wait_until_all_train(self) -> dict[int, int]:
        deadline = time.monotonic() + SECONDS_TO_TRAIN
        found: dict[int, int] = {}
        while len(found) < self.case.world_size:
            ended = connection.wait(list(self.descriptors.values()), 0.02)
            assert not ended, f"a rank exited before all trained:\n{self.output}"
            assert time.monotonic() < deadline, f"not all ranks train:\n{self.output}"
            lines = re.findall(r"^rank (\d) trains as process (\d+)$", self.output, re.MULTILINE)
            found = {int(rank): int(pid) for rank, pid in lines}
        return found

    def pid_of(self, whom: int | None) -> int:
        return self.started[0] if whom is None else self.ranks[whom]

    def strike(self, strike: Strike, hosts: Network | None) -> None:
        """Strike from outside, at a time that does not depend on the ranks."""
        time.sleep(strike.after)
        if strike.what == "cut":
            assert hosts is not None
            hosts.cut()
        else:
            with contextlib.suppress(ProcessLookupError):  # the first strike may have killed it
                signal.pidfd_send_signal(
                    self.descriptors[self.pid_of(strike.whom)], SIGNALS[strike.what]
                )

    def wait(self, pids: set[int], deadline: float) -> set[int]:
        """Wait until processes exit; return those that still run at the deadline."""
        left = {self.descriptors[pid]: pid for pid in pids}
        while left and (rest := deadline - time.monotonic()) > 0:
            for descriptor in connection.wait(list(left), rest):
                del left[descriptor]
        return set(left.values())

    def dump_stacks(self, pids: set[int]) -> None:
        """Have processes write their stacks and exit."""
        for pid in pids:
            for number in (signal.SIGABRT, signal.SIGCONT):
                signal.pidfd_send_signal(self.descriptors[pid], number)
        self.wait(pids, time.monotonic() + SECONDS_TO_DUMP)

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)


def start(case: Case, directory: Path, hosts: Network | None) -> RankProcesses:
    """Start the run; scripts and torchrun start in a process that has imported torch
    and Lightning.
    """
    options: dict[str, Any] = {
        "env": {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"},
        "time_limit": 400.0,
    }
    if case.started in BY_HAND:
        far = case.strikes[0].whom
        places = None if hosts is None else [hosts[rank == far] for rank in range(case.world_size)]
        address = "127.0.0.1" if places is None else places[0].address
        url = f"tcp://{address}:{free_port()}" if case.seed % 2 else f"file://{directory}/store"
        options["namespaces"] = places
        return RankProcesses(train_by_hand, case.world_size, directory, url, case.during, **options)
    # torchrun sets the ranks' variables, which hold for each start method.
    start_method = "popen" if case.started == "torchrun" else case.started
    script = training.__file__
    arguments = [str(directory), str(case.world_size), start_method, case.during]
    if case.started == "torchrun":
        arguments = [
            "--standalone",
            f"--nproc-per-node={case.world_size}",
            script,
            *arguments,
        ]
        script = torch.distributed.run.__file__
    return RankProcesses(be_the_script, 1, Path(script), arguments, directory, **options)


@dataclass(frozen=True)
class Ended:
    """How a run ended after its strikes."""

    seconds: float  # that its ranks took to exit
    late: list[str]  # the processes that did not exit in time
    outcomes: list[Outcome]  # none if a process is late
    output: str


def strike_and_wait(case: Case, directory: Path, hosts: Network | None) -> Ended:
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(start(case, directory, hosts))
        run = stack.enter_context(contextlib.closing(Run(case, directory, processes)))
        for strike in case.strikes:
            run.strike(strike, hosts)
        struck = time.monotonic()
        stopped = {run.pid_of(strike.whom) for strike in case.strikes if strike.what == "stop"}
        ranks = run.wait(set(run.ranks.values()) - stopped, struck + case.bound)
        seconds = time.monotonic() - struck
        late = [f"rank process {pid} still runs {case.bound} s after the strike" for pid in ranks]
        if ranks:
            run.dump_stacks(ranks)
            return Ended(seconds, late, [], run.output)
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
        others = run.wait(set(run.descriptors), time.monotonic() + SECONDS_TO_TIDY)
        if others:
            run.dump_stacks(others)
            late = [
                f"process {pid} still runs {SECONDS_TO_TIDY} s after the ranks exited"
                for pid in others
            ]
            return Ended(seconds, late, [], run.output)
        outcomes = processes.wait()
        output = run.output + "".join(outcome.output for outcome in outcomes)
        return Ended(seconds, [], outcomes, output)


# The checks of the outcome.


def exit_codes(case: Case) -> set[int]:
    """Return the exit codes that processes may have after the first strike."""
    whats = {strike.what for strike in case.strikes}
    if whats == {"term"} and case.started != "torchrun":
        return {STOPPED}
    expected = {FAILED, -signal.SIGTERM}  # SIGTERM ends a process without a handler
    if "term" in whats:
        expected.add(STOPPED)
    if whats & {"kill", "stop"}:
        expected.add(-signal.SIGKILL)  # also ends a rank that was stopped
    return expected


def wrong_endings(case: Case, outcomes: list[Outcome], output: str) -> Iterator[str]:
    whats = {strike.what for strike in case.strikes}
    expected = exit_codes(case)
    # A second signal may reach a rank whose interpreter ends, which has no handlers.
    second = [(strike.whom, -SIGNALS[strike.what]) for strike in case.strikes[1:]]
    for outcome in outcomes:
        if outcome.exit_code not in expected and (outcome.rank, outcome.exit_code) not in second:
            yield f"process {outcome.rank} exited with {outcome.exit_code}"
    if not any(re.search(cause, output) for strike in case.strikes for cause in causes(strike)):
        yield "the output names no cause"
    if whats == {"term"} and "RankDiedError" in output:
        yield "a rank that stops is taken for dead"


def causes(strike: Strike) -> Iterator[str]:
    if strike.what == "term":
        yield "all ranks stop after step"
    elif strike.what == "cut":
        yield "no sign of life from its host"
    elif strike.whom is None:
        yield r"the launcher of this process \(pid \d+\)"
    else:
        yield rf"Rank\w+Error: .*\brank {strike.whom} \(host"


def wrong_files(case: Case, directory: Path, output: str) -> Iterator[str]:
    saved = [int(step) for step in re.findall(r"^step (\d+) is saved$", output, re.MULTILINE)]
    certain = saved[:-2] if case.during == "background saves" else saved
    steps = {path: step_of(path) for path in directory.glob("*.ckpt")}
    yield from (
        f"{path.name} is damaged, or mixes steps" for path, step in steps.items() if step is None
    )
    if max((step for step in steps.values() if step is not None), default=0) < max(
        certain, default=0
    ):
        yield f"step {certain[-1]} had been saved, and is lost"
    if {strike.what for strike in case.strikes} == {"term"} and not (
        directory / "last-preempted.ckpt"
    ).exists():
        yield "no checkpoint of the stop"


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


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case, float], None]:
    """Write down how long a case took."""
    path = tmp_path_factory.getbasetemp() / "faults.csv"
    path.write_text("seconds,bound,case\n")

    def add(case: Case, seconds: float) -> None:
        with path.open("a") as file:
            file.write(f'{seconds:.2f},{case.bound},"{case}"\n')

    return add


def parameter(seed: int) -> Any:
    case = draw(seed)
    marks = [pytest.mark.netns] if case.started == TWO_HOSTS else []
    return pytest.param(case, marks=marks, id=str(case))


@pytest.mark.parametrize("case", [parameter(seed) for seed in range(FIRST, FIRST + COUNT) or SEEDS])
def test_a_fault_is_survived(
    case: Case,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record: Callable[[Case, float], None],
) -> None:
    """All processes exit in time and name the culprit.

    The same command then reads each sample once an epoch.
    """
    hosts = request.getfixturevalue("two_hosts") if case.started == TWO_HOSTS else None
    ended = strike_and_wait(case, tmp_path, hosts)
    record(case, ended.seconds)
    wrong = ended.late or [*wrong_endings(case, ended.outcomes, ended.output)]
    wrong += wrong_files(case, tmp_path, ended.output)
    assert not wrong, "\n".join([f"make soak SEED={case.seed} COUNT=1", *wrong, ended.output])

    newest = max((step_of(path) or 0 for path in tmp_path.glob("*.ckpt")), default=0)
    epochs = newest // STEPS + 2
    for seen, steps in run_ranks(run_again, case.world_size, tmp_path, case.during, epochs):
        torch.testing.assert_close(seen, torch.full_like(seen, epochs), rtol=0, atol=0.01)
        torch.testing.assert_close(steps, torch.full_like(steps, epochs * STEPS), rtol=0, atol=0.01)
