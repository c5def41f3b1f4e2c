"""Read and set private attributes of Lightning's objects that several modules need, or that need more than a line."""

from __future__ import annotations

import math
import signal
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler

from .lightning_tree import Loop, RunningStage, is_param_in_hook_signature, refuse_missing

# Loops.


def combined_loader_of(loop: Any) -> Any:
    """Return a loop's combined loader, whose mode is not public; ``None`` before the loop has one."""
    return None if loop is None else _read(loop, "_combined_loader")


def mode_of(combined: Any) -> str:
    """Return the mode of a combined loader."""
    return str(_read(combined, "_mode"))


def combined_iterator_of(loop: Any) -> Any:
    """Return the loop's current iterator over its combined loader; each epoch has a new one."""
    combined = combined_loader_of(loop)
    return None if combined is None else _read(combined, "_iterator")


def iterators_of(loop: Any) -> list[Any]:
    """Return the iterators that the loop itself is reading, without those that users created."""
    iterator = combined_iterator_of(loop)
    return [] if iterator is None else list(iterator.iterators)


def fetcher_of(loop: Any) -> Any:
    """Return a loop's data fetcher, whose attribute ``length`` determines the last batch."""
    return _read(loop, "_data_fetcher")


def is_read_in_step(loop: Any) -> bool:
    """Whether the steps of a loop take ``dataloader_iter`` and thus fetch their batches themselves."""
    return type(fetcher_of(loop)).__name__ == "_DataLoaderIterDataFetcher"


def takes_iterator(module: Any, stage: Any) -> bool:
    """Whether the steps of an evaluation take ``dataloader_iter``; known before the loop has its fetcher."""
    step = module.test_step if stage == RunningStage.TESTING else module.validation_step
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def active_loop_of(trainer: Any) -> Any:
    """Return the running training or evaluation loop, or ``None``."""
    return _read(trainer, "_active_loop")


def end_restart(fit_loop: Any) -> None:
    """Make a fit loop continue as if it had not been restarted.

    The fit loop overrides the property of its base class with one that is always true with ``max_steps``.
    """
    refuse_missing(Loop, "restarting")
    Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]


def validates_next(trainer: Any) -> bool:
    """Whether Lightning validates after the current batch."""
    loop = trainer.fit_loop.epoch_loop
    return bool(_read(loop, "_should_check_val_fx")(fetcher_of(trainer.fit_loop)))


def is_in_optimizer_step(trainer: Any) -> bool:
    """Whether automatic optimisation is within an optimiser step."""
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    return bool(steps.ready > steps.completed)


def is_in_closure(error: BaseException) -> bool:
    """Whether an error was raised while gradients were computed or clipped, before the optimiser changed anything."""
    trace = error.__traceback__
    while trace is not None:
        function, module = trace.tb_frame.f_code.co_name, str(trace.tb_frame.f_globals.get("__name__"))
        if (function, module.rpartition(".")[2]) == ("closure", "automatic"):
            return True
        if function == "_after_closure" and ".precision." in module:
            return True
        trace = trace.tb_next
    return False


def dump_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return the checkpoint that the Trainer would save now, without the barrier of ``save_checkpoint``."""
    checkpoint: dict[str, Any] = _read(trainer._checkpoint_connector, "dump_checkpoint")(weights_only=False)
    return checkpoint


def is_restored_from(trainer: Any, checkpoint: Any) -> bool:
    """Whether the Trainer itself is restoring its state from this checkpoint, which it has read."""
    return _read(trainer._checkpoint_connector, "_loaded_checkpoint") is checkpoint


def end_epoch_after(trainer: Any, batches: int) -> None:
    """Make Lightning treat the batch with this number as the epoch's last one, as for loaders without a length."""
    fetcher = fetcher_of(trainer.fit_loop)
    if fetcher.length is not None:
        fetcher.length = batches
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0:
        trainer.val_check_batch = math.inf  # validate after the last batch, regardless of its number


def schedule_timed_validation(trainer: Any, last: float) -> None:
    """Make either all ranks or none validate after the next batch, with ``val_check_interval=timedelta(...)``.

    In Lightning each rank reads its own clock, so one rank may validate while another trains. Here rank 0's clock
    decides. Collective if such an interval is set.

    Args:
        trainer: the Trainer.
        last: the value of ``time.monotonic()`` at the last validation, or at the start of training.
    """
    interval = getattr(trainer, "_val_check_time_interval", None)  # not in Lightning 2.5
    if interval is not None and trainer.world_size > 1:
        is_due = torch.tensor(int(time.monotonic() - last >= interval), device=trainer.strategy.root_device)
        dist.broadcast(is_due, src=0)
        trainer._last_val_time = -math.inf if is_due else math.inf  # compared with the clock after the batch


def needs_sampler(trainer: Any, loader: Any) -> bool:
    """Whether Lightning would put a distributed sampler into a loader."""
    return bool(trainer._data_connector._requires_distributed_sampler(loader))


def has_saved_arguments(loader: Any) -> bool:
    """Whether Lightning has recorded the arguments of a loader and its batch sampler, as it does in hooks.

    If Lightning renames this, our own copies are used. Of a given batch sampler of torch's
    Lightning would keep neither the batch size nor ``drop_last``.
    """
    is_given = loader.batch_sampler is not None and loader.batch_size is None
    if is_given and type(loader.batch_sampler) is BatchSampler:
        return False
    created = [loader, loader.batch_sampler] if is_given else [loader]
    return all(hasattr(each, "__pl_saved_args") for each in created)


# Logged values.


def results_of(trainer: Any) -> dict[str, Any]:
    """Return the values that ``self.log`` has collected in the running loop, by key."""
    results: dict[str, Any] = _read(trainer, "_results")
    return results


def result_reduced_by(trainer: Any, reduction: object) -> Any:
    """Return the logged value for which Lightning keeps this object as its function that reduces, or ``None``."""
    results = results_of(trainer) or {}
    return next((each for each in reversed(results.values()) if _sync_of(each).fn is reduction), None)


def is_computing_epoch(trainer: Any) -> bool:
    """Whether Lightning computes an epoch's logged values now, rather than those of a step."""
    return _read(trainer._logger_connector, "_first_loop_iter") is None


def _sync_of(result: Any) -> Any:
    return _read(_read(result, "meta"), "sync")


# Signals.


def restore_handlers(trainer: Any) -> None:
    """Make Lightning restore only the handlers that changed, because restoring all removes ``faulthandler``'s."""
    connector = _read(trainer, "_signal_connector")
    for signum, handler in list(_read(connector, "_original_handlers").items()):
        if signal.getsignal(signum) == handler:
            del connector._original_handlers[signum]
    connector.teardown()


# The Trainer's current activity, which another thread reads at no cost to training.


def current_hook(frame: FrameType | None, trainer: Any) -> str:
    """Return a frame's innermost hook, batch fetch or call between ranks; otherwise the stage, or ``user code``."""
    while frame is not None:
        module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        if module.endswith(".loops.fetchers") and function in ("__next__", "__iter__", "setup"):
            return f"{_stage_of(trainer) or 'a'}_dataloader_next"
        hook = frame.f_locals.get("hook_name") if module.endswith(".trainer.call") else None
        if hook:
            return str(hook)
        is_between = module.startswith(str(__package__)) or ".strategies." in module or ".trainer." in module
        if is_between and function in ("save_checkpoint", "barrier", "broadcast", "reduce"):
            return function
        frame = frame.f_back
    return _stage_of(trainer) or "user code"


def progress_of(trainer: Any) -> str:
    """Return the Trainer's progress, such as ``train: epoch 3, step 512``, or only its stage."""
    stage = _stage_of(trainer)
    if trainer.training or trainer.validating or trainer.sanity_checking:
        return f"{stage}: epoch {trainer.current_epoch}, step {trainer.global_step}"
    return stage


def _stage_of(trainer: Any) -> str:
    if trainer.sanity_checking:
        return "sanity_check"
    return str(getattr(trainer.state.stage, "dataloader_prefix", None) or "")


def _read(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        refuse_missing(type(owner), name)
    return getattr(owner, name)
