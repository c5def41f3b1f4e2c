"""Describe what a rank is doing, and that a rank did not reply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight import Flight


@dataclass(frozen=True)
class Report:
    """A rank's report about itself."""

    who: RankInfo
    idle: float = 0.0
    """Seconds since its last progress."""
    is_still: bool = False
    """Whether ``idle`` exceeds the timeout, or the rank has left the watched code."""
    doing: str = ""
    """The activity of its main thread, such as ``train_dataloader_next``."""
    place: str = ""
    """File and line in the user's code."""
    is_waiting: bool = False
    """Whether its main thread is waiting for other ranks, in a collective or elsewhere.
    """
    is_outside: bool = False
    """Whether it has left the watched code, so it may no longer need the other ranks.
    """
    progress: str = ""
    """Its progress: epoch, step, batch."""
    flights: list[Flight] = field(default_factory=list)
    """Its collectives, as far as torch records them."""
    stacks: str = ""
    is_blocked: bool = False
    """Whether its main thread cannot continue before other ranks make the calls that it
    waits in.
    """
    cpu_seconds: float = 0.0
    """The processor time of its main thread."""
    calls: int = 0
    """The number of calls of named barriers that it has started."""
    awaited: Call | None = None
    """The call of a named barrier that it waits in."""
    run: int = 0
    """The ordinal of its Trainer's run, or of the last one."""
    is_in_run: bool = True
    """Whether that run is under way."""
    has_timed_out: bool = False
    """Whether it has waited in a collective for the timeout."""

    @property
    def where(self) -> str:
        """Its activity, with file and line."""
        return f"{self.doing}, {self.place}" if self.place else self.doing

    @property
    def waits(self) -> bool:
        """Whether another rank may be the reason why it is making no progress."""
        return self.is_waiting or bool(self.pending)

    @property
    def pending(self) -> list[tuple[Flight, int]]:
        """Each group's first unfinished collective, by its number."""
        return [(flight, flight.pending) for flight in self.flights if flight.pending is not None]

    def flight(self, group: str) -> Flight | None:
        """Return its progress in a group, if torch recorded it."""
        return next((flight for flight in self.flights if flight.group == group), None)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Report:
        """Restore a report from the result of ``dataclasses.asdict``."""
        flights = [Flight.of(flight) for flight in values["flights"]]
        awaited = values["awaited"] and Call(**values["awaited"])
        return cls(
            **{**values, "who": RankInfo(**values["who"]), "flights": flights, "awaited": awaited}
        )


@dataclass(frozen=True)
class Silence:
    """A rank that did not reply."""

    who: RankInfo
    seconds: float
    is_stopped: bool = False

    def __str__(self) -> str:
        stopped = ", and its process is stopped (SIGSTOP)" if self.is_stopped else ""
        return f"{self.who} has not answered for {self.seconds:.0f} s{stopped}"
