"""Who the ranks are, and what must be the same on all of them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.rendezvous.sockets import network_identity

_LONGEST_LIST = 16


@dataclass(frozen=True)
class RankInfo:
    """The process that is a rank. ``network`` is the same for processes that a loopback connection joins."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    network: str = field(default_factory=network_identity)

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class RankTable:
    """All ranks in their order, and a text that no other start has."""

    start_id: str
    ranks: tuple[RankInfo, ...]

    def __getitem__(self, rank: int) -> RankInfo:
        return self.ranks[rank]

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def on_one_host(self) -> bool:
        """Whether a loopback connection joins all ranks."""
        return len({info.network for info in self.ranks}) == 1

    def to_message(self) -> dict[str, Any]:
        """The table as JSON; each host is written once, as there may be thousands of ranks."""
        hosts = list(dict.fromkeys((info.host, info.network) for info in self.ranks))
        numbers = {host: number for number, host in enumerate(hosts)}
        ranks = [[numbers[info.host, info.network], info.pid] for info in self.ranks]
        return {"start_id": self.start_id, "hosts": hosts, "ranks": ranks}

    @staticmethod
    def of(message: dict[str, Any]) -> RankTable:
        """The table that :meth:`to_message` has described."""
        hosts = message["hosts"]
        infos = [RankInfo(rank, hosts[at][0], pid, hosts[at][1]) for rank, (at, pid) in enumerate(message["ranks"])]
        return RankTable(message["start_id"], tuple(infos))


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself when it connects; ``versions`` maps a package to its version."""

    info: RankInfo
    world_size: int
    init_method: str
    versions: dict[str, str]

    @staticmethod
    def of(values: dict[str, Any]) -> Hello:
        """The hello that was sent as JSON; raises ``KeyError``, ``TypeError`` or ``ValueError`` if it is none."""
        info, world_size = RankInfo(**values["info"]), int(values["world_size"])
        if type(info.rank) is not int or not 0 <= info.rank < world_size:
            raise ValueError(f"rank {info.rank!r} of {world_size}")
        return Hello(info, world_size, str(values["init_method"]), dict(values["versions"]))


def difference_between(first: Hello, second: Hello) -> str | None:
    """A sentence on the first setting in which two ranks differ and must not."""
    for what, mine, other in _settings(first, second):
        if mine != other:
            low, high = sorted([(first.info, mine), (second.info, other)], key=lambda side: side[0].rank)
            return (
                f"{what} must be the same on all ranks: {low[0]} has {low[1]}, {high[0]} has {high[1]}; "
                "start every rank with the same settings and the same installation"
            )
    return None


def _settings(first: Hello, second: Hello) -> list[tuple[str, object, object]]:
    pairs: list[tuple[str, object, object]] = [("world_size", first.world_size, second.world_size)]
    if _port_of(first.init_method) != _port_of(second.init_method):
        pairs.append(("init_method", first.init_method, second.init_method))
    for package in sorted(first.versions.keys() | second.versions.keys()):
        mine, other = (hello.versions.get(package, "none") for hello in (first, second))
        what = package if package.isupper() else f"the version of {package}"  # a variable
        pairs.append((what, mine, other))
    return pairs


def _port_of(init_method: str) -> str:
    # Ranks may know rank 0's host by different names; they are connected, so it is the same host.
    return re.sub(r"^tcp://.*:", "tcp://", init_method)


def ranks_in_words(ranks: Iterable[int]) -> str:
    """A few ranks at the beginning of a sentence.

    >>> ranks_in_words([2]), ranks_in_words([2, 1])
    ('rank 2', 'ranks 1, 2')
    """
    known = sorted(ranks)
    more = f" and {len(known) - _LONGEST_LIST} more" if len(known) > _LONGEST_LIST else ""
    return f"rank{'s' if len(known) != 1 else ''} {', '.join(map(str, known[:_LONGEST_LIST]))}{more}"
