"""Run work on all ranks of a strategy, as long as they cooperate.

After a rank has failed or left, :class:`Cooperation` decides which calls still wait for
the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from lightning_ddp_ext.errors import DDPExtError
from lightning_ddp_ext.ranks import Ranks
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.rendezvous.runs import Run, current_run
from lightning_ddp_ext.supervision.failure import explain, may_be_echo

from .private.compat import trainer_of
from .private.lightning_tree import TrainerStatus, pl
from .strategy_ranks import enter_work, ranks_of


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


class CooperatingRanks:
    """The ranks of a strategy, which work together as far as they still cooperate.

    Args:
        strategy: our strategy or a stock one.
        tracks_runs: whether :meth:`start_run` is called at the start of each run. Without
            it, as with a stock strategy, each interrupted run counts as failed.
    """

    def __init__(self, strategy: pl.strategies.Strategy, *, tracks_runs: bool = False) -> None:
        self._strategy = strategy
        # The Trainer's current run, or its last one.
        self._run = Run(is_outermost=False) if tracks_runs else None

    def start_run(self) -> None:
        """Judge by the current run from now on whether an exception ended it."""
        self._run = current_run() or Run(is_outermost=False)  # a user may have started none

    # How far they cooperate. `state` is read anew at each use; the properties after it name
    # ranges of it.

    @property
    def state(self) -> Cooperation:
        """How far this rank cooperates now."""
        if self._has_run_failed:
            # While the exception propagates, a `finally` or `except` block calls this.
            return Cooperation.ONLY_VALUES if sys.exc_info()[1] is None else Cooperation.NONE
        context = current()
        has_left = context is not None and context.peers.cause_or_departure is not None
        return Cooperation.NO_SAVES if has_left and current_run() is None else Cooperation.FULL

    @property
    def _has_run_failed(self) -> bool:
        """Whether an exception ended the run.

        If every rank raised an exception, this is true until the Trainer has handled it: the
        strategy's teardown then resets ``Run.has_failed``. After a stop by a signal this is
        false, because all ranks still make the same calls.
        """
        trainer = trainer_of(self._strategy.lightning_module)
        if trainer is None or trainer.state.status != TrainerStatus.INTERRUPTED:
            return False
        context = current()
        if self._run is None or context is None:
            return True
        return self._run.has_failed or context.peers.cause is not None

    @property
    def can_save_together(self) -> bool:
        """Whether a save waits for the other ranks."""
        return self.state is Cooperation.FULL

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception ended the Trainer's run, so ranks may make different calls."""
        return self.state <= Cooperation.ONLY_VALUES

    @property
    def is_handling_exception(self) -> bool:
        """Whether an exception ended the run and has not been caught yet."""
        return self.state is Cooperation.NONE

    # Working together.

    def on_rank_zero(self, work: Callable[[], Any], what: str) -> Any:
        """Run ``work`` on rank 0, and return its result on every rank.

        If it raises, raise its error on every rank. Collective, unless the Trainer is
        interrupted: rank 0 then works alone, and the other ranks return ``None``.
        """
        if self.is_interrupted or ranks_of(self._strategy).world_size == 1:
            return work() if self._strategy.is_global_zero else None
        with self.jointly(what) as ranks:
            return ranks.on_rank_zero(work, what)

    def to_rank_zero(self, value: Any, what: str) -> list[Any] | None:
        """Return the values of all ranks on rank 0, and ``None`` on the others.

        The values are in rank order. Collective.
        """
        with self.jointly(what) as ranks:
            return ranks.to_rank_zero(value)

    @contextmanager
    def jointly(self, what: str) -> Iterator[Ranks]:
        """Run a block on every rank, after a barrier, and yield the ranks.

        An error names a rank that does not reach the block or that fails in it.

        Args:
            what: a description of the block, whose first word is the same on every rank.
        """
        ranks = ranks_of(self._strategy)
        try:
            if ranks.world_size > 1:
                enter_work(what)
            yield ranks
        except (DDPExtError, OSError):  # they name the rank or the file
            raise
        except Exception as error:
            if not may_be_echo(error):
                raise
            # Outside the Trainer's functions, nothing else names the rank that failed.
            explanation: BaseException = explain(error)
            raise explanation from explanation.__cause__
