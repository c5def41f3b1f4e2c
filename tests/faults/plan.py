"""What happens to which rank, and when: faults drawn from a seed, so that each can be done again."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass

KINDS = ("kill", "stop", "slow", "vanish", "exit", "raise", "cut", "term", "interrupt")
# What one rank can do to another one; the other kinds a rank does to itself.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM, "interrupt": signal.SIGINT}
_IN_A_STEP = (
    *("on_train_batch_start", "on_before_backward", "backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
)
_IN_A_VALIDATION = (
    *("on_validation_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end"),
)
# When no rank needs another one any more.
_LATE = ("on_fit_end", "teardown", "after_fit")
# By stage: moments that a rank comes through there, and how many times it does so at least.
MOMENTS: dict[str, dict[str, int]] = {
    "start": dict.fromkeys(("begin", "setup", "on_fit_start", "on_train_start"), 1),
    "step": dict.fromkeys(_IN_A_STEP, 8),
    "validation": dict.fromkeys(_IN_A_VALIDATION, 3),
    "save": {"on_save_checkpoint": 4, "writing": 40, "removing": 3},
    "restore": {"setup": 1, "reading": 1, "on_load_checkpoint": 1, "on_train_start": 1, "on_train_batch_start": 2},
    "end": {"on_train_epoch_end": 3, "on_train_end": 1, **dict.fromkeys(_LATE, 1)},
}
# What rank 0 does for all: there it strikes whichever rank is to be struck, which only signals and cuts do to others.
ON_RANK_ZERO = ("writing", "removing", "reading")


@dataclass(frozen=True)
class Injection:
    """One run, and what happens to one of its ranks when it comes to a moment for the ``number``-th time, from 0 on."""

    seed: int
    kind: str
    stage: str
    moment: str
    number: int
    world_size: int
    culprit: int
    on_two_hosts: bool
    method: str

    def __str__(self) -> str:
        when = f"{self.stage} ({self.moment} {self.number})"
        how = f"{'two hosts' if self.on_two_hosts else 'one host'}, {self.method}"
        return f"seed {self.seed}: {self.kind} in {when}, rank {self.culprit} of {self.world_size}, {how}"

    @property
    def striker(self) -> int:
        """The rank that does it, to itself or to another one."""
        return 0 if self.moment in ON_RANK_ZERO else self.culprit

    @property
    def is_late(self) -> bool:
        """Whether the others may be done before they hear of it, or it before it hears of the others."""
        is_last_meeting = (self.moment, self.number) in (("on_train_epoch_end", 2), ("on_train_end", 0))
        return self.moment in _LATE or (self.kind == "cut" and is_last_meeting)

    @property
    def is_unmet(self) -> bool:
        """Whether it happens before the ranks have met."""
        return self.moment == "begin"

    @property
    def stops_together(self) -> bool:
        """Whether it is a signal that asks all ranks to stop, in time."""
        return self.kind in ("term", "interrupt") and not self.is_unmet and not self.is_late

    @property
    def saves_when_it_stops(self) -> bool:
        """Whether there is anything to save by then."""
        return self.moment not in ("setup", "on_fit_start", "reading", "on_load_checkpoint")


def draw(seed: int) -> Injection:
    """The injection of a seed; successive seeds go through all kinds in all stages."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    stage = list(MOMENTS)[(seed % len(KINDS) + seed // len(KINDS)) % len(MOMENTS)]
    # Where a checkpoint could be lost is looked at more often.
    moment = chance.choices(list(MOMENTS[stage]), [4 if moment == "writing" else 1 for moment in MOMENTS[stage]])[0]
    world_size = chance.choice((2, 3))
    by_itself = moment in ON_RANK_ZERO and kind not in (*SIGNALS, "cut")
    return Injection(
        seed,
        kind,
        stage,
        moment,
        number=chance.randrange(MOMENTS[stage][moment]),
        world_size=world_size,
        culprit=0 if by_itself else chance.randrange(world_size),
        on_two_hosts=kind == "cut" or chance.random() < 0.1,
        method=chance.choice(("file", "tcp")),
    )
