"""Check arguments where they are given: names, choices, and which of DDP's the installed torch has."""

from __future__ import annotations

import difflib
import functools
import inspect
import socket
from collections.abc import Callable
from typing import Any, ParamSpec

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.errors import ConfigurationError

P = ParamSpec("P")


def refuse_unknown(init: Callable[P, None]) -> Callable[P, None]:
    """Have ``init`` refuse an unknown argument by name, with the nearest one that exists; its signature stays.

    The names of those that were given go to the attribute ``_given_names`` of the object.
    """
    known = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"did you mean {near[0]}?" if near else "see help(DDPExtStrategy) for those that exist"
                raise ConfigurationError(f"DDPExtStrategy has no argument {name!r}; {remedy}")
        strategy: Any = args[0]
        strategy._given_names = frozenset(kwargs)
        init(*args, **kwargs)

    return checked


def ddp_options(init: Callable[..., None], values: dict[str, Any], given: frozenset[str]) -> dict[str, Any]:
    """DDP's options among the arguments of ``init``: ``dim``, and all that follow it.

    They are those that were given, and that the installed torch has; a default is left to DDP. One that was chosen
    and that the installed torch does not have is refused.
    """
    parameters = list(inspect.signature(init).parameters.values())
    first = next(index for index, parameter in enumerate(parameters) if parameter.name == "dim")
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    options = {}
    for parameter in parameters[first:]:
        name, value = parameter.name, values[parameter.name]
        if name in known:
            if name in given:
                options[name] = value
        elif value is not parameter.default:
            raise ConfigurationError(
                f"{name} is no option of DistributedDataParallel in torch {torch.__version__} (got {value!r}); "
                "leave it out, or install a torch that has it"
            )
    return options


def check_choice(field: str, value: object, *allowed: object) -> None:
    """Refuse a value that is none of those allowed, of which the first is the default."""
    if not any(type(value) is type(each) and value == each for each in allowed):
        choices = " or ".join(map(repr, allowed))
        raise ConfigurationError(f"{field} must be {choices} (got {value!r}); leave it out for {allowed[0]!r}")


def check_backend(backend: str | None) -> None:
    """Refuse a backend of process groups that torch does not know, alone or in ``cpu:gloo,cuda:nccl``.

    Raises:
        ConfigurationError: names those that there are.
    """
    known = dist.Backend.backend_list
    for part in backend.split(",") if backend is not None else ():
        if part.rpartition(":")[2].lower() not in known:
            raise ConfigurationError(
                f"process_group_backend must be one of {', '.join(known)}, or one for each kind of device as in "
                f"'cpu:gloo,cuda:nccl' (got {backend!r}); leave it out to have it chosen by the device"
            )


def check_interface(interface: str | None) -> None:
    """Refuse interfaces of which this host has none: ``eth1``, or as NCCL takes them, ``eth,ib`` or ``^docker0``.

    Raises:
        ConfigurationError: names those that there are.
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
