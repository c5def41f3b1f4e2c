"""Place the ranks of the GPU tests, and skip the tests if torch finds no GPU.

A placement is a backend, the device of each rank, and the variables that NCCL needs there.
With ``DDPX_GPU_TESTS_ON=cpu``, the tests run on stand-ins: the CPU in the place of each
GPU, and gloo under another name in the place of NCCL. This only shows that the tests
work.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from tests.harness import ranks, training
from tests.harness.environment import skip_because

IS_GPU = os.environ.get("DDPX_GPU_TESTS_ON") != "cpu"
GPU = "cuda:0" if IS_GPU else "cpu"
SECOND_GPU = "cuda:1" if IS_GPU else "cpu"
NCCL = "nccl" if IS_GPU else "nccl_stand_in"
# Two ranks' kernels on one card run at the same time, so they must leave each other
# space.
_SHARED = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
}


def torch_devices(names: Sequence[str]) -> list[torch.device]:
    return [torch.device(name) for name in names]


@dataclass(frozen=True)
class Placement:
    """A backend, the device of each rank, and variables that the backend needs there."""

    backend: str
    devices: tuple[str, ...]
    env: ranks.Environment = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The strategy's options; for use on a rank, which may register the backend."""
        return {
            "parallel_devices": torch_devices(self.devices),
            "process_group_backend": training.backend(self.backend),
        }

    @property
    def variables(self) -> ranks.Environment:
        """The environment of ranks that are started by hand."""
        return {**ranks.by_hand_env(len(self.devices), ranks.free_port()), **self.env}

    @contextmanager
    def group(self, rank: int, world_size: int, directory: Path) -> Iterator[torch.device]:
        """Form the default process group; yield this rank's device."""
        device = torch.device(self.devices[rank])
        if IS_GPU:
            torch.cuda.set_device(device)
        backend = training.backend(self.backend)
        with training.stock_group(rank, world_size, directory, backend):
            yield device

    def trainer(self, directory: Path, kind: training.Kind = "ours", **options: Any) -> L.Trainer:
        """Return a Trainer on these devices, for use on a rank; the option ``strategy``
        holds more options of the strategy.
        """
        strategy_options = {**self.options, **options.pop("strategy", {})}
        strategy = training.make_strategy(kind, directory, **strategy_options)
        options = {"accelerator": "auto", "devices": "auto", **options}
        return training.make_trainer(strategy, **options)

    def launch(self, function: Any, *args: Any, **options: Any) -> list[ranks.Outcome]:
        """Call ``function(rank, world_size, placement, *args)`` on each rank, as
        ``launch_ranks`` does.
        """
        return ranks.launch_ranks(
            function, len(self.devices), self, *args, env=self.variables, **options
        )

    def run(self, function: Any, *args: Any) -> list[Any]:
        """Call ``function(rank, world_size, placement, *args)`` on each rank, as
        ``run_ranks`` does.
        """
        return ranks.run_ranks(function, len(self.devices), self, *args, env=self.variables)


GLOO = Placement("gloo", (GPU, GPU))
ALONE = Placement(NCCL, (GPU,))
ONE_EACH = Placement(NCCL, (GPU, SECOND_GPU))
ONE_EACH_REVERSED = Placement(NCCL, (SECOND_GPU, GPU))
# NCCL refuses ranks that share a card, unless they seem to be on two hosts or, from
# 2.30 on, a variable allows it.
ON_ONE_CARD = {
    "an NCCL_HOSTID for each rank": Placement(NCCL, (GPU, GPU), {**_SHARED, "NCCL_HOSTID": str}),
    "NCCL_MULTI_RANK_GPU_ENABLE=1": Placement(
        NCCL, (GPU, GPU), {**_SHARED, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    ),
}


def on_cpu(world_size: int) -> Placement:
    """Return ranks that use the CPU only."""
    return Placement("gloo", ("cpu",) * world_size)


class Wide(training.Net):
    """Has 4 MiB of parameters, in several buckets of DDP if each has 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        hidden = [nn.Linear(512, 512) for _ in range(4)]
        self.layers = nn.Sequential(nn.Linear(4, 512), *hidden, nn.Linear(512, 1))


# What this machine has.


def pytest_report_header() -> str:
    """Print this machine's GPUs and versions above the tests."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    nccl = torch.cuda.nccl.version() if gpus else "none"
    return f"torch {torch.__version__}, NCCL {nccl}, GPUs: {gpus if IS_GPU else 'CPU stand-ins'}"


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
        torch.distributed.all_reduce(total)
        assert float(total) == world_size


@pytest.fixture(params=["gloo", "NCCL"])
def placement(request: pytest.FixtureRequest) -> Placement:
    """Return a placement of two ranks. They share a GPU, unless they use NCCL on a
    machine with several.
    """
    return GLOO if request.param == "gloo" else request.getfixturevalue("nccl")
