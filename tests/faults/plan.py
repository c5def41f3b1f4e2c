"""What happens to whom, and when: faults drawn from a seed, so that each can be done again."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Literal

Kind = Literal["kill", "stop", "slow", "vanish", "exit", "raise", "cut", "term", "interrupt"]
Stage = Literal["start", "step", "validation", "save", "restore", "end"]
Launch = Literal["by hand", "on two hosts", "script"]

KINDS: tuple[Kind, ...] = ("kill", "stop", "slow", "vanish", "exit", "raise", "cut", "term", "interrupt")
# Of a file, those that are looked at: so many that something is missing.
WRITES = 10
# Before the ranks have met, and when no rank needs another one any more.
UNMET = ("begin", "handshake")
LATE = ("on_fit_end", "teardown", "after_fit", "exit")
LAST_TO_BE_MET = (("on_train_epoch_end", 1), ("on_train_end", 0))
BEFORE_THE_FIRST_STEP = ("setup", "configure_optimizers", "on_fit_start", "reading", "on_load_checkpoint")
_IN_A_STEP = (
    *("on_train_batch_start", "forward", "on_before_backward", "backward"),
    *("on_after_backward", "on_before_optimizer_step", "optimizer_step", "on_train_batch_end"),
)
_IN_A_VALIDATION = (
    *("on_validation_start", "on_validation_batch_start", "validation_step"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
)
# By stage: hooks that a rank comes through there, and how many times it does so at least.
HOOKS: dict[Stage, dict[str, int]] = {
    "start": dict.fromkeys((*UNMET, "setup", "configure_optimizers", "on_fit_start", "on_train_start"), 1),
    "step": dict.fromkeys(_IN_A_STEP, 8),
    "validation": dict.fromkeys(_IN_A_VALIDATION, 2),
    "save": {"on_save_checkpoint": 4, "writing": 4 * WRITES, "removing": 3},
    "restore": {"setup": 1, "reading": 1, "on_load_checkpoint": 1, "on_train_start": 1, "on_train_batch_start": 2},
    "end": {"on_train_epoch_end": 2, "on_train_end": 1, **dict.fromkeys(LATE, 1)},
}
# What rank 0 does for all: there it strikes whichever rank is to be struck, which only signals and cuts do to others.
ON_RANK_ZERO = ("writing", "removing", "reading")
FROM_OUTSIDE: tuple[Kind, ...] = ("kill", "stop", "cut", "term", "interrupt")
# What asks a rank, and so all of them, to stop.
SIGNALS: dict[Kind, int] = {"term": signal.SIGTERM, "interrupt": signal.SIGINT}
_BY_EXCEPTION: tuple[Kind, ...] = ("exit", "raise", "interrupt")


@dataclass(frozen=True)
class Injection:
    """One run, and what happens to one of its ranks when it comes to a hook for the ``number``-th time, from 0 on."""

    seed: int
    kind: Kind
    stage: Stage
    hook: str
    number: int
    world_size: int
    culprit: int
    launch: Launch
    method: Literal["file", "tcp"]

    def __str__(self) -> str:
        when = f"{self.stage} ({self.hook} {self.number})"
        how = f"{self.launch}, {self.method}"
        return f"seed {self.seed}: {self.kind} in {when}, rank {self.culprit} of {self.world_size}, {how}"

    @property
    def striker(self) -> int:
        """The rank that does it, to itself or to another one."""
        return 0 if self.hook in ON_RANK_ZERO else self.culprit

    @property
    def is_late(self) -> bool:
        """Whether the others may be done before they hear of it, or it before it hears of the others."""
        return self.hook in LATE or (self.kind == "cut" and (self.hook, self.number) in LAST_TO_BE_MET)

    @property
    def is_unmet(self) -> bool:
        """Whether it happens before the ranks have met."""
        return self.hook in UNMET

    @property
    def stops_together(self) -> bool:
        """Whether it is a signal that asks all ranks to stop, in time."""
        return self.kind in SIGNALS and not self.is_unmet and not self.is_late

    @property
    def saves_when_it_stops(self) -> bool:
        """Whether there is anything to save by then."""
        return self.hook not in BEFORE_THE_FIRST_STEP


def draw(seed: int) -> Injection:
    """The injection of a seed; successive seeds go through all kinds in all stages."""
    chance = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    stage = list(HOOKS)[(seed % len(KINDS) + seed // len(KINDS)) % len(HOOKS)]
    # Exceptions of exit handlers end no process; where a checkpoint could be lost is looked at more often.
    hooks = [hook for hook in HOOKS[stage] if hook != "exit" or kind not in _BY_EXCEPTION]
    hook = chance.choices(hooks, [4 if hook == "writing" else 1 for hook in hooks])[0]
    world_size = chance.choice((2, 3))
    by_itself = hook in ON_RANK_ZERO and kind not in FROM_OUTSIDE
    return Injection(
        seed,
        kind,
        stage,
        hook,
        number=chance.randrange(HOOKS[stage][hook]),
        world_size=world_size,
        culprit=0 if by_itself else chance.randrange(world_size),
        launch=_draw_launch(chance, kind),
        method=chance.choice(("file", "tcp")),
    )


def _draw_launch(chance: random.Random, kind: Kind) -> Launch:
    if kind == "cut":
        return "on two hosts"
    launch: Launch = chance.choices(("by hand", "on two hosts", "script"), (16, 2, 1))[0]
    # A rank that is stopped stops the script that started it, too.
    return "by hand" if kind == "stop" and launch == "script" else launch
