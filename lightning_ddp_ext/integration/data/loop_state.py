"""Change a saved state of Lightning's loops so that Lightning continues correctly.

A checkpoint records the progress of each loop when it was saved: during a batch, after
it, or between two epochs. Lightning does not continue correctly from all of these:
accumulated gradients are lost, a batch that raised an exception may be lost, and a run
that is resumed twice skips an epoch. So before Lightning reads the state, this module
changes it, in the form of a dictionary, to one of four:

- "epoch_start": between two epochs; the next epoch begins, or the last one again.
- "batch_end": as saved in ``on_train_batch_end``; training continues with the next
  batch.
- "validation": as saved before the first batch of a validation, which runs from its
  beginning.
- "epoch_end": unchanged; saved in a validation after an epoch's last batch, so only the
  epoch's end remains.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Stopped = Literal["batch", "validation"]


@dataclass(frozen=True)
class Restart:
    """The point where training continues.

    Args:
        at: see the module's docstring.
        epoch: the epoch that begins, continues or ends.
        done: the number of batches in this epoch that are done; 0 at "epoch_start".
        has_started: whether the epoch's start hooks were already called, at
            "epoch_start" only; they are called again.
        is_last: whether all batches of the epoch are done; always at "epoch_end", and
            possible at "validation".
        steps: how many to add to Lightning's number of optimiser steps. Lightning counts
            the step of a batch after the validation that follows it. When training
            continues at "batch_end", `_TrainingEpochLoop.reset` counts one.
    """

    at: Literal["epoch_start", "batch_end", "validation", "epoch_end"]
    epoch: int
    done: int = 0
    has_started: bool = False
    is_last: bool = False
    steps: int = 0

    @property
    def is_within(self) -> bool:
        """Whether training continues in the middle of the epoch."""
        return self.at in ("batch_end", "validation") and not self.is_last

    def from_epoch_start(self) -> Restart:
        """Return a restart that repeats the epoch, which has started."""
        return Restart("epoch_start", self.epoch, has_started=True)

    def dropped_of(self, processed: int) -> int:
        """Return how many of the epoch's processed batches are trained on again."""
        return processed - self.done if self.at == "batch_end" or self.has_started else 0


def find_restart(
    fit_loop: Mapping[str, Any],
    *,
    accumulated: int,
    stopped: Stopped | None = None,
    has_ended: bool = False,
) -> Restart:
    """Find the point where training continues from ``FitLoop.state_dict()``.

    =============================================  =====================================
    The state was saved                            Training continues
    =============================================  =====================================
    between two epochs                             with the next epoch
    there, but ``max_steps`` had cut the epoch     after its last optimiser step
    in ``on_train_batch_end`` of the last batch    with the next epoch
    in a validation in which all ranks stopped     with that validation
    there, with accumulated gradients              after the last optimiser step
    in another validation, after the last batch    with the end of the epoch
    elsewhere in an epoch                          after the last optimiser step
    =============================================  =====================================

    Args:
        fit_loop: the state.
        accumulated: the number of batches per optimiser step.
        stopped: where all ranks stopped and saved the state, between batches or during
            validation; otherwise ``None``.
        has_ended: whether the last epoch's data was exhausted. Lightning does not flag
            the last batch if it expected another one: with ``dataloader_iter``, and if
            a loader without a length ends before the others.
    """
    epoch = fit_loop["epoch_progress"]["current"]
    batch = fit_loop["epoch_loop.batch_progress"]
    done = batch["current"]["processed"]
    is_between_epochs = epoch["started"] == epoch["processed"]
    all_batches_done = batch["is_last_batch"] and batch["current"]["ready"] == done
    is_in_last_batch_end = all_batches_done and batch["current"]["completed"] < done
    if is_between_epochs:
        if batch["is_last_batch"] or has_ended or not done:
            return Restart("epoch_start", epoch["processed"])
        return _after_last_step(epoch["processed"] - 1, done, accumulated, is_counted=True)
    if is_in_last_batch_end:
        return Restart("epoch_start", epoch["processed"] + 1, steps=1)
    if stopped == "validation" and (all_batches_done or done % accumulated == 0):
        return Restart("validation", epoch["processed"], done, is_last=all_batches_done)
    if all_batches_done:
        return Restart("epoch_end", epoch["processed"], done, is_last=True)
    is_counted = batch["current"]["ready"] > done or stopped == "batch"
    return _after_last_step(epoch["processed"], done, accumulated, is_counted=is_counted)


def _after_last_step(epoch: int, processed: int, accumulated: int, *, is_counted: bool) -> Restart:
    """Return a restart after the last optimiser step.

    Checkpoints do not contain accumulated gradients. ``is_counted``: whether Lightning
    has counted the step of the last batch, if that completed one.
    """
    done = processed - processed % accumulated
    if not done:
        return Restart("epoch_start", epoch, has_started=True)
    return Restart("batch_end", epoch, done, steps=-int(is_counted or done < processed))


def complete_batch(
    fit_loop: dict[str, Any],
    *,
    accumulated: int,
    stepped: int,
    validates: bool,
    has_validated: bool,
) -> Stopped | None:
    """Change the state of interrupted loops in place, as if all ranks had stopped.

    Return the argument ``stopped`` of :func:`find_restart`. It is ``None`` where ranks
    never stop together.

    =========================================  ================  =======================
    the loops were interrupted                 return value      changes
    =========================================  ================  =======================
    before the end of the epoch's first batch  ``None``          none
    within another batch                       ``None``          none
    before or in a due validation              ``"validation"``  batch completed
    after the last batch and its validation    ``None``          batch completed
    after another batch                        ``"batch"``       batch, step completed
    between two epochs                         ``"batch"``       step completed
    =========================================  ================  =======================

    With gradient accumulation, only the last batch of a step completes it.

    Args:
        fit_loop: the state.
        accumulated: the number of batches per optimiser step.
        stepped: the number of optimiser steps before the batch, as loggers count them.
        validates: whether Lightning validates after the batch.
        has_validated: whether it has finished this validation.
    """
    epoch = fit_loop["epoch_progress"]["current"]
    batch = fit_loop["epoch_loop.batch_progress"]
    loop = fit_loop["epoch_loop.state_dict"]
    current = batch["current"]
    done = current["processed"]
    if current["ready"] > done or not done:
        return None
    # Lightning counts the step only after the validation.
    loop["_batches_that_stepped"] = stepped
    if epoch["started"] > epoch["processed"]:
        # An exception in a hook after the batch leaves it incomplete.
        batch["total"]["completed"] += done - current["completed"]
        current["completed"] = done
        if validates and not has_validated:
            return "validation"
        if validates and batch["is_last_batch"]:
            return None  # Lightning would skip this validation and then count the step itself
    if batch["is_last_batch"] or done % accumulated == 0:
        loop["_batches_that_stepped"] += 1
    return "batch"


def change_to(fit_loop: Mapping[str, Any], restart: Restart) -> dict[str, Any]:
    """Return a copy of a fit loop's state that continues at the given restart."""
    changed = copy.deepcopy(dict(fit_loop))
    if restart.at == "epoch_end":
        return changed
    begun = restart.epoch if restart.at == "epoch_start" else restart.epoch + 1
    _set_counters(
        changed["epoch_progress"], begun=begun, processed=restart.epoch, completed=restart.epoch
    )
    if restart.at == "validation":
        # Lightning then runs it from the beginning.
        _set_counters(changed["epoch_loop.val_loop.batch_progress"], begun=1)
        return changed
    changed["epoch_loop.state_dict"]["_batches_that_stepped"] += restart.steps
    batch = changed["epoch_loop.batch_progress"]
    if restart.at == "epoch_start" and not restart.has_started:
        batch["current"]["processed"] = 0  # all batches belong to earlier epochs
    # Lightning completes the last one, as in `on_train_batch_end`.
    completed = max(0, restart.done - 1)
    _set_counters(batch, begun=restart.done, processed=restart.done, completed=completed)
    batch["is_last_batch"] = False
    return changed


def count_done(done: int, *, whole: float, left: float, limit: float, accumulated: int) -> int:
    """Return how many batches of a resumed epoch count as done on these ranks.

    Lightning ends all epochs after the same number of batches, so the batches that are
    not left count as done, up to the last optimiser step. If an epoch is already beyond
    its limit, it has one more step, and then ends as usual.

    Args:
        done: the number of batches that were done on the ranks that saved.
        whole: the number of batches of a whole epoch; ``inf`` if it is not known.
        left: the number of batches that are left.
        limit: the number of batches after which Lightning ends the epoch.
        accumulated: the number of batches per optimiser step.

    After 3 of 10 batches on two ranks, one rank has 14 of 20 left:

    >>> count_done(3, whole=20, left=14, limit=20, accumulated=1)
    6
    >>> count_done(3, whole=20, left=14, limit=20, accumulated=4)
    4
    """
    not_left = done if whole == math.inf else whole - left
    done_here = int(min(not_left, limit - 1))
    return done_here - done_here % accumulated


def _set_counters(
    progress: dict[str, Any], *, begun: int, processed: int = 0, completed: int = 0
) -> None:
    """Set a loop's current counters, and add those of earlier epochs for its totals."""
    earlier = progress["total"]["processed"] - progress["current"]["processed"]
    counts = {"ready": begun, "started": begun, "processed": processed, "completed": completed}
    progress["current"].update(counts)
    progress["total"].update({name: earlier + count for name, count in counts.items()})
