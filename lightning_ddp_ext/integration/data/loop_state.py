"""Change a saved state of Lightning's loops so that Lightning continues correctly.

A checkpoint records the progress of each loop when it was saved: during a batch, after
it, or between two epochs. Lightning does not continue correctly from all of these:
accumulated gradients are lost, a batch that raised an exception may be lost, and a run
that is resumed twice skips an epoch. So before Lightning reads the state, a dictionary,

1. :func:`find_resume_point` finds the point where training can continue, and
2. :func:`change_to` changes the state to that point.

If an exception ended the run, :func:`stop_after_batch` first changes the state to that
after the last finished batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Stopped = Literal["batch", "validation"]


@dataclass(frozen=True)
class ResumePoint:
    """The point where training continues.

    =================  =================================  ======  ===========  =========
    ``at``             Lightning continues                done    has_started  is_last
    =================  =================================  ======  ===========  =========
    ``"epoch_start"``  with the next epoch                0       False        False
    ``"epoch_start"``  with an epoch that starts again    0       True         False
    ``"batch_end"``    with the next batch, as if saved   > 0     False        False
                       in ``on_train_batch_end``
    ``"validation"``   with a validation, from its        > 0     False        either
                       beginning
    ``"epoch_end"``    with the end of the epoch; its     all     False        True
                       state is not changed
    =================  =================================  ======  ===========  =========

    Args:
        at: see the table.
        epoch: the epoch that begins, continues or ends.
        done: the number of batches in this epoch that are not trained on again.
        has_started: whether the epoch's start hooks were already called; they are called
            again.
        is_last: whether all batches of the epoch are done.
        steps: how many to add to Lightning's number of optimiser steps. Lightning counts a
            step after the validation that follows it, so before the next epoch, 1 may be
            missing. When training continues at "batch_end", `_TrainingEpochLoop.reset`
            counts one, so this is -1 if that has been counted. It is 0 elsewhere.
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

    @property
    def is_next_epoch(self) -> bool:
        """Whether training continues with an epoch that has not started."""
        return self.at == "epoch_start" and not self.has_started

    def dropped_of(self, processed: int) -> int:
        """Return how many batches, of those processed before the save, are trained on again."""
        return 0 if self.is_next_epoch else processed - self.done


def epoch_again(epoch: int) -> ResumePoint:
    """Return the point at which an epoch that has started starts again."""
    return ResumePoint("epoch_start", epoch, has_started=True)


def find_resume_point(
    fit_loop: Mapping[str, Any],
    *,
    accumulated: int,
    stopped: Stopped | None = None,
    has_ended: bool = False,
) -> ResumePoint:
    """Find the point where training continues from ``FitLoop.state_dict()``.

    ===  =============================================  ================================
    Row  The state was saved                            Training continues
    ===  =============================================  ================================
    1    between two epochs                             with the next epoch
    2    there, but ``max_steps`` had cut the epoch     after its last optimiser step
    3    in ``on_train_batch_end`` of the last batch    with the next epoch
    4    in a validation in which all ranks stopped,    with that validation
         after the last batch
    5    in another validation, after the last batch    with the end of the epoch
    6    in a validation in which all ranks stopped,    with that validation
         within the epoch
    7    there, with accumulated gradients              after the last optimiser step
    8    elsewhere in an epoch                          after the last optimiser step
    ===  =============================================  ================================

    Args:
        fit_loop: the state.
        accumulated: the number of batches per optimiser step.
        stopped: where all ranks stopped and saved the state, between batches or during
            validation; otherwise ``None``.
        has_ended: whether the last epoch's data was exhausted. Lightning does not flag
            the last batch if it expected another one: with ``dataloader_iter``, and if
            a loader without a length ends before the others.
    """
    progress = fit_loop["epoch_progress"]["current"]
    batch = fit_loop["epoch_loop.batch_progress"]
    epoch = progress["processed"]
    done = batch["current"]["processed"]
    if progress["started"] == progress["processed"]:
        if batch["is_last_batch"] or has_ended or not done:
            return ResumePoint("epoch_start", epoch)  # row 1
        return _after_last_step(epoch - 1, done, accumulated, is_counted=True)  # row 2
    is_in_batch = batch["current"]["ready"] > done
    if batch["is_last_batch"] and not is_in_batch:
        if batch["current"]["completed"] < done:
            return ResumePoint("epoch_start", epoch + 1, steps=1)  # row 3
        if stopped == "validation":
            return ResumePoint("validation", epoch, done, is_last=True)  # row 4
        return ResumePoint("epoch_end", epoch, done, is_last=True)  # row 5
    if stopped == "validation" and done % accumulated == 0:
        return ResumePoint("validation", epoch, done)  # row 6
    return _after_last_step(  # rows 7 and 8
        epoch, done, accumulated, is_counted=is_in_batch or stopped == "batch"
    )


def _after_last_step(
    epoch: int, processed: int, accumulated: int, *, is_counted: bool
) -> ResumePoint:
    """Return the point after the last optimiser step of an epoch.

    Checkpoints do not contain accumulated gradients. ``is_counted``: whether Lightning
    has counted the step of the last batch, if that completed one.
    """
    done = processed - processed % accumulated
    if not done:
        return epoch_again(epoch)
    return ResumePoint("batch_end", epoch, done, steps=-int(is_counted or done < processed))


def is_saved_at(
    point: ResumePoint, fit_loop: Mapping[str, Any], *, stopped: Stopped | None
) -> bool:
    """Whether a state was saved at its resume point, and not later.

    Only then does the random state at the save belong to the point.
    """
    batch = fit_loop["epoch_loop.batch_progress"]["current"]
    # A step that takes `dataloader_iter` requests its batch after it has begun.
    is_in_batch = batch["ready"] != batch["processed"] and stopped is None
    return not is_in_batch and point.dropped_of(batch["processed"]) == 0


def stop_after_batch(
    fit_loop: Mapping[str, Any],
    *,
    accumulated: int,
    stepped: int,
    validates: bool,
    has_validated: bool,
) -> tuple[dict[str, Any], Stopped | None]:
    """Return the state of interrupted loops as if all ranks had stopped together.

    Also return the argument ``stopped`` of :func:`find_resume_point`, which is ``None``
    where ranks never stop together. The given state is not changed.

    =========================================  ================  =======================
    The loops were interrupted                 ``stopped``       Changes
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
    changed = copy.deepcopy(dict(fit_loop))
    epoch = changed["epoch_progress"]["current"]
    batch = changed["epoch_loop.batch_progress"]
    current = batch["current"]
    done = current["processed"]
    if current["ready"] > done or not done:
        return changed, None
    stopped: Stopped | None = "batch"
    if epoch["started"] > epoch["processed"]:
        # An exception in a hook after the batch leaves it incomplete.
        batch["total"]["completed"] += done - current["completed"]
        current["completed"] = done
        if validates and not has_validated:
            stopped = "validation"
        elif validates and batch["is_last_batch"]:
            stopped = None  # Lightning skips this validation, and then counts the step itself
    # Lightning counts the step only after the validation.
    is_counted = stopped == "batch" and (batch["is_last_batch"] or done % accumulated == 0)
    changed["epoch_loop.state_dict"]["_batches_that_stepped"] = stepped + int(is_counted)
    return changed, stopped


def change_to(fit_loop: Mapping[str, Any], point: ResumePoint) -> dict[str, Any]:
    """Return a copy of a fit loop's state that continues at the given point."""
    changed = copy.deepcopy(dict(fit_loop))
    if point.at == "epoch_end":
        return changed
    begun = point.epoch if point.at == "epoch_start" else point.epoch + 1
    _set_counters(
        changed["epoch_progress"], begun=begun, processed=point.epoch, completed=point.epoch
    )
    if point.at == "validation":
        # Lightning then runs it from the beginning.
        _set_counters(changed["epoch_loop.val_loop.batch_progress"], begun=1)
        return changed
    changed["epoch_loop.state_dict"]["_batches_that_stepped"] += point.steps
    batch = changed["epoch_loop.batch_progress"]
    if point.is_next_epoch:
        batch["current"]["processed"] = 0  # all batches belong to earlier epochs
    # Lightning completes the last one, as in `on_train_batch_end`.
    _set_counters(batch, begun=point.done, processed=point.done, completed=max(0, point.done - 1))
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
