"""Place the ranks of the GPU tests: their backend, the device of each, and the
variables that NCCL needs there.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import ranks, training
from tests.harness.outcomes import Outcome
from tests.harness.training import Net, backend

IS_GPU = os.environ.get("DDPX_GPU_TESTS_ON") != "cpu"
GPU = "cuda:0" if IS_GPU else "cpu"
NCCL = "nccl" if IS_GPU else "nccl_stand_in"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # for sums in another order
CALIBRATED = 10**8  # clock cycles
# Two ranks' kernels on one card run at the same time, so they must leave each other
# space.
_SHARED = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
}


@dataclass(frozen=True)
class Placement:
    """Ranks with a backend, and a device each."""

    backend: str
    devices: tuple[str, ...]
    env: ranks.Environment = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The strategy's options; for use on a rank."""
        devices = [torch.device(device) for device in self.devices]
        return {"parallel_devices": devices, "process_group_backend": backend(self.backend)}

    @property
    def variables(self) -> ranks.Environment:
        """The environment of ranks that are started by hand."""
        world_size = len(self.devices)
        return {**ranks.by_hand_env(world_size, ranks.free_port()), **self.env}

    def trainer(self, directory: Path, kind: training.Kind = "ours", **options: Any) -> L.Trainer:
        """Return a Trainer on these devices, for use on a rank; ``strategy`` in the
        options has the strategy's.
        """
        strategy = training.make_strategy(
            kind, directory, **{**self.options, **options.pop("strategy", {})}
        )
        return training.make_trainer(
            strategy, **{"accelerator": "auto", "devices": "auto", **options}
        )

    def launch(self, function: Any, *args: Any, **options: Any) -> list[Outcome]:
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
ONE_EACH = Placement(NCCL, ("cuda:0", "cuda:1") if IS_GPU else ("cpu", "cpu"))
# NCCL refuses ranks that share a card, unless they seem to be on two hosts or, from
# 2.30 on, a variable allows it.
ON_ONE_CARD = {
    "an NCCL_HOSTID for each rank": Placement(NCCL, (GPU, GPU), {**_SHARED, "NCCL_HOSTID": str}),
    "NCCL_MULTI_RANK_GPU_ENABLE=1": Placement(
        NCCL, (GPU, GPU), {**_SHARED, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    ),
}


class Wide(Net):
    """Has 4 MiB of parameters, in several buckets of DDP if each has 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Linear(512, 512) for _ in range(4)]
        self.layers = nn.Sequential(nn.Linear(4, 512), *wide, nn.Linear(512, 1))


def why_not(placement: Placement, directory: Path) -> str | None:
    """Return why ranks that are placed like this cannot reduce a number; ``None`` if
    they can.
    """
    try:
        outcomes = placement.launch(reduce_once, directory, time_limit=90)
    except AssertionError:
        return "does not end within 90 s"
    failed = [outcome for outcome in outcomes if outcome.exit_code]
    messages = [outcome.error.message.strip() for outcome in failed if outcome.error] or [
        "ends its process"
    ]
    return messages[0].splitlines()[-1] if failed else None


def reduce_once(rank: int, world_size: int, placement: Placement, directory: Path) -> None:
    device = torch.device(placement.devices[rank])
    address = f"file://{directory}/store"
    limit = timedelta(seconds=60)
    chosen = {"rank": rank, "world_size": world_size, "timeout": limit}
    dist.init_process_group(placement.backend, init_method=address, device_id=device, **chosen)
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    assert float(one) == world_size
    dist.destroy_process_group()


def hold_device(seconds: float) -> None:
    """Keep the current stream of a GPU busy, without waiting for it; on a CPU, wait."""
    if not IS_GPU:
        threading.Event().wait(seconds)
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(CALIBRATED)
    end.record()
    end.synchronize()
    torch.cuda._sleep(int(CALIBRATED * seconds * 1000 / start.elapsed_time(end)))
