"""Place the ranks of the GPU tests: their backend, the device of each, and the
variables that NCCL needs there.

With ``DDPX_GPU_TESTS_ON=cpu``, the tests run on stand-ins: the CPU in the place of each
GPU, and gloo under another name in the place of NCCL. This only shows that the tests
work.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import ranks, training

IS_GPU = os.environ.get("DDPX_GPU_TESTS_ON") != "cpu"
GPU = "cuda:0" if IS_GPU else "cpu"
SECOND_GPU = "cuda:1" if IS_GPU else "cpu"
NCCL = "nccl" if IS_GPU else "nccl_stand_in"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # for sums in another order
_CALIBRATION_CYCLES = 10**8  # of the GPU's clock
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
        dist.init_process_group(
            training.backend(self.backend),
            init_method=f"file://{directory}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        yield device
        dist.destroy_process_group()

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
        world_size = len(self.devices)
        return ranks.launch_ranks(function, world_size, self, *args, env=self.variables, **options)

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


def hold_device(seconds: float) -> None:
    """Keep the current stream of a GPU busy, and return before it is idle again; on a
    CPU, wait.
    """
    if not IS_GPU:
        threading.Event().wait(seconds)
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    cycles_per_ms = _CALIBRATION_CYCLES / start.elapsed_time(end)
    torch.cuda._sleep(int(cycles_per_ms * seconds * 1000))
