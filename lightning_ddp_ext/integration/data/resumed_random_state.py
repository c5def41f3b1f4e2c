"""Restore the random state with which a resumed epoch continues.

``on_train_start`` restores the state that was saved. It may have to be restored a
second time, because other code draws numbers afterwards:

=================  ====================  =============================================
Saved at           Restored again        Because
=================  ====================  =============================================
an epoch's start   before its iterators  the hooks of the start draw numbers, and then
                   start                 the iterators draw the orders of samples
between two        after its iterators   the resumed run drew their numbers before the
batches            started               state was recorded
a validation       never                 iterators that continue leave it unchanged
=================  ====================  =============================================

Without a length, Lightning reads the first batch of an epoch before ``on_train_start``.
The state is then restored before that batch, and not in ``on_train_start``.

Each time Lightning creates an iterator, its loader draws a seed for the workers. An
uninterrupted run creates iterators at these times, and a resumed run draws the missing
seeds here, so that later numbers are the same:

==========================  ==========================  ==============================
An uninterrupted run        A resumed run               The missing draw
==========================  ==========================  ==============================
when it makes the loaders   does, before the state is   ``repeat_global_draw``; the
again                       restored                    generators of new loaders are
                                                        new, and have drawn
at an epoch's start, but    does not                    ``draw_seed``
not at the first one's
==========================  ==========================  ==============================
"""

from __future__ import annotations

from typing import Any

from lightning_ddp_ext.data.random_state import restore_random_state

from ..private.compat import combined_iterator_of
from ..start.devices import RankDevicesStrategy
from .positions import positions_of, training_generators, training_loaders_of
from .saved_epoch import SavedEpoch


class ResumedRandomState:
    """This rank's random state in a checkpoint, and when to restore it."""

    def __init__(self, strategy: RankDevicesStrategy, saved: SavedEpoch) -> None:
        self._strategy = strategy
        self._restart = saved.restart
        self._saved = saved.random_state_of(strategy.global_rank)
        # Whether it is from before the iterators of its epoch drew their workers' seeds.
        self._precedes_seeds = saved.restart.at == "epoch_start" and saved.precedes_seeds(
            strategy.global_rank
        )
        self._is_restored = False
        self._iterator_before: Any = None  # the combined iterator when it was restored

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    def forget(self) -> None:
        """Restore nothing, because the epoch is repeated."""
        self._saved = None

    def before_iterators(self) -> None:
        """Restore the state of the epoch's start, before its iterators start."""
        is_due = not (self._precedes_seeds and self._is_restored)
        if self._restart.at == "epoch_start" and is_due:
            self._restore()
        iterator = combined_iterator_of(self._trainer.fit_loop)
        if self._lacks_draws and iterator is self._iterator_before:
            for loader in training_loaders_of(self._trainer):
                loader.draw_seed()

    def after_iterators(self) -> None:
        """Restore the state between two batches, after the iterators started."""
        if self._restart.at == "batch_end":
            self._restore()

    def on_train_start(self) -> None:
        """Restore the state, unless the first batch of the epoch has been read."""
        has_read_batch = self._restart.at == "epoch_start" and self._is_restored
        if not has_read_batch:
            self._restore()

    def _restore(self) -> None:
        self._is_restored = True
        if self._saved is None:
            return
        self._iterator_before = combined_iterator_of(self._trainer.fit_loop)
        has_new_loaders = self._precedes_seeds and self._are_loaders_made_again
        # The generators of new loaders are new, too.
        positions = [] if has_new_loaders else positions_of(self._trainer)
        restore_random_state(self._saved, training_generators(self._strategy, positions))
        if has_new_loaders and self._lacks_draws:
            for loader in training_loaders_of(self._trainer):
                loader.repeat_global_draw()

    @property
    def _are_loaders_made_again(self) -> bool:
        """Whether Lightning makes the loaders again at the start of this epoch."""
        interval: int = self._trainer.reload_dataloaders_every_n_epochs
        return interval > 0 and self._restart.epoch % interval == 0

    @property
    def _lacks_draws(self) -> bool:
        """Whether an uninterrupted run creates iterators after it recorded this state.

        At the start of the first epoch, it has created them before.
        """
        return self._precedes_seeds and self._restart.epoch > 0
