"""The rendezvous without Lightning: what a rank asks for, and ranks that do one thing after they have met."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp_ext.rendezvous.endpoint import FileEndpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.process_context import ProcessContext, join
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.world import World
from tests.harness.ranks import Outcome, RankProcesses, free_port, hold

# Seconds after init_timeout within which every rank has ended, whatever happens.
GRACE = 5.0
# What starting processes and their imports may take on a machine that is busy.
START = 10.0

# What one process asks for: arguments of ``request``.
Settings = Mapping[str, Any]


def limit(init_timeout: float = 0.0) -> float:
    """The time limit of ranks that fail in their start-up."""
    return init_timeout + GRACE + START


def place(kind: str, directory: Path) -> Tcp | str:
    """Where ranks can meet on this host: ``tcp`` or ``file``."""
    return Tcp("127.0.0.1", free_port()) if kind == "tcp" else str(directory / "store")


def url(where: Tcp | str) -> str:
    return f"file://{where}" if isinstance(where, str) else str(where)


def request(
    rank: int,
    world_size: int,
    where: Tcp | str,
    *,
    init_timeout: float = 20.0,
    timeout: float | None = None,
    backend: str = "gloo",
    init_method: str | None = None,
    **fields: Any,
) -> Request:
    """What a Trainer on CPU would ask for; ``fields`` are those of ``Request``."""
    world = World(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, source="tests"
    )
    return Request(
        world=world,
        endpoint=FileEndpoint(where) if isinstance(where, str) else TcpEndpoint(where),
        init_method=init_method or url(where),
        backend=backend,
        device=torch.device("cpu"),
        timeout=None if timeout is None else timedelta(seconds=timeout),
        init_timeout=timedelta(seconds=init_timeout),
        **fields,
    )


def join_as(seat: int, where: Tcp | str, settings: Sequence[Settings]) -> ProcessContext:
    """Join as the process on this seat wants to."""
    mine: dict[str, Any] = {"rank": seat, "world_size": len(settings), **settings[seat]}
    context = join(request(mine.pop("rank"), mine.pop("world_size"), where, **mine))
    assert context is not None
    return context


def add_ones() -> float:
    """One collective; the number of ranks in it."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def meet(seat: int, seats: int, where: Tcp | str, settings: Sequence[Settings]) -> float:
    """A rank that waits until the test lets it go, joins, and adds ones with the others."""
    hold("ready")
    join_as(seat, where, settings)
    return add_ones()


def meet_and_stay(seat: int, seats: int, where: Tcp | str, settings: Sequence[Settings]) -> float:
    """The same, but after joining it waits a second time until the test lets it go."""
    hold("ready")
    join_as(seat, where, settings)
    hold("joined")
    return add_ones()


@contextmanager
def started(
    function: Any, where: Tcp | str, settings: Sequence[Settings], *, time_limit: float, **options: Any
) -> Iterator[RankProcesses]:
    """Processes, one for each entry of ``settings``, that stand in front of ``join``; all or those of ``start``."""
    with RankProcesses(function, len(settings), where, settings, time_limit=time_limit, **options) as ranks:
        for seat in ranks.pids:
            ranks.wait_for("ready", seat)
        yield ranks


def let_go(ranks: RankProcesses, *seats: int) -> None:
    """Let these processes go on, or all that have been started."""
    for seat in seats or ranks.pids:
        ranks.release(seat)


def endings(where: Tcp | str, settings: Sequence[Settings], *, init_timeout: float = 1.5) -> list[Outcome]:
    """How processes end that join at the same time, one for each entry of ``settings``."""
    settings = [{"init_timeout": init_timeout, **mine} for mine in settings]
    with started(meet, where, settings, time_limit=limit(init_timeout)) as ranks:
        let_go(ranks)
        return ranks.wait()


def sentence(outcome: Outcome, kind: type[BaseException]) -> str:
    """What a user reads of a rank that has ended with this error, and with status 1."""
    assert outcome.error is not None, outcome.story()
    assert (outcome.error.type_name, outcome.exit_code) == (kind.__name__, 1), outcome.story()
    return outcome.error.message


def same_sentence(outcomes: Sequence[Outcome], kind: type[BaseException]) -> str:
    """What a user reads on every one of these ranks."""
    (message,) = {sentence(outcome, kind) for outcome in outcomes}
    return message


def process(rank: int, pid: int) -> str:
    """How messages name a process."""
    return f"rank {rank} (host {os.uname().nodename}, pid {pid})"
