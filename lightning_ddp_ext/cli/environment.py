"""Describe this machine: versions, devices, interfaces, and the launcher's rank."""

from __future__ import annotations

import os
import platform
import socket
from importlib import metadata
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightning_ddp_ext.cli.output import print_line
from lightning_ddp_ext.errors import DDPExtError
from lightning_ddp_ext.rendezvous.init_method import choose
from lightning_ddp_ext.world import read_world

_PACKAGES = (
    "lightning-ddp-ext",
    "lightning",
    "pytorch-lightning",
    "torch",
    "torchmetrics",
    "numpy",
    "psutil",
)
_PREFIXES = (
    "DDPX_", "NCCL_", "GLOO_", "TORCH_NCCL_", "MASTER_", "SLURM_N", "SLURM_STEP_", "OMPI_COMM_",
    "PMI_", "MPI_LOCAL",
)  # fmt: skip
_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_PROCID",
    "SLURM_LOCALID",
}  # fmt: skip


def env() -> int:
    """Print the facts that a bug report needs, and return the exit status.

    The status is 1 if an environment variable is invalid.
    """
    facts = _facts_of_machine()
    error = None
    try:
        choose(None, os.environ)
        facts["world"] = _world_in_words()
    except DDPExtError as invalid:
        error = str(invalid)
    for name, value in {**facts, "error": error}.items():
        print_line(f"{name}: {_text(value)}")
    return 0 if error is None else 1


def _facts_of_machine() -> dict[str, Any]:
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    gpus = range(torch.cuda.device_count())
    backends = ("gloo", "nccl", "mpi")
    return {
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0)),
        "devices": [f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in gpus],
        "backends": [name for name in backends if getattr(dist, f"is_{name}_available")()],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "interfaces": _interfaces(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if _is_shown(name)},
        "world": None,
    }


def _is_shown(variable: str) -> bool:
    return variable in _NAMES or variable.startswith(_PREFIXES)


def _world_in_words() -> str:
    world = read_world(os.environ)
    if world is None:
        return "not a rank of a launcher"
    return f"rank {world.rank} of {world.world_size}, {world.source}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _interfaces() -> dict[str, list[str]]:
    """Return IP addresses by interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [address.address for address in addresses if address.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_text(entry)}" for name, entry in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
