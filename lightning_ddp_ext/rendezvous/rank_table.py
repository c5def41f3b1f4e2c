"""Describe the process of each rank, and find settings that differ between ranks."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.rendezvous.sockets import network_identity


@dataclass(frozen=True)
class RankInfo:
    """The process of a rank. ``network`` is the same for processes that can reach each other by loopback."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    network: str = field(default_factory=network_identity)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Hello:
    """The description that a rank sends when it connects; ``versions`` maps a package to its version.

    ``run`` is the launcher's name for the run.
    """

    info: RankInfo
    world_size: int
    init_method: str
    versions: dict[str, str]
    run: str = ""

    @staticmethod
    def of(values: dict[str, Any]) -> Hello:
        """Parse a hello from JSON; raise ``KeyError``, ``TypeError`` or ``ValueError`` if it is malformed."""
        info, world_size = RankInfo(**values["info"]), int(values["world_size"])
        if type(info.rank) is not int or not 0 <= info.rank < world_size:
            raise ValueError(f"rank {info.rank!r} of {world_size}")
        return Hello(info, world_size, str(values["init_method"]), dict(values["versions"]), str(values["run"]))

    def settings(self) -> dict[str, str]:
        """Return the settings that must be the same on all ranks, by their names in messages."""
        found = {"world_size": str(self.world_size), "init_method": self.init_method}
        found |= {f"the version of {name}": version for name, version in self.versions.items()}
        loose = "the version of torchmetrics"  # a difference in the patch number only causes a warning
        if loose in found:
            found[loose] = ".".join(found[loose].split(".")[:2])
        return found


def difference_between(first: Hello, second: Hello) -> str | None:
    """Describe the first setting that wrongly differs between two ranks; ``None`` if all match."""
    low, high = sorted([first, second], key=lambda hello: hello.info.rank)
    for name in {**low.settings(), **high.settings()}:
        one, other = (hello.settings().get(name, "none") for hello in (low, high))
        # Ranks may use different names for rank 0's host; since both ranks reached it, it is the same host.
        if re.sub(r"^tcp://.*:", "tcp://", one) != re.sub(r"^tcp://.*:", "tcp://", other):
            return (
                f"{name} must be the same on all ranks: {low.info} has {one}, {high.info} has {other}; "
                "start every rank with the same settings and the same installation"
            )
    return None
