"""What a process says of itself in the roll call, and the table of what all of them have said."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_ddp_ext.rendezvous.sockets import network_identity


@dataclass(frozen=True)
class Claim:
    """What a process says of itself when it answers the roll call; ``versions`` maps a package to its version."""

    rank: int
    world_size: int
    device: str
    init_method: str
    versions: dict[str, str]
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    network: str = field(default_factory=network_identity)
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    beat: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Table:
    """The claims of all ranks, in their order, under the nonce of this attempt.

    ``lifeline`` is where rank 0 listens for the other ranks: its addresses and the port.
    """

    attempt: str
    claims: tuple[Claim, ...]
    lifeline: tuple[tuple[str, ...], int]

    def __getitem__(self, rank: int) -> Claim:
        return self.claims[rank]

    @property
    def on_one_host(self) -> bool:
        """Whether a loopback connection joins all ranks."""
        return len({claim.network for claim in self.claims}) == 1


def claim_key(rank: int) -> str:
    """Where in the store the claim on ``rank`` stands."""
    return f"claim/{rank}"


def holds(table: Table, claim: Claim) -> bool:
    """Whether the table seats the process of ``claim``, and no other, on its rank."""
    return claim.rank < len(table.claims) and table[claim.rank].nonce == claim.nonce


def held_this_process(table: Table, claim: Claim) -> bool:
    """Whether the table is of a group that this very process was in, before it came to form a new one."""
    return any((held.host, held.pid) == (claim.host, claim.pid) for held in table.claims)


def claim_of(values: dict[str, Any]) -> Claim | None:
    """The claim, also of another version of this package; ``None`` if that one wrote something else altogether."""
    known = {field.name for field in fields(Claim)}
    try:
        return Claim(**{name: value for name, value in values.items() if name in known})
    except TypeError:
        return None


def table_of(values: dict[str, Any]) -> Table | None:
    """The table that was published, if this version understands each of its claims."""
    claims = [claim_of(claim) for claim in values["claims"]]
    addresses, port = values["lifeline"]
    held = tuple(claim for claim in claims if claim is not None)
    return Table(values["attempt"], held, (tuple(addresses), port)) if len(held) == len(claims) else None


def difference_between(mine: Claim, other: Claim) -> str | None:
    """A sentence on the first thing in which two claims must agree and do not."""
    if _meeting_point(mine.init_method) == _meeting_point(other.init_method):
        other = replace(other, init_method=mine.init_method)
    pairs = {"world_size": (mine.world_size, other.world_size), "init_method": (mine.init_method, other.init_method)}
    for package in sorted(mine.versions.keys() | other.versions.keys()):
        pairs[f"the version of {package}"] = (mine.versions.get(package, "none"), other.versions.get(package, "none"))
    for what, (my_value, other_value) in pairs.items():
        if my_value != other_value:
            low, high = sorted(
                [(mine.rank, my_value, mine), (other.rank, other_value, other)], key=lambda side: side[0]
            )
            return (
                f"{what} must be the same on all ranks: {low[2]} has {low[1]}, {high[2]} has {high[1]}; "
                "start every rank with the same settings and the same installation"
            )
    return None


def _meeting_point(init_method: str) -> str:
    # Ranks may know rank 0's host by different names: they have met, so it is the same host.
    return re.sub(r"^tcp://.*:", "tcp://", init_method)
