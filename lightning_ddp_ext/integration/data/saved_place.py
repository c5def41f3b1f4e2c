"""Read where training continues from a checkpoint.

The strategy adds one section to a checkpoint, which is otherwise unchanged, so stock
``ddp`` can also resume from it:

===========  =====================================================================
``version``  the version of the section
``seed``     the seed for the order of samples
``orders``   what determines each rank's orders, see :class:`~.orders.Orders`
``restart``  where training continues, a :class:`~.loop_state.Restart`
``stopped``  where all ranks stopped and saved the checkpoint, if they did
``ranks``    of each rank that saved: its ``rank``, its random states
             (``random``), and for each training loader the place (``loaders``)
===========  =====================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .loop_state import Restart, Stopped, change_to, find_restart

KEY = "lightning_ddp_ext"
VERSION = 13


@dataclass(frozen=True)
class SavedPlace:
    """The place at which training continues, according to a checkpoint.

    Attributes:
        restart: the place.
        loops: the state of the fit loop, as it was saved.
        stopped: where all ranks stopped and saved the checkpoint, if they did.
        random: this rank's random states, if known.
        loaders: the places in the training loaders.
        is_lost: whether the epoch starts again because the checkpoint has no places.
    """

    restart: Restart
    loops: Mapping[str, Any]
    stopped: Stopped | None = None
    random: Any = None
    loaders: Sequence[dict[str, Any]] = ()
    is_lost: bool = False

    def loops_at(self, restart: Restart) -> dict[str, Any]:
        """Return a state of the fit loop from which Lightning continues at ``restart``."""
        return change_to(self.loops, restart, stopped=self.stopped)


def section_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the section of a checkpoint, if this release can read it."""
    section = checkpoint.get(KEY) or {}
    return section if section.get("version") == VERSION else None


def read_place(checkpoint: Mapping[str, Any], *, rank: int, accumulated: int) -> SavedPlace:
    """Read the place of a rank from a checkpoint.

    A rank that did not save shares the place of one that did, but not its random states.

    Args:
        checkpoint: the checkpoint.
        rank: this rank.
        accumulated: the number of batches per optimiser step.
    """
    loops = checkpoint["loops"]["fit_loop"]
    # Lightning has saved rank 0's states of loaders, but each rank has its own.
    states = {name: each for name, each in loops["state_dict"].items() if name != "combined_loader"}
    without_loaders = {**loops, "state_dict": states}
    section = section_of(checkpoint)
    if section is None:
        restart = find_restart(loops, accumulated=accumulated)
        if restart.is_within:
            return SavedPlace(restart.from_epoch_start(), without_loaders, is_lost=True)
        return SavedPlace(restart, without_loaders if restart.has_started else loops)
    by_rank = {state["rank"]: state for state in section["ranks"]}
    own = by_rank.get(rank) or {**section["ranks"][0], "random": None}
    return SavedPlace(
        Restart(**section["restart"]),
        without_loaders,
        section["stopped"],
        own["random"],
        own["loaders"],
    )
