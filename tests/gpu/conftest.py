"""Skip the tests if torch finds no GPU, and find out how two ranks of NCCL work on this
machine's GPUs.
"""

import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.placement import GLOO, GPU, IS_GPU, ON_ONE_CARD, ONE_EACH, Placement
from tests.harness.environment import skip_because
from tests.harness.ranks import launch_ranks

SECONDS_TO_REDUCE = 60


def use_gpu(rank: int, world_size: int) -> None:
    """Use a GPU, on a rank, because its context remains until the process exits."""
    torch.ones(1, device=GPU)


def gpus_of_driver() -> list[str]:
    """Return the name and the driver's version of each GPU that ``nvidia-smi`` lists."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return []
    return [] if listed.returncode else listed.stdout.splitlines()


def pytest_report_header() -> str:
    """Print this machine's GPUs and versions above the tests."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    gpus = ", ".join(gpus_of_driver()) or "none"
    return f"torch {torch.__version__}, NCCL {nccl}, GPUs: {gpus if IS_GPU else 'CPU stand-ins'}"


@pytest.fixture(scope="session", autouse=True)
def needs_gpu() -> None:
    """Skip the tests if there is no GPU; fail if torch cannot use one of the driver's."""
    if not IS_GPU:
        return
    [outcome] = launch_ranks(use_gpu, 1)
    if outcome.exit_code == 0:
        return
    listed = gpus_of_driver()
    if listed:
        reason = f"nvidia-smi lists {listed}, but torch cannot use them: {outcome.story()}"
        pytest.fail(reason, pytrace=False)
    skip_because("torch finds no GPU")


@pytest.fixture(scope="session")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Placement | None:
    """Return a placement in which two ranks of NCCL work; skip the test without one."""
    if not IS_GPU:
        return ONE_EACH
    ways = {"a GPU for each rank": ONE_EACH} if torch.cuda.device_count() > 1 else ON_ONE_CARD
    reasons = []
    for way, placement in ways.items():
        reason = why_not(placement, tmp_path_factory.mktemp("nccl"))
        if reason is None:
            return placement
        reasons.append(f"{way}: {reason}")
    skip_because(f"two ranks of NCCL do not work here: {'; '.join(reasons)}")
    return None


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


@pytest.fixture(params=["gloo", "NCCL"])
def placement(request: pytest.FixtureRequest) -> Placement:
    """Return a placement of two ranks. They share a GPU, unless they use NCCL on a
    machine with several.
    """
    return GLOO if request.param == "gloo" else request.getfixturevalue("nccl")
