"""Skip the tests if torch finds no GPU, and find out how two ranks of NCCL work on this
machine's GPUs.
"""

import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.placement import GLOO, IS_GPU, ON_ONE_CARD, ONE_EACH, Placement
from tests.harness.environment import skip_because


def pytest_report_header() -> str:
    """Print this machine's GPUs and versions above the tests."""
    command = "nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || echo none"
    gpus = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    used = gpus.replace("\n", " ") if IS_GPU else "CPU stand-ins"
    return f"torch {torch.__version__}, NCCL {nccl}, GPUs: {used}"


@pytest.fixture(scope="session", autouse=True)
def needs_gpu() -> None:
    """Skip the tests if torch finds no GPU."""
    is_usable = torch.cuda.is_available() or not IS_GPU
    skip_because(None if is_usable else "torch finds no GPU")


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
    try:
        placement.run(reduce_once, directory)
    except AssertionError as error:
        return str(error)
    return None


def reduce_once(rank: int, world_size: int, placement: Placement, directory: Path) -> None:
    with placement.group(rank, world_size, directory) as device:
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        assert float(total) == world_size


@pytest.fixture(params=["gloo", "NCCL"])
def placement(request: pytest.FixtureRequest) -> Placement:
    """Return a placement of two ranks. They share a GPU, unless they use NCCL on a
    machine with several.
    """
    return GLOO if request.param == "gloo" else request.getfixturevalue("nccl")
