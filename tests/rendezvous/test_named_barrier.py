"""Rank 0 opens a barrier when all ranks have reached the same one, in any order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ddp_ext.errors import RankAbsentError
from lightning_ddp_ext.rendezvous.named_barrier import Call, NamedBarriers
from lightning_ddp_ext.rendezvous.peer_event import PeerEvent
from lightning_ddp_ext.rendezvous.rank_table import RankInfo
from lightning_ddp_ext.rendezvous.wire import Message


class RankZero:
    """Rank 0 of three: the calls that it has sent to all, and what it has reported."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[int]]] = []
        self.reported: list[PeerEvent] = []
        self.receive: Callable[[Message], None]
        peers: Any = SimpleNamespace(
            rank=0,
            arrived=threading.Condition(threading.RLock()),
            report=self._report,
            table=tuple(RankInfo(rank=rank, host="h", pid=10 + rank) for rank in range(3)),
            channel=SimpleNamespace(
                listen=lambda topic, listener: setattr(self, "receive", listener),
                send=lambda topic, message, ranks: self.sent.append((message["call"], list(ranks))),
            ),
        )
        self.barriers = NamedBarriers(peers, lambda: timedelta(seconds=1))

    def _report(self, event: PeerEvent) -> PeerEvent:
        self.reported.append(event)
        return event

    @property
    def has_opened(self) -> bool:
        return ("open", [0, 1, 2]) in self.sent

    def begin(self, rank: int, name: str, steps: int = 0) -> None:
        """Have a rank begin its first call."""
        if rank == 0:
            self.barriers.begin(name)
        else:
            values = asdict(Call(rank, 1, steps, name, name))
            self.receive({"from": rank, "number": 1, "call": "record", "arguments": [values]})


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_pass_or_the_odd_one_is_named(order: tuple[int, ...]) -> None:
    """Also if it is neither the first nor the last to come; it is named first once all have come."""
    zero = RankZero()
    for rank in order:
        zero.begin(rank, "data")
    assert zero.has_opened
    assert zero.reported == []
    for odd in range(3):
        zero = RankZero()
        for rank in order:
            zero.begin(rank, "model" if rank == odd else "data")
        assert not zero.has_opened
        assert zero.reported
        assert all(f"rank {odd} (host h, pid {10 + odd}) began model" in event.reason for event in zero.reported)


def test_a_rank_that_has_gone_past_the_earliest_is_told() -> None:
    """What counts is the call that was begun after the fewest steps, whichever came first."""
    zero = RankZero()
    zero.begin(2, "save", steps=3)
    zero.begin(1, "save", steps=1)
    zero.barriers.advance()
    with pytest.raises(RankAbsentError, match=r"rank 1 began save, and rank 0 .* did not: it has gone on without it"):
        zero.barriers.advance()
    assert len(zero.reported) == 1
