"""Find out what this machine's GPUs can do, and print what the tests have proven with
them.
"""

from __future__ import annotations

import platform
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import placement as places
from tests.gpu.placement import GPU, IS_GPU, Placement
from tests.harness.environment import skip_because
from tests.harness.ranks import launch_ranks

PROVES = "proves"
MACHINE = "machine"
RANKS = "ranks of NCCL"
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Machine:
    """The GPUs that torch uses, in words; or the reason why it uses no GPU."""

    cards: int
    description: str
    missing: str | None = None


def look_at_gpus(rank: int, world_size: int) -> tuple[int, str]:
    """Use a GPU, and describe what is used; in a process that ends, because its context
    would remain.
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
    [outcome] = launch_ranks(look_at_gpus, 1)
    if outcome.error is not None and listed:
        reason = (
            f"nvidia-smi lists {listed}, but torch {torch.__version__} cannot use them:"
            f" {outcome.error.message}"
        )
        pytest.fail(reason, pytrace=False)
    if outcome.result is None:
        return Machine(0, versions, "torch finds no GPU")
    cards, description = outcome.result
    driver = listed[0].rpartition(", ")[2] if listed else "unknown"
    return Machine(cards, f"{description}, driver {driver}; {versions}")


@pytest.fixture(scope="session")
def nccl(
    machine: Machine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Placement | None, str]:
    """Return where two ranks of NCCL work, and how; ``None`` with the reasons if
    nowhere.
    """
    if not IS_GPU:
        return places.ONE_EACH, "gloo in the place of NCCL"
    ways = {"a GPU for each rank": places.ONE_EACH} if machine.cards > 1 else places.ON_ONE_CARD
    reasons = {}
    for way, placement in ways.items():
        reasons[way] = places.why_not(placement, tmp_path_factory.mktemp("nccl"))
        if reasons[way] is None:
            return placement, f"two ranks, {way}"
    return None, "two ranks of NCCL do not work here: " + "; ".join(
        f"{way}: {why}" for way, why in reasons.items()
    )


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
        return places.GLOO
    found, description = request.getfixturevalue("nccl")
    record_property(RANKS, description)
    skip_because(description if found is None else None)
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and item.path.parent == FOLDER:
            sentence = " ".join(str(item.function.__doc__).partition("\n\n")[0].split())
            item.user_properties.append((PROVES, sentence.rstrip(".")))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a table for docs/reference/compatibility.md."""
    results: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    facts: dict[str, None] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = dict(getattr(report, "user_properties", ()))
            if PROVES in properties:
                facts.update(
                    dict.fromkeys(
                        properties[name] for name in (MACHINE, RANKS) if name in properties
                    )
                )
                case = report.nodeid.rpartition("[")[2].rstrip("]") if "[" in report.nodeid else ""
                results[properties[PROVES]][_result_in(outcome, report)].append(case)
    if results:
        terminalreporter.section("what this proves")
        terminalreporter.write_line(f"| {'; '.join(facts)} | Result |\n| --- | --- |")
    for proven, by_outcome in results.items():
        cells = [f"{outcome}{_listed(cases)}" for outcome, cases in by_outcome.items()]
        terminalreporter.write_line(f"| {proven} | {'; '.join(cells)} |")


def _result_in(outcome: str, report: Any) -> str:
    is_skipped = outcome == "skipped" and isinstance(report.longrepr, tuple)
    return f"skipped ({report.longrepr[2].removeprefix('Skipped: ')})" if is_skipped else outcome


def _listed(cases: list[str]) -> str:
    named = ", ".join(sorted(filter(None, cases)))
    return f": {named}" if named else ""
