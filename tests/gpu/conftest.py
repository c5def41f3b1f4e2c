"""Find out what this machine's GPUs can do, and print what the tests have proven with
them.
"""

import platform
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.gpu.placement import GLOO, GPU, IS_GPU, ON_ONE_CARD, ONE_EACH, Placement
from tests.harness.environment import skip_because
from tests.harness.ranks import launch_ranks

# Names of a test's properties, from which the table is made.
PROVES = "proves"
MACHINE = "machine"
NCCL_RANKS = "ranks of NCCL"

FOLDER = Path(__file__).parent
SECONDS_TO_REDUCE = 60


@dataclass(frozen=True)
class Machine:
    """The GPUs that torch uses, in words; or the reason why it uses none."""

    cards: int
    description: str
    missing: str | None = None


@dataclass(frozen=True)
class NcclPlace:
    """Where two ranks of NCCL work, in words also; no placement if nowhere."""

    placement: Placement | None
    description: str


def use_gpu(rank: int, world_size: int) -> tuple[int, str]:
    """Use a GPU, and return the number of GPUs and a description; in a process that
    ends, because its context would remain.
    """
    torch.ones(1, device=GPU)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return len(names), f"{', '.join(names)}; CUDA {torch.version.cuda}, NCCL {nccl}"


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
        cards, description = outcome.result
        driver = listed[0].rpartition(", ")[2] if listed else "unknown"
        return Machine(cards, f"{description}, driver {driver}; {versions}")
    if listed:
        reason = f"nvidia-smi lists {listed}, but {versions} cannot use them: {outcome.story()}"
        pytest.fail(reason, pytrace=False)
    return Machine(0, versions, "torch finds no GPU")


@pytest.fixture(scope="session")
def nccl(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> NcclPlace:
    """Find a way in which two ranks of NCCL work."""
    if not IS_GPU:
        return NcclPlace(ONE_EACH, "gloo in the place of NCCL")
    ways = {"a GPU for each rank": ONE_EACH} if machine.cards > 1 else ON_ONE_CARD
    reasons = []
    for way, placement in ways.items():
        reason = why_not(placement, tmp_path_factory.mktemp("nccl"))
        if reason is None:
            return NcclPlace(placement, f"two ranks, {way}")
        reasons.append(f"{way}: {reason}")
    return NcclPlace(None, f"two ranks of NCCL do not work here: {'; '.join(reasons)}")


def why_not(placement: Placement, directory: Path) -> str | None:
    """Return why ranks that are placed like this cannot reduce a number; ``None`` if
    they can.
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
    record_property(MACHINE, machine.description)
    skip_because(machine.missing)


@pytest.fixture(params=["gloo", "NCCL"])
def placement(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> Placement:
    """Return where two ranks run, which share a GPU unless they use NCCL and there are
    several.
    """
    if request.param == "gloo":
        return GLOO
    nccl: NcclPlace = request.getfixturevalue("nccl")
    record_property(NCCL_RANKS, nccl.description)
    if nccl.placement is None:
        skip_because(nccl.description)
    return nccl.placement


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Attach the first sentence of its docstring to each test."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == FOLDER:
            sentence = " ".join(str(item.function.__doc__).partition("\n\n")[0].split())
            item.user_properties.append((PROVES, sentence.rstrip(".")))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table for docs/reference/compatibility.md: a row for each sentence, with
    the cases of each result.
    """
    cases: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    facts: dict[str, None] = {}  # in order, without repetitions
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            if PROVES in properties:
                facts |= {
                    properties[name]: None for name in (MACHINE, NCCL_RANKS) if name in properties
                }
                cases[properties[PROVES]][_result_in(outcome, report)].append(_case_of(report))
    if cases:
        terminalreporter.section("what this proves")
        terminalreporter.write_line(f"| {'; '.join(facts)} | Result |\n| --- | --- |")
    for sentence, cases_by_result in cases.items():
        cells = [f"{result}{_listed(names)}" for result, names in cases_by_result.items()]
        terminalreporter.write_line(f"| {sentence} | {'; '.join(cells)} |")


def _case_of(report: Any) -> str:
    """Return the parameters of a test; empty if it has none."""
    _, _, case = report.nodeid.partition("[")
    return case.rstrip("]")


def _result_in(outcome: str, report: Any) -> str:
    is_skipped = outcome == "skipped" and isinstance(report.longrepr, tuple)
    return f"skipped ({report.longrepr[2].removeprefix('Skipped: ')})" if is_skipped else outcome


def _listed(cases: list[str]) -> str:
    names = ", ".join(sorted(filter(None, cases)))
    return f": {names}" if names else ""
