"""Restore the random state with which a resuming run continues.

``on_train_start`` restores the state that the saving run recorded. It may have to be
restored a second time, because other code draws numbers afterwards:

=======================  ===================  ========================================
Recorded                 Restored again       Because
=======================  ===================  ========================================
between two epochs       never                the start hooks of the epoch and its
                                              iterators draw from it
at an epoch's start,     before its           the start hooks draw numbers, although
after the start hooks    iterators start      they did so before the state was recorded
after a batch            after its iterators  Lightning sets the epoch of samplers
                         start                again, which may draw numbers
in a validation, or      never                no iterator starts before the validation
after the last batch                          or the end of the epoch
=======================  ===================  ========================================

Without a length, Lightning reads the first batch of an epoch before ``on_train_start``.
If the epoch begins, the state is then restored before that batch, and not in
``on_train_start``.

Each time Lightning creates an iterator, its loader draws a seed for the workers. From a
state between two epochs, an uninterrupted run draws these seeds, some of which a
resuming run draws before it restores the state, or not at all. They are drawn here, so
that later numbers are the same:

==========================  ==========================  ==============================
An uninterrupted run draws  A resuming run              The missing draw
==========================  ==========================  ==============================
when it makes the loaders   does so before the state    ``repeat_global_draw``; the
again                       is restored                 generators of new loaders are
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
from .saved_epoch import RecordedAt, SavedEpoch


class ResumedRandomState:
    """This rank's random state in a checkpoint, and when to restore it.

    Args:
        strategy: our strategy.
        saved: the content of the checkpoint.
    """

    def __init__(self, strategy: RankDevicesStrategy, saved: SavedEpoch) -> None:
        self._strategy = strategy
        self._epoch = saved.restart.epoch
        self._state = saved.own.random
        self._recorded_at = saved.random_state_recorded_at
        self._is_restored = False
        self._iterator_before: Any = None  # the combined iterator when it was restored

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    def forget(self) -> None:
        """Restore nothing, because the epoch is repeated."""
        self._state = None

    def before_iterators(self) -> None:
        """Restore a state with which an epoch begins, before its iterators start."""
        if self._recorded_at is RecordedAt.EPOCH_START:
            self._restore()
        elif self._recorded_at is RecordedAt.BETWEEN_EPOCHS:
            if not self._is_restored:
                self._restore()
            self._draw_seeds_of_epoch_start()

    def after_iterators(self) -> None:
        """Restore a state after a batch, after the iterators started."""
        if self._recorded_at is RecordedAt.AFTER_BATCH:
            self._restore()

    def on_train_start(self) -> None:
        """Restore the state, unless the epoch began and its first batch has been read."""
        begins_epoch = self._recorded_at in (RecordedAt.BETWEEN_EPOCHS, RecordedAt.EPOCH_START)
        has_read_batch = begins_epoch and self._is_restored
        if not has_read_batch:
            self._restore()

    def _restore(self) -> None:
        self._is_restored = True
        if self._state is None:
            return
        self._iterator_before = combined_iterator_of(self._trainer.fit_loop)
        has_new_loaders = (
            self._recorded_at is RecordedAt.BETWEEN_EPOCHS and self._makes_loaders_again
        )
        # New loaders have new generators, which the state does not describe.
        positions = [] if has_new_loaders else positions_of(self._trainer)
        restore_random_state(self._state, training_generators(self._strategy, positions))
        if has_new_loaders and self._epoch > 0:
            for loader in training_loaders_of(self._trainer):
                loader.worker_seed.repeat_global_draw()

    @property
    def _makes_loaders_again(self) -> bool:
        """Whether Lightning makes the loaders again at the start of this epoch."""
        interval: int = self._trainer.reload_dataloaders_every_n_epochs
        return interval > 0 and self._epoch % interval == 0

    def _draw_seeds_of_epoch_start(self) -> None:
        """Draw what new iterators would, if Lightning has created none since the restore."""
        is_same_iterator = combined_iterator_of(self._trainer.fit_loop) is self._iterator_before
        if is_same_iterator and self._epoch > 0:
            for loader in training_loaders_of(self._trainer):
                loader.draw_seed()
