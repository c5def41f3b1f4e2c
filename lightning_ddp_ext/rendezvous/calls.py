"""Calls that every rank must make, and the rank that has gone past one without making it.

A rank says over its lifeline that it begins such a call, and how many steps it has begun until then: training steps,
and barriers. In a correct program ranks make the same calls between the same steps. So a rank that is further on, and
has made fewer calls, will never make this one; waiting for it would never end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """The beginning of a call on one rank."""

    rank: int
    number: int
    """It is this rank's so manieth call."""
    steps: int
    """Steps that this rank has begun before."""
    what: str


class Calls:
    """What this rank has done so far, and the last call of each other rank.

    >>> calls = Calls()
    >>> calls.hear(Call(0, number=1, steps=3, what="saving"))
    >>> calls.steps = 3
    >>> calls.missed() is None  # it may be about to come
    True
    >>> calls.steps = 4
    >>> calls.missed().what
    'saving'
    """

    def __init__(self) -> None:
        self.steps = 0
        self.made = 0
        self._others: dict[int, Call] = {}

    def begin(self, rank: int, what: str) -> Call:
        """This rank makes a call."""
        self.made += 1
        return Call(rank, self.made, self.steps, what)

    def hear(self, call: Call) -> None:
        """Another rank makes a call."""
        self._others[call.rank] = call

    def missed(self) -> Call | None:
        """A call that another rank waits in, and that this rank has gone past."""
        for call in list(self._others.values()) if self._others else ():
            if self.made < call.number and self.steps > call.steps:
                return call
        return None
