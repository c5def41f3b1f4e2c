"""Count the calls that every rank must make, and find a rank that makes another one, or none.

Each call has an ordinal, and carries the number of steps that its rank has begun before. In a correct program all ranks
make the same calls in the same order, between the same steps. So a rank whose call of the same ordinal has another name
will never make this one, and neither will a rank that has begun more steps and has made fewer calls.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """The beginning of a call on one rank.

    Attributes:
        rank: that makes it.
        number: its ordinal on that rank, from 1 on.
        steps: that the rank has begun before.
        name: what must be the same on all ranks.
        what: the call as a message shows it.
        where: file and line in the user's code, if known.
    """

    rank: int
    number: int
    steps: int
    name: str
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class CallCounter:
    """The calls of this rank, and those that it has heard of. Each operation takes the same time for any world size.

    >>> counter = CallCounter(rank=1)
    >>> counter.hear(Call(0, number=1, steps=3, name="save", what="saving"))
    >>> counter.steps = 3
    >>> counter.missed() is None  # this rank may be about to make the call
    True
    >>> counter.steps = 4
    >>> counter.missed().what
    'saving'
    """

    def __init__(self, rank: int) -> None:
        self.steps = 0
        self.made = 0
        self._rank = rank
        self._last: dict[int, int] = {}
        self._begun: dict[int, list[Call]] = {}
        self._earliest: dict[int, Call] = {}

    def begin(self, name: str, what: str, where: str) -> Call:
        """Count a call of this rank."""
        self.made += 1
        return Call(self._rank, self.made, self.steps, name, what, where)

    def hear(self, call: Call) -> None:
        """Note a call of some rank."""
        self._last[call.rank] = call.number
        self._begun.setdefault(call.number, []).append(call)
        earliest = self._earliest.setdefault(call.number, call)
        if call.steps < earliest.steps:
            self._earliest[call.number] = call

    def forget(self, number: int) -> None:
        """Drop a call that all ranks have begun."""
        self._begun.pop(number, None)
        self._earliest.pop(number, None)

    def missed(self) -> Call | None:
        """A call that another rank waits in, and that this rank has gone past."""
        call = self._earliest.get(self.made + 1)
        return call if call is not None and self.steps > call.steps else None

    def is_complete(self, call: Call, world_size: int) -> bool:
        """Whether all ranks have begun this call, under one name each."""
        calls = self._begun.get(call.number, [])
        return len(calls) == world_size and all(each.name == call.name for each in calls)

    def contradicts(self, call: Call) -> bool:
        """Whether another rank has begun a call of the same ordinal under another name."""
        return self._begun[call.number][0].name != call.name

    def contradiction(self, call: Call) -> list[Call]:
        """All calls of the same ordinal, the rarest name first."""
        calls = self._begun[call.number]
        names = [each.name for each in calls]
        return sorted(calls, key=lambda each: (names.count(each.name), each.name, each.rank))

    def absent(self, world_size: int, number: int) -> list[int]:
        """The ranks that have not begun call ``number``."""
        return [rank for rank in range(world_size) if self._last.get(rank, 0) < number]
