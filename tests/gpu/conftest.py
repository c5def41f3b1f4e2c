"""Find out what this machine's GPUs can do, and print what the tests have proven with
them.
"""

import platform
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.gpu.placement import GLOO, GPU, IS_GPU, ON_ONE_CARD, ONE_EACH, Placement
from tests.harness.environment import skip_because
from tests.harness.ranks import launch_ranks

# Names of a test's properties, from which the table is made: its first sentence, and
# descriptions of the places where it ran.
PROVES = "proves"
MACHINE = "machine"
NCCL_RANKS = "ranks of NCCL"

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
    """A placement in which two ranks of NCCL work, None if there is none, and its
    description for the table.
    """

    placement: Placement | None
    description: str


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Attach the first sentence of its docstring to each test."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == FOLDER:
            sentence = " ".join(str(item.function.__doc__).partition("\n\n")[0].split())
            item.user_properties.append((PROVES, sentence.rstrip(".")))


class Result(NamedTuple):
    """One test's row of the table, before cases of the same test are joined.

    Attributes:
        sentence: what the test proves.
        outcome: such as "passed" or "skipped (needs two GPUs)".
        case: the test's parameters; empty if it has none.
        places: descriptions of the machine, and of the ranks of NCCL.
    """

    sentence: str
    outcome: str
    case: str
    places: list[str]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table for docs/reference/compatibility.md: a row for each sentence, with
    the cases of each outcome.
    """
    results = list(_results_in(terminalreporter))
    if not results:
        return
    places = dict.fromkeys(place for result in results for place in result.places)
    terminalreporter.section("what this proves")
    terminalreporter.write_line(f"| {'; '.join(places)} | Result |\n| --- | --- |")
    for sentence in dict.fromkeys(result.sentence for result in results):
        cases: dict[str, list[str]] = defaultdict(list)
        for result in results:
            if result.sentence == sentence:
                cases[result.outcome].append(result.case)
        cells = [f"{outcome}{_listed(names)}" for outcome, names in cases.items()]
        terminalreporter.write_line(f"| {sentence} | {'; '.join(cells)} |")


def _results_in(terminalreporter: Any) -> Iterator[Result]:
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            if PROVES in properties:
                places = [properties[name] for name in (MACHINE, NCCL_RANKS) if name in properties]
                _, _, case = report.nodeid.partition("[")
                yield Result(
                    properties[PROVES], _with_reason(outcome, report), case.rstrip("]"), places
                )


def _with_reason(outcome: str, report: Any) -> str:
    """Return the outcome; if the test was skipped, with the reason."""
    is_skipped = outcome == "skipped" and isinstance(report.longrepr, tuple)
    return f"skipped ({report.longrepr[2].removeprefix('Skipped: ')})" if is_skipped else outcome


def _listed(cases: list[str]) -> str:
    names = ", ".join(sorted(filter(None, cases)))
    return f": {names}" if names else ""
