"""Where Lightning's training loop goes on after a restore.

A checkpoint holds how far each loop was when it was saved: in the middle of a batch, after it, between two epochs. Not
from all of these does Lightning go on rightly: an epoch whose checkpoint was saved in ``on_train_epoch_start`` is left
out; with ``max_steps`` so is the epoch after one whose checkpoint was saved at its end; gradients that were accumulated
are lost. Here the loops are put into one of two states that Lightning goes on from rightly: between two epochs, or in
the middle of an epoch with so many batches done.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_ddp_ext.integration.lightning_tree import Loop

At = Literal["begin", "within", "end"]


@dataclass(frozen=True)
class Restart:
    """Where training goes on.

    Args:
        at: whether the epoch begins, goes on, or has only its end to come.
        epoch: which one.
        done: batches of this epoch that have been trained on, and count.
        batches_that_stepped: Lightning's count for loggers, as it is to be at the first batch.
        is_validation_due: whether all of a validation comes first.
    """

    at: At
    epoch: int
    done: int
    batches_that_stepped: int
    is_validation_due: bool = False


def settle(
    fit_loop: Any,
    *,
    accumulated: int,
    batches: float | None,
    is_between_batches: bool = False,
    is_validation_due: bool = False,
) -> Restart:
    """Put loops that have just been restored into a state from which Lightning goes on rightly.

    Args:
        fit_loop: the Trainer's.
        accumulated: batches for an optimiser step, when the checkpoint was saved.
        batches: how many batches the epoch had then; ``None`` if nobody knows.
        is_between_batches: whether all that belongs to the last batch was done, validation included.
        is_validation_due: whether none of the validation that had begun counts.
    """
    epoch, batch = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
    is_cut_short = batches is not None and 0 < batch.current.processed < batches and not batch.is_last_batch
    if epoch.current.started == epoch.current.processed and is_cut_short:
        _reopen(epoch)  # max_steps, or a request to stop, has ended the epoch before its end
        return _continue_epoch(fit_loop, accumulated, is_counted=True)
    if epoch.current.started == epoch.current.processed:
        return _begin_epoch(fit_loop)
    if batch.current.completed < batch.current.processed:  # saved in on_train_batch_end
        if batch.is_last_batch:
            _close_epoch(fit_loop)
            return _begin_epoch(fit_loop)
        return _continue_epoch(fit_loop, accumulated, is_counted=False)
    if batch.current.processed < batch.current.ready:  # saved in the middle of the next batch
        return _continue_epoch(fit_loop, accumulated, is_counted=True)
    if is_validation_due:
        return replace(_before_validation(fit_loop), is_validation_due=True)
    if is_between_batches and not batch.is_last_batch:
        return _continue_epoch(fit_loop, accumulated, is_counted=False)
    if batch.is_last_batch or batch.current.processed % accumulated == 0:
        return _at_validation(fit_loop)
    return _continue_epoch(fit_loop, accumulated, is_counted=True)


def _reopen(epoch: Any) -> None:
    for progress in (epoch.current, epoch.total):
        progress.processed = progress.completed = progress.started - 1


def _begin_epoch(fit_loop: Any) -> Restart:
    """Between two epochs. If the next was announced already it does not matter: it is announced again."""
    epoch = fit_loop.epoch_progress
    for progress in (epoch.current, epoch.total):
        progress.ready = progress.started
        progress.completed = progress.processed
    _set_restarting(fit_loop, False)
    return Restart("begin", epoch.current.processed, 0, fit_loop.epoch_loop._batches_that_stepped)


def _close_epoch(fit_loop: Any) -> None:
    """The last batch has been trained on, and nothing else has been counted; what is done at the end is left out."""
    for progress in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
        progress.processed = progress.started
    batch = fit_loop.epoch_loop.batch_progress
    for progress in (batch.current, batch.total):
        progress.completed = progress.processed
    fit_loop.epoch_loop._batches_that_stepped += 1


def _before_validation(fit_loop: Any) -> Restart:
    """As if Lightning were in the middle of a validation of which no batch is done."""
    batch = fit_loop.epoch_loop.val_loop.batch_progress
    total = batch.total.completed - batch.current.completed
    _set(batch.current, ready=1, others=0)
    _set(batch.total, ready=total + 1, others=total)
    batch.current.started = 1
    batch.total.started = total + 1
    return _at_validation(fit_loop)


def _at_validation(fit_loop: Any) -> Restart:
    """Saved while the batches of an epoch were validated, or after it: from there Lightning goes on rightly."""
    _go_on_within(fit_loop)
    loop = fit_loop.epoch_loop
    at: At = "end" if loop.batch_progress.is_last_batch else "within"
    epoch, done = fit_loop.epoch_progress.current.processed, loop.batch_progress.current.processed
    return Restart(at, epoch, done, loop._batches_that_stepped + 1)


def _continue_epoch(fit_loop: Any, accumulated: int, *, is_counted: bool) -> Restart:
    """In the middle of an epoch, with all batches until the last optimiser step done and no other."""
    loop = fit_loop.epoch_loop
    batch = loop.batch_progress
    rewound = batch.current.processed % accumulated
    done = batch.current.processed - rewound
    total = batch.total.processed - rewound
    # As after an exception in the batch that comes next, from which Lightning starts that batch again.
    _set(batch.current, ready=done + 1, others=done)
    _set(batch.total, ready=total + 1, others=total)
    batch.is_last_batch = False
    if rewound:
        _take_back_zero_grad(loop)
    _go_on_within(fit_loop)
    stepped = loop._batches_that_stepped + (0 if rewound or is_counted else 1)
    return Restart("within", fit_loop.epoch_progress.current.processed, done, stepped)


def _set(progress: Any, *, ready: int, others: int) -> None:
    progress.ready = ready
    progress.started = progress.processed = progress.completed = others


def _take_back_zero_grad(loop: Any) -> None:
    """The gradients that were zeroed for the batches that do not count will be so again."""
    zero_grad = loop.automatic_optimization.optim_progress.optimizer.zero_grad
    for progress in (zero_grad.current, zero_grad.total):
        for name in ("ready", "started", "completed"):
            setattr(progress, name, max(0, getattr(progress, name) - 1))


def _go_on_within(fit_loop: Any) -> None:
    """The epoch has begun and not ended; older versions of Lightning count it once more with each restart."""
    for progress in (fit_loop.epoch_progress.current, fit_loop.epoch_progress.total):
        progress.ready = progress.started = progress.processed + 1
        progress.completed = progress.processed
    _set_restarting(fit_loop, True)


def _set_restarting(fit_loop: Any, restarting: bool) -> None:
    # The fit loop's own setter says that it restarts whenever there is max_steps, even between two epochs.
    Loop.restarting.fset(fit_loop, restarting)  # type: ignore[attr-defined]


def put_counts_right(fit_loop: Any, restart: Restart) -> None:
    """What Lightning's own restart has made of the counts, at the first batch after it; from there on none is due."""
    total = fit_loop.epoch_loop.batch_progress.total
    total.ready = total.started = total.processed = total.completed
    fit_loop.epoch_loop._batches_that_stepped = restart.batches_that_stepped
    # Else the epoch's end leaves out plateau schedulers, and, in older versions, steps all others a second time.
    fit_loop._restarting = False
