"""Restore the random state with which a resumed epoch continues.

``on_train_start`` restores the state that was saved. Iterators that start afterwards
draw numbers too, so it is restored again at the moment at which it was recorded:

=============  =======================  ===============================================
Saved at       Restored again           Because
=============  =======================  ===============================================
an epoch's     before its iterators     they draw the orders of samples. Without a
start          start                    length, Lightning reads the first batch before
                                        ``on_train_start``; it is then restored before
                                        that batch, and not again after it.
between two    after the iterators      they draw numbers that the resumed run drew
batches        started                  before the state was recorded.
a validation   never                    no iterator over training data starts
=============  =======================  ===============================================
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
        if self._draws_again and iterator is self._iterator_before:
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
        if has_new_loaders and self._draws_again:
            # Lightning would have created iterators when it made the loaders again.
            for loader in training_loaders_of(self._trainer):
                loader.repeat_global_draw()

    @property
    def _are_loaders_made_again(self) -> bool:
        """Whether Lightning makes the loaders again at the start of this epoch."""
        interval: int = self._trainer.reload_dataloaders_every_n_epochs
        return interval > 0 and self._restart.epoch % interval == 0

    @property
    def _draws_again(self) -> bool:
        """Whether iterators of the epoch were created after its random state was saved.

        Lightning creates them before it in the first epoch and in a resumed run.
        """
        return self._precedes_seeds and self._restart.epoch > 0
