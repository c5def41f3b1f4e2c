"""Read from a checkpoint where training continues, and a rank's state there.

The strategy adds one section to a checkpoint, which is otherwise unchanged, so stock
``ddp`` can also resume from it. The section has where training continues, and the
fields of a :class:`RankState` for each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from lightning_ddp_ext.data.loader_kinds import OrderPosition

from ..private.lightning_tree import rank_zero_warn
from .loop_state import Restart, Stopped, change_to, find_restart

KEY = "lightning_ddp_ext"
VERSION = 10


class RecordedAt(Enum):
    """The moment at which the random states in a checkpoint were recorded."""

    BETWEEN_EPOCHS = auto()  # the next epoch's iterators have not drawn workers' seeds
    EPOCH_START = auto()  # they have
    AFTER_BATCH = auto()
    IN_VALIDATION = auto()  # or after the last batch


@dataclass(frozen=True)
class RankState:
    """The data-related state of one rank in a checkpoint.

    The defaults are those of a checkpoint without it, or of an epoch that is repeated.

    Args:
        random: the random states; ``None`` if they cannot be restored.
        loaders: ``LoaderPosition.state_dict`` of each training loader; empty between
            two epochs.
        has_drawn_seeds: whether the random states of an epoch's start are from after
            its iterators drew the seeds of workers.
        has_seeded_validation: whether workers for validation persist and were seeded.
    """

    random: list[Any] | None = None
    loaders: Sequence[Mapping[str, Any]] = ()
    has_drawn_seeds: bool = True
    has_seeded_validation: bool = False


@dataclass(frozen=True)
class SavedEpoch:
    """The epoch with which a checkpoint continues, for one rank.

    Args:
        restart: where training continues.
        loops: the fit loop's state as it was saved.
        seed: the seed for the order of samples; ``None`` if the checkpoint has none.
        stopped: where all ranks stopped and saved the checkpoint, if they did.
        own: the state of the rank.
    """

    restart: Restart
    loops: Mapping[str, Any]
    seed: int | None = None
    stopped: Stopped | None = None
    own: RankState = RankState()

    def loops_at(self, restart: Restart) -> dict[str, Any]:
        """Return a state of the fit loop from which Lightning continues correctly."""
        return change_to(self.loops, restart, stopped=self.stopped)

    @property
    def random_state_recorded_at(self) -> RecordedAt:
        """The moment at which the rank's random states were recorded."""
        if self.restart.at == "batch_end":
            return RecordedAt.AFTER_BATCH
        if self.restart.at != "epoch_start":
            return RecordedAt.IN_VALIDATION
        return RecordedAt.EPOCH_START if self.own.has_drawn_seeds else RecordedAt.BETWEEN_EPOCHS


def make_section(
    restart: Restart, *, seed: int | None, stopped: Stopped | None, ranks: Any
) -> dict[str, Any]:
    """Return the section of a checkpoint that :func:`read_saved` reads.

    ``ranks`` has the fields of each rank's :class:`RankState`. For the other arguments,
    see :class:`SavedEpoch`.
    """
    return {
        "version": VERSION,
        "seed": seed,
        "restart": vars(restart),
        "stopped": stopped,
        "ranks": ranks,
    }


def read_saved(
    checkpoint: Mapping[str, Any], *, rank: int, accumulated: int, repeats_epoch: bool
) -> SavedEpoch:
    """Read the epoch with which a checkpoint continues on a rank.

    Without a section that this release can read, the epoch starts again, with a
    warning.

    Args:
        checkpoint: a checkpoint with the state of loops.
        rank: the rank. If the saving run did not have it, it gets what all ranks share.
        accumulated: the number of batches per optimiser step.
        repeats_epoch: whether an epoch always starts again.
    """
    loops = checkpoint["loops"]["fit_loop"]
    section = checkpoint.get(KEY) or {}
    if section.get("version") != VERSION:
        restart = find_restart(loops, accumulated=accumulated)
        if restart.is_within:
            _warn_of_repeated_epoch(restart.epoch, section)
            restart = restart.from_epoch_start()
        if restart.has_started:
            loops = _without_loader_states(loops)
        return SavedEpoch(restart, loops)
    restart = Restart(**section["restart"])
    ranks = section["ranks"]
    own = RankState(**(ranks[rank] if rank < len(ranks) else shared_state(ranks[0])))
    if restart.is_within and repeats_epoch:
        restart = restart.from_epoch_start()
        own = RankState()
    return SavedEpoch(
        restart, _without_loader_states(loops), section["seed"], section["stopped"], own
    )


def _warn_of_repeated_epoch(epoch: int, section: Mapping[str, Any]) -> None:
    if section:
        rank_zero_warn(
            f"the checkpoint's data position in epoch {epoch} has version"
            f" {section.get('version')}, but this release reads version {VERSION}, so that epoch"
            " starts again"
        )
    else:
        rank_zero_warn(
            f"the checkpoint has no data position in epoch {epoch}, so that epoch starts again"
        )


def _without_loader_states(loops: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fit loop's state without the loaders' states.

    These are rank 0's, but each rank has its own or none.
    """
    states = dict(loops["state_dict"])
    states.pop("combined_loader", None)
    return {**loops, "state_dict": states}


def without_random_state(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's saved state without random states and loaders' own states.

    Only an uninterrupted save of all ranks can restore these.
    """
    loaders = [{**loader, "random": None, "own": None} for loader in own["loaders"]]
    return {**own, "random": None, "loaders": loaders, "has_drawn_seeds": False}


def shared_state(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a rank's saved state that is the same on all ranks."""
    shared = without_random_state(own)
    for loader in shared["loaders"]:
        if loader["data"]["loader"] != OrderPosition.kind:
            loader["drawn"] = None
    return shared
