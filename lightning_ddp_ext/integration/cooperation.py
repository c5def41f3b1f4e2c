"""Decide which calls of a rank wait for the other ranks, after one of them failed or left."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.rendezvous.runs import Run, current_run

from .private.lightning_tree import TrainerStatus


class Cooperation(IntEnum):
    """How far a rank still cooperates with the others: less with each line.

    ===============  ====================================  ==================================
    State            When                                  Which calls wait for other ranks
    ===============  ====================================  ==================================
    ``FULL``         usually, also after all ranks have    all
                     stopped at a signal
    ``NO_SAVES``     outside of runs, once a rank has      all but saves
                     exited, failed or made another call
    ``ONLY_VALUES``  after an exception ended the run      those that have to return a value,
                                                           such as broadcasts and decisions
    ``NONE``         until that exception is caught        none
    ===============  ====================================  ==================================

    Users' own collectives and ``all_gather`` always wait.
    """

    NONE = 0
    ONLY_VALUES = 1
    NO_SAVES = 2
    FULL = 3


def cooperation_of(trainer: Any, run: Run | None) -> Cooperation:
    """Return how far this rank cooperates now.

    Args:
        trainer: the Trainer of the rank's strategy; ``None`` if it has none.
        run: the Trainer's current run, or its last one; ``None`` with a stock strategy,
            whose runs are not tracked.
    """
    if _is_interrupted(trainer, run):
        return Cooperation.ONLY_VALUES if sys.exc_info()[1] is None else Cooperation.NONE
    context = current()
    has_left = context is not None and context.peers.cause_or_departure is not None
    return Cooperation.NO_SAVES if has_left and current_run() is None else Cooperation.FULL


def _is_interrupted(trainer: Any, run: Run | None) -> bool:
    """Whether an exception ended the run.

    If every rank raised an exception, this is true until it is handled. After a stop
    by a signal this is false, because all ranks still make the same calls.
    """
    if trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED:
        return False
    context = current()
    if run is None or context is None:
        return True
    return run.has_failed or context.peers.cause is not None
