"""Check the strategy's arguments: names, choices and network interfaces."""

from __future__ import annotations

import difflib
import inspect
import socket
from collections.abc import Callable, Iterable

import psutil
import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.errors import ConfigurationError

_SET_BY_LIGHTNING = ("module", "device_ids")


def refuse_unknown(init: Callable[..., None], ddp_kwargs: Iterable[str]) -> None:
    """Refuse an argument that neither a strategy's ``init`` nor the installed DistributedDataParallel has.

    Raises:
        ConfigurationError: names the nearest argument, and those that DistributedDataParallel has.
    """
    options = [name for name in inspect.signature(DistributedDataParallel).parameters if name not in _SET_BY_LIGHTNING]
    for name in ddp_kwargs:
        if name not in options:
            near = difflib.get_close_matches(name, [*inspect.signature(init).parameters, *options], n=1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out."
            raise ConfigurationError(
                f"DDPExtStrategy has no argument {name!r}; {remedy} Besides its own arguments it takes those of "
                f"DistributedDataParallel in torch {torch.__version__}: {', '.join(options)}"
            )


def check_choice(field: str, value: object, *allowed: object) -> None:
    """Refuse a value that is not one of those allowed, of which the first is the default."""
    if not any(type(value) is type(each) and value == each for each in allowed):
        choices = " or ".join(map(repr, allowed))
        raise ConfigurationError(f"{field} must be {choices} (got {value!r}); leave it out for {allowed[0]!r}")


def check_at_least_one(field: str, value: int) -> None:
    """Refuse a number below 1."""
    if value < 1:
        raise ConfigurationError(f"{field} must be at least 1 (got {value})")


def check_interface(interface: str | None) -> None:
    """Refuse a network interface that this host does not have: ``eth1``, or NCCL's forms ``eth,ib`` and ``^docker0``.

    Raises:
        ConfigurationError: names those of the host.
    """
    if interface is None:
        return
    names = psutil.net_if_addrs()
    beginnings = tuple(part.lstrip("^=") for part in interface.split(","))
    if not any(name.startswith(beginnings) for name in names):
        raise ConfigurationError(
            f"interface must be one of host {socket.gethostname()}'s: {', '.join(names)} (got {interface!r}); where it "
            "has another name on each host, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME there"
        )
