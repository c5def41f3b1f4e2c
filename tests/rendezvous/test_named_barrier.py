"""Rank 0 lets ranks pass a barrier when all have come to the same one, in whatever order they come."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ddp_ext.rendezvous.named_barrier import Call, NamedBarriers
from lightning_ddp_ext.rendezvous.peer_event import PeerEvent
from lightning_ddp_ext.rendezvous.rank_table import RankInfo


class Peers:
    def __init__(self) -> None:
        self.arrived = threading.Condition()
        self.reported: list[PeerEvent] = []

    def report(self, event: PeerEvent) -> PeerEvent:
        self.reported.append(event)
        return event


class Table(dict[int, RankInfo]):
    @property
    def ranks(self) -> list[RankInfo]:
        return list(self.values())


def barriers_of_rank_zero(world_size: int) -> tuple[NamedBarriers, Peers, list[Any]]:
    """Rank 0's side, what it has reported, and what it has sent."""
    peers, sent = Peers(), []
    table = Table({rank: RankInfo(rank=rank, host="h", pid=10 + rank) for rank in range(world_size)})
    context: Any = SimpleNamespace(
        peers=peers,
        world=SimpleNamespace(rank=0),
        table=table,
        listen=lambda topic, handler: None,
        send=lambda topic, message: sent.append(message),
    )
    return NamedBarriers(context), peers, sent


def come(barriers: NamedBarriers, order: tuple[int, ...], names: list[str], *, steps: tuple[int, ...]) -> None:
    """Have the ranks begin their first call, one after the other."""
    for rank in order:
        if rank == 0:
            barriers.begin(names[0])
        else:
            barriers._note(Call(rank, 1, steps[rank], names[rank], names[rank]))


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_all_in_one_barrier_pass(order: tuple[int, ...]) -> None:
    barriers, peers, sent = barriers_of_rank_zero(3)
    come(barriers, order, ["data"] * 3, steps=(0, 0, 0))
    assert {"open": 1} in sent
    assert peers.reported == []


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
@pytest.mark.parametrize("odd", range(3))
def test_nobody_passes_where_one_is_in_another(odd: int, order: tuple[int, ...]) -> None:
    """Also if the odd one is neither the first nor the last to come; it is named first once all have come."""
    barriers, peers, sent = barriers_of_rank_zero(3)
    names = ["model" if rank == odd else "data" for rank in range(3)]
    come(barriers, order, names, steps=(0, 0, 0))
    assert {"open": 1} not in sent
    assert peers.reported
    assert all(f"rank {odd} (host h, pid {10 + odd}) began model" in event.reason for event in peers.reported)


def test_a_rank_that_has_gone_past_the_earliest_is_told() -> None:
    """What counts is the call that was begun after the fewest steps, whichever came first."""
    barriers, peers, _ = barriers_of_rank_zero(3)
    come(barriers, (2, 1), ["", "save", "save"], steps=(0, 1, 3))
    barriers.advance()
    with pytest.raises(Exception, match=r"rank 1 began save, and rank 0 .* did not: it has gone on without it"):
        barriers.advance()
    assert len(peers.reported) == 1
