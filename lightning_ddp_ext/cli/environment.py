"""What would a run find here: versions, devices, interfaces, and what the launcher's variables mean?"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lightning_ddp_ext.cli.output import Report, header
from lightning_ddp_ext.errors import DDPExtError
from lightning_ddp_ext.rendezvous.init_method import choose
from lightning_ddp_ext.world import read_world

_PACKAGES = ("lightning-ddp-ext", "lightning", "pytorch-lightning", "torch", "torchmetrics", "numpy", "psutil")
_PREFIXES = ("DDPX_", "NCCL_", "GLOO_", "TORCH_NCCL_", "SLURM_NTASKS", "OMPI_COMM_", "PMI_")
_VARIABLES = {
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
    "TORCHELASTIC_RUN_ID", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_NNODES",
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
}  # fmt: skip


def describe(environ: Mapping[str, str] = os.environ) -> Report:
    """Report what a bug report needs; an error where the variables contradict one another."""
    world, error = _world(environ)
    facts: dict[str, Any] = {
        "versions": {name: _version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "backends": [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "interfaces": _interfaces(),
        "variables": {name: environ[name] for name in sorted(environ) if _is_ours(name)},
        "world": world,
    }
    process = world or "no rank of a launcher: the script starts its own ranks"
    lines = {**_lines(facts), "this process is": "unclear" if error is not None else process}
    return Report(facts, error, [header(lines)])


def _world(environ: Mapping[str, str]) -> tuple[str | None, str | None]:
    """What a process that is started with these variables would be, and what is wrong with them."""
    try:
        choose(None, environ)
        world = read_world(environ)
    except DDPExtError as error:
        return None, str(error)
    return (None if world is None else f"{world.describe()}, {world.source}"), None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _interfaces() -> dict[str, list[str]]:
    """IP addresses by interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [address.address for address in addresses if address.family in families]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _is_ours(name: str) -> bool:
    return name in _VARIABLES or name.startswith(_PREFIXES)


def _lines(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts, one short line each."""
    return {
        **{name: version or "not installed" for name, version in facts["versions"].items()},
        "python": facts["python"],
        "platform": facts["platform"],
        "host": f"{facts['host']}, {facts['cpus']} CPUs",
        "GPUs": ", ".join(facts["devices"]) or "none",
        "backends": ", ".join(facts["backends"]),
        "NCCL": facts["nccl"],
        "interfaces": "; ".join(f"{name} {', '.join(found)}" for name, found in facts["interfaces"].items()),
        "variables": ", ".join(f"{name}={value}" for name, value in facts["variables"].items()) or "none",
    }
