"""Describe this machine's GPUs, find out how two ranks of NCCL work on them, and print a
table of what the tests have proven.
"""

import platform
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.placement import GLOO, GPU, IS_GPU, ON_ONE_CARD, ONE_EACH, Placement
from tests.harness.environment import skip_because
from tests.harness.ranks import launch_ranks

# The properties of a test from which the table is made.
PROVES = "proves"  # the first sentence of its docstring
MACHINE = "machine"  # the description of the machine
NCCL_RANKS = "ranks of NCCL"  # the description of their placement, if it has any

FOLDER = Path(__file__).parent
SECONDS_TO_REDUCE = 60


@dataclass(frozen=True)
class Machine:
    """The number of GPUs that torch can use, and a description for the table.

    Attributes:
        missing: the reason why torch uses none, if so.
    """

    cards: int
    description: str
    missing: str | None = None


@dataclass(frozen=True)
class NcclPlace:
    """A description of how two ranks of NCCL are placed, for the table.

    Attributes:
        placement: ``None`` if they work in no placement; the description has the
            reasons.
    """

    description: str
    placement: Placement | None = None


def use_gpu(rank: int, world_size: int) -> Machine:
    """Use a GPU and describe all of them, on a rank, because the GPU's context remains
    until the process exits.
    """
    torch.ones(1, device=GPU)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Machine(len(names), f"{', '.join(names)}; CUDA {torch.version.cuda}, NCCL {nccl}")


def cards_of_driver() -> list[str]:
    """Return a line for each GPU that ``nvidia-smi`` lists, with the driver's version."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return []
    return [] if listed.returncode else listed.stdout.splitlines()


@pytest.fixture(scope="session")
def machine() -> Machine:
    """Describe the machine; fail if its driver lists GPUs and torch cannot use them."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    if not IS_GPU:
        return Machine(0, f"CPU stand-ins; {versions}")
    listed = cards_of_driver()
    [outcome] = launch_ranks(use_gpu, 1)
    if outcome.result is not None:
        driver = listed[0].rpartition(", ")[2] if listed else "unknown"
        description = f"{outcome.result.description}, driver {driver}; {versions}"
        return replace(outcome.result, description=description)
    if listed:
        reason = f"nvidia-smi lists {listed}, but {versions} cannot use them: {outcome.story()}"
        pytest.fail(reason, pytrace=False)
    return Machine(0, versions, "torch finds no GPU")


@pytest.fixture(scope="session")
def nccl(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> NcclPlace:
    """Find a way in which two ranks of NCCL work."""
    if not IS_GPU:
        return NcclPlace("gloo in the place of NCCL", ONE_EACH)
    ways = {"a GPU for each rank": ONE_EACH} if machine.cards > 1 else ON_ONE_CARD
    reasons = []
    for way, placement in ways.items():
        reason = why_not(placement, tmp_path_factory.mktemp("nccl"))
        if reason is None:
            return NcclPlace(f"two ranks, {way}", placement)
        reasons.append(f"{way}: {reason}")
    return NcclPlace(f"two ranks of NCCL do not work here: {'; '.join(reasons)}")


def why_not(placement: Placement, directory: Path) -> str | None:
    """Return the reason why ranks in this placement cannot reduce a number, or
    ``None``.
    """
    time_limit = SECONDS_TO_REDUCE * 1.5
    try:
        outcomes = placement.launch(reduce_once, directory, time_limit=time_limit)
    except AssertionError:
        return f"does not end within {time_limit} s"
    for outcome in outcomes:
        if outcome.error is not None:
            return outcome.error.message.strip().splitlines()[-1]
        if outcome.exit_code != 0:
            return "ends its process"
    return None


def reduce_once(rank: int, world_size: int, placement: Placement, directory: Path) -> None:
    device = torch.device(placement.devices[rank])
    dist.init_process_group(
        placement.backend,
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=SECONDS_TO_REDUCE),
        device_id=device,
    )
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    assert float(total) == world_size
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def needs_gpu(machine: Machine, record_property: Callable[[str, object], None]) -> None:
    """Skip each test if torch finds no GPU."""
    record_property(MACHINE, machine.description)
    skip_because(machine.missing)


@pytest.fixture(params=["gloo", "NCCL"])
def placement(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Placement:
    """Return a placement of two ranks. They share a GPU, unless they use NCCL on a
    machine with several.
    """
    if request.param == "gloo":
        return GLOO
    nccl: NcclPlace = request.getfixturevalue("nccl")
    record_property(NCCL_RANKS, nccl.description)
    if nccl.placement is None:
        skip_because(nccl.description)
    return nccl.placement


# The table.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Attach the first sentence of its docstring to each test."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == FOLDER:
            sentence = " ".join(str(item.function.__doc__).partition("\n\n")[0].split())
            item.user_properties.append((PROVES, sentence.rstrip(".")))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table for docs/reference/compatibility.md: a row for each sentence, with
    the cases of each outcome.
    """
    places: list[str] = []
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            if PROVES in properties:
                rows[properties[PROVES]][with_reason(outcome, report)].append(case_of(report))
                places += [properties[key] for key in (MACHINE, NCCL_RANKS) if key in properties]
    if not rows:
        return
    terminalreporter.section("what this proves")
    header = "; ".join(dict.fromkeys(places))
    terminalreporter.write_line(f"| {header} | Result |\n| --- | --- |")
    for sentence, cases_by_outcome in rows.items():
        cells = [f"{outcome}{joined(cases)}" for outcome, cases in cases_by_outcome.items()]
        terminalreporter.write_line(f"| {sentence} | {'; '.join(cells)} |")


def with_reason(outcome: str, report: Any) -> str:
    """Return the outcome; if the test was skipped, with the reason."""
    is_skipped = outcome == "skipped" and isinstance(report.longrepr, tuple)
    return f"skipped ({report.longrepr[2].removeprefix('Skipped: ')})" if is_skipped else outcome


def case_of(report: Any) -> str:
    """Return the test's parameters, or an empty string if it has none."""
    _, _, case = report.nodeid.partition("[")
    return str(case.rstrip("]"))


def joined(cases: list[str]) -> str:
    names = ", ".join(sorted(filter(None, cases)))
    return f": {names}" if names else ""
