"""Calls that every rank must make, and what can be said of a rank that makes another one, or none.

A rank says over its lifeline that it begins such a call, and how many steps it has begun until then: training steps,
evaluations and the like. In a correct program all ranks make the same calls in the same order, between the same steps.
So a rank whose call of the same number has another name will never make this one, and neither will a rank that is
further on and has made fewer calls; waiting for it would never end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """The beginning of a call on one rank."""

    rank: int
    number: int
    """It is this rank's so manieth call."""
    steps: int
    """Steps that this rank has begun before."""
    name: str
    """What must be the same on all ranks."""
    what: str
    """The call as a message shows it."""
    where: str = ""
    """File and line of the user's, where they are known."""

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class Calls:
    """What this rank has done so far, and the last call of each rank that it has heard of.

    >>> calls = Calls(rank=1)
    >>> calls.hear(Call(0, number=1, steps=3, name="save", what="saving"))
    >>> calls.steps = 3
    >>> calls.missed() is None  # it may be about to come
    True
    >>> calls.steps = 4
    >>> calls.missed().what
    'saving'
    """

    def __init__(self, rank: int) -> None:
        self.steps = 0
        self.made = 0
        self._rank = rank
        self._last: dict[int, Call] = {}
        self._incomplete: dict[int, dict[int, Call]] = {}

    def begin(self, name: str, what: str, where: str) -> Call:
        """This rank makes a call."""
        self.made += 1
        call = Call(self._rank, self.made, self.steps, name, what, where)
        self.hear(call)
        return call

    def hear(self, call: Call) -> None:
        """A rank makes a call."""
        self._last[call.rank] = call
        if self._rank == 0:
            self._incomplete.setdefault(call.number, {})[call.rank] = call

    def missed(self) -> Call | None:
        """A call that another rank waits in, and that this rank has gone past."""
        for call in self._last.copy().values():
            # In this order, as the main thread makes calls and takes steps meanwhile.
            if self.steps > call.steps and self.made < call.number:
                return call
        return None

    # Of use on rank 0, which hears of every call.

    def begun_by_all(self, world_size: int) -> int:
        """So many calls every rank has begun, with one name each; what is known of them can be forgotten."""
        if self.contradiction():
            return 0
        number = min(call.number for call in self._last.values()) if len(self._last) == world_size else 0
        for known in [known for known in self._incomplete if known <= number]:
            del self._incomplete[known]
        return number

    def contradiction(self) -> list[Call]:
        """Calls of the same number with different names, the rarest name first; none in a correct program."""
        for by_rank in self._incomplete.values():
            names = [call.name for call in by_rank.values()]
            if len(set(names)) > 1:
                return sorted(by_rank.values(), key=lambda call: (names.count(call.name), call.name, call.rank))
        return []

    def absent(self, ranks: Iterable[int], number: int) -> list[int]:
        """Those of ``ranks`` that have not begun call ``number``."""
        return [rank for rank in ranks if rank not in self._last or self._last[rank].number < number]
