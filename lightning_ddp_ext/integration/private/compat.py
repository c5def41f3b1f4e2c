"""Read and set the state of Lightning's objects that has no public name.

Each section contains the functions for one kind of object. The objects are ``Any``, because
Lightning's types lack these names.

Private attributes are read by :func:`private`, which reports a name that the installed
Lightning lacks. If a name may be missing, the function that uses it says so. The state of
an interrupted step also follows from the traceback of the exception, in which functions are
recognised by name and module. These names cannot be checked in advance: if Lightning
renames one, the answer is that the exception was raised elsewhere.
"""

from __future__ import annotations

import math
import traceback
from datetime import timedelta
from typing import Any

from .lightning_tree import (
    Loop,
    RunningStage,
    is_param_in_hook_signature,
    missing,
    pl,
    refuse_missing,
)

_MISSING = object()


def private(owner: Any, *names: str) -> Any:
    """Return a private attribute of a Lightning object.

    With several names, each is read from the previous attribute.

    Raises:
        ImportError: the installed Lightning does not have the name.
    """
    for name in names:
        value = getattr(owner, name, _MISSING)
        if value is _MISSING:
            raise missing(f"{type(owner).__module__}.{type(owner).__qualname__}.{name}")
        owner = value
    return owner


# Loops.


def combined_loader_of(loop: Any) -> Any:
    """Return a loop's combined loader.

    It is ``None`` before the loop has one, and again once another run begins.
    """
    return None if loop is None else private(loop, "_combined_loader")


def mode_of(loop: Any) -> str:
    """Return the mode of a loop's combined loader, which is not public.

    Without a combined loader, this is the usual mode of an evaluation.
    """
    combined = combined_loader_of(loop)
    return "sequential" if combined is None else str(private(combined, "_mode"))


def combined_iterator_of(loop: Any) -> Any:
    """Return the loop's current iterator over its combined loader.

    Each epoch has a new one.
    """
    combined = combined_loader_of(loop)
    return None if combined is None else private(combined, "_iterator")


def iterators_of(loop: Any) -> list[Any]:
    """Return the iterators that the loop itself reads, without those of users."""
    combined = combined_iterator_of(loop)
    return [] if combined is None else list(combined.iterators)


def is_read_by(loop: Any, iterator: object) -> bool:
    """Whether the loop itself reads an iterator, and not a user's code."""
    return any(iterator is each for each in iterators_of(loop))


def fetcher_of(loop: Any) -> Any:
    """Return a loop's data fetcher, whose ``length`` determines the last batch."""
    return private(loop, "_data_fetcher")


def takes_iterator(module: Any, stage: Any) -> bool:
    """Whether the steps of an evaluation take ``dataloader_iter``.

    The answer is available before the loop has its fetcher.
    """
    step = module.test_step if stage == RunningStage.TESTING else module.validation_step
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def active_loop_of(trainer: Any) -> Any:
    """Return the running training or evaluation loop, or ``None``."""
    return private(trainer, "_active_loop")


def end_restart(fit_loop: Any) -> None:
    """Make a fit loop continue as if it had not been restarted.

    The fit loop overrides the property of its base class with one that is always true
    with ``max_steps``.
    """
    refuse_missing(Loop, "restarting")
    Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]
    if hasattr(fit_loop, "_resuming_from_checkpoint"):  # not before Lightning 2.6
        fit_loop._resuming_from_checkpoint = False


def validates_next(trainer: Any) -> bool:
    """Whether Lightning validates after the current batch."""
    loop = trainer.fit_loop.epoch_loop
    return bool(private(loop, "_should_check_val_fx")(fetcher_of(trainer.fit_loop)))


def is_in_optimizer_step(trainer: Any) -> bool:
    """Whether an optimiser step has begun and not ended."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        steps = loop.automatic_optimization.optim_progress.optimizer.step.current
    else:
        steps = loop.manual_optimization.optim_step_progress.current
    return bool(steps.ready > steps.completed)


def batches_that_stepped_of(epoch_loop: Any) -> int:
    """Return the number of optimiser steps, as Lightning's loggers count them."""
    return int(private(epoch_loop, "_batches_that_stepped"))


# The place in Lightning's training where an exception was raised.


def is_in_closure(error: BaseException, trainer: Any) -> bool:
    """Whether an error was raised while a step first computed or clipped gradients.

    The optimiser has not changed anything by then. One that calls its closure several
    times, as LBFGS does, may have changed the weights before a later call.
    """
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    for frame, _ in traceback.walk_tb(error.__traceback__):
        function = frame.f_code.co_name
        module = str(frame.f_globals.get("__name__"))
        if function == "closure" and module.endswith(".automatic"):
            # The closure has no result until its first call ends.
            return private(frame.f_locals["self"], "_result") is None
        if function == "_after_closure" and ".precision." in module:
            # Each call of the closure sets the gradients to zero, so in the first call of
            # each step, there are as many such calls as steps.
            return bool(progress.zero_grad.current.ready <= progress.step.current.ready)
    return False


def is_in_batch_end(error: BaseException) -> bool:
    """Whether an error was raised between a training batch and the count of its step.

    Lightning validates in between.
    """
    return any(
        frame.f_code.co_name == "on_advance_end"
        and str(frame.f_globals.get("__name__")).endswith(".training_epoch_loop")
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def is_in_tuner(error: BaseException) -> bool:
    """Whether an error was raised while Lightning's tuner trained for a trial."""
    return any(
        ".pytorch.tuner." in str(frame.f_globals.get("__name__"))
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


# Checkpoints.


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint that the Trainer would save now.

    Unlike ``save_checkpoint``, this has no barrier.
    """
    checkpoint: dict[str, Any] = private(trainer, "_checkpoint_connector", "dump_checkpoint")(
        weights_only=False
    )
    return checkpoint


def chosen_directory_of(callback: pl.callbacks.ModelCheckpoint, trainer: Any) -> str:
    """Return the directory that a checkpoint callback will choose or has chosen.

    It is available before the callback's setup.
    """
    return str(private(callback, "_ModelCheckpoint__resolve_ckpt_dir")(trainer))


# Loaders, and when to validate.


def end_epoch_after(trainer: Any, batches: int) -> None:
    """Make Lightning treat the batch with this number as the epoch's last one.

    If Lightning validates once per epoch, it does so after this batch. Lightning
    handles loaders without a length in the same way.
    """
    fetcher = fetcher_of(trainer.fit_loop)
    if fetcher.length is not None:
        fetcher.length = batches
    interval = trainer.val_check_interval
    validates_each_epoch = isinstance(interval, float) and interval == 1.0
    if validates_each_epoch:
        trainer.val_check_batch = math.inf  # after the last batch, regardless of its number


def needs_sampler(trainer: Any, loader: Any) -> bool:
    """Whether Lightning would put a distributed sampler into a loader."""
    return bool(private(trainer, "_data_connector", "_requires_distributed_sampler")(loader))


# Logged values.


def results_of(trainer: Any) -> dict[str, Any]:
    """Return the values that ``self.log`` has collected in the running loop, by key."""
    results: dict[str, Any] = private(trainer, "_results")
    return results


def result_reduced_by(trainer: Any, reduction: object) -> Any:
    """Return the logged value that Lightning reduces with this object, or ``None``."""
    for result in reversed((results_of(trainer) or {}).values()):
        if private(result, "meta", "sync").fn is reduction:
            return result
    return None


def is_computing_epoch(trainer: Any, result: Any) -> bool:
    """Whether Lightning reduces a result for an epoch, and not a value of a step.

    A hook may also log a value of a step outside of a batch, as ``on_after_backward``
    does if ``on_train_epoch_end`` calls ``manual_backward``.
    """
    if private(trainer, "_logger_connector", "_first_loop_iter") is not None:
        return False
    hook = private(trainer.lightning_module, "_current_fx_name")
    return not (result.meta.on_step and hook == result.meta.fx)


def results_to_compute(trainer: Any) -> list[Any]:
    """Return the logged values whose result of an epoch Lightning has yet to compute.

    They are those that it reduces over all ranks, in the order in which it does so.
    """
    return [
        result
        for _, result in private(results_of(trainer), "valid_items")()
        if result.meta.on_epoch
        and result.meta.sync.should
        and not result.meta.sync.rank_zero_only
        and result.meta.sync.group is None
        and result.is_tensor
        and private(result, "_computed") is None
    ]


# Signals.


def treat_next_exception_as_stop(trainer: Any) -> None:
    """Make Lightning end the Trainer's run as it does after SIGTERM."""
    connector = private(trainer, "_signal_connector")
    private(connector, "received_sigterm")  # if it is missing, Lightning would ignore the next line
    connector.received_sigterm = True


# Strategies.


def trainer_of(module: Any) -> Any:
    """Return a module's Trainer, or ``None`` outside of a run or without a module."""
    return private(module, "_trainer") if isinstance(module, pl.LightningModule) else None


def backend_of(strategy: pl.strategies.DDPStrategy) -> str:
    """Return the backend of a strategy's process group, also before there is one."""
    return str(private(strategy, "_get_process_group_backend")())


def timeout_of(strategy: pl.strategies.DDPStrategy) -> timedelta | None:
    """Return the time that a strategy's collectives may take."""
    timeout: timedelta | None = private(strategy, "_timeout")
    return timeout


def layer_sync_of(strategy: pl.strategies.Strategy) -> pl.plugins.LayerSync | None:
    """Return the plugin that synchronises a strategy's layers.

    It is ``None`` without one, and with strategies that lack the name.
    """
    return getattr(strategy, "_layer_sync", None)


def averages_models(strategy: pl.strategies.Strategy) -> bool:
    """Whether a strategy lets the ranks' models differ between averages.

    Post-local SGD does so.
    """
    is_ddp = isinstance(strategy, pl.strategies.DDPStrategy)
    return is_ddp and private(strategy, "_model_averager") is not None


def is_sharded(optimizer: object) -> bool:
    """Whether each rank has only a shard of the optimiser's state."""
    classes = [base.__name__ for base in type(optimizer).__mro__]
    return "ZeroRedundancyOptimizer" in classes  # by name, because importing it is slow


def unwrap_ddp(strategy: Any) -> None:
    """Remove DDP from a strategy's model, which can then be wrapped again."""
    private(strategy.model, "_remove_autograd_hooks")()  # DDP may still be referenced
    strategy.model = strategy.model.module
    strategy._pl_static_graph_delay_done = False  # of the first step of a static graph
