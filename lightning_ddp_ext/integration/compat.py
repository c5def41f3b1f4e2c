"""Read and set private attributes of Lightning's objects that several modules need, or that take more than a line."""

from __future__ import annotations

import math
import signal
import sys
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .lightning_tree import Loop, refuse_missing

# Loops.


def combined_loader_of(loop: Any) -> Any:
    """The loaders that a loop reads, combined; ``None`` before it has them. No public name leads to their mode."""
    return None if loop is None else _read(loop, "_combined_loader")


def mode_of(combined: Any) -> str:
    """How a combined loader combines."""
    mode: str = _read(combined, "_mode")
    return mode


def combined_iterator_of(loop: Any) -> Any:
    """The iterator over combined loaders that a loop reads now; another one each epoch."""
    combined = combined_loader_of(loop)
    return None if combined is None else _read(combined, "_iterator")


def iterators_of(loop: Any) -> list[Any]:
    """The iterators that a loop itself reads now, as opposed to those of somebody who looks at a batch."""
    iterator = combined_iterator_of(loop)
    return [] if iterator is None else list(iterator.iterators)


def fetcher_of(loop: Any) -> Any:
    """What fetches batches for a loop: its attribute ``length`` says which batch is the last."""
    return _read(loop, "_data_fetcher")


def is_read_in_step(loop: Any) -> bool:
    """Whether steps of a loop take ``dataloader_iter``, and so ask for their batches themselves."""
    return type(fetcher_of(loop)).__name__ == "_DataLoaderIterDataFetcher"


def active_loop_of(trainer: Any) -> Any:
    """The loop that runs: of training, or of an evaluation; ``None`` if no loop does."""
    return _read(trainer, "_active_loop")


def end_restart(fit_loop: Any) -> None:
    """Have a fit loop go on as one that was not restarted.

    Its own property is overridden by one that says that it restarts whenever there is ``max_steps``.
    """
    refuse_missing(Loop, "restarting")
    Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]


def validates_next(trainer: Any) -> bool:
    """Whether Lightning validates after the batch that has just been trained on."""
    loop = trainer.fit_loop.epoch_loop
    return bool(_read(loop, "_should_check_val_fx")(fetcher_of(trainer.fit_loop)))


def is_in_optimizer_step(trainer: Any) -> bool:
    """Whether automatic optimisation has begun an optimiser step that has not ended."""
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    return bool(steps.ready > steps.completed)


def is_in_closure(error: BaseException) -> bool:
    """Whether an error was raised while gradients were computed or clipped: the optimiser has changed nothing."""
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
    """What the Trainer would save now; ``save_checkpoint`` ends in a barrier."""
    checkpoint: dict[str, Any] = _read(trainer._checkpoint_connector, "dump_checkpoint")(weights_only=False)
    return checkpoint


def end_epoch_after(trainer: Any, batches: int) -> None:
    """Have Lightning take the batch with this number for the epoch's last one, as it does where it knows no length."""
    fetcher = fetcher_of(trainer.fit_loop)
    if fetcher.length is not None:
        fetcher.length = batches
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0:
        trainer.val_check_batch = math.inf  # validate after the last batch, whatever its number


class TimedValidation:
    """Validate after the same batch on all ranks with ``Trainer(val_check_interval=timedelta(...))``.

    Lightning has each rank ask its own clock, so that one validates while another trains. Here rank 0's clock decides.
    """

    def __init__(self) -> None:
        self._last = math.inf  # the last validation, or the beginning of training

    def before_batch(self, trainer: Any) -> None:
        """Agree whether a validation follows the next batch. Collective, if there is such an interval."""
        interval = getattr(trainer, "_val_check_time_interval", None)  # not in Lightning 2.5
        last = getattr(trainer, "_last_val_time", None)  # not before training begins
        if interval is None or last is None or trainer.world_size == 1:
            return
        if math.isfinite(last):  # set by Lightning since the last batch
            self._last = last
        is_due = torch.tensor(int(time.monotonic() - self._last >= interval), device=trainer.strategy.root_device)
        dist.broadcast(is_due, src=0)
        trainer._last_val_time = -math.inf if is_due else math.inf  # compared with the clock after the batch


def needs_sampler(trainer: Any, loader: Any) -> bool:
    """Whether Lightning would put a sampler for its rank into a loader."""
    return bool(trainer._data_connector._requires_distributed_sampler(loader))


# Logged values.


def results_of(trainer: Any) -> dict[str, Any]:
    """What ``self.log`` has collected in the loop that runs, by key."""
    results: dict[str, Any] = _read(trainer, "_results")
    return results


def calling_result() -> tuple[Any, bool]:
    """The result object of the logged value that ``Strategy.reduce`` was called for, if any; and whether to update it.

    A user may call ``reduce`` with the same arguments, and needs the answer at once: only the calling frame differs.
    """
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name == "reduce":  # also of a strategy that inherits from ours
        frame = frame.f_back
    owner = frame.f_locals.get("self")
    is_logged = type(owner).__name__ == "_ResultMetric"
    return (owner if is_logged else None), is_logged and frame.f_code.co_name == "update"


# Signals.


def put_back_handlers(trainer: Any) -> None:
    """Have Lightning put back the handlers that have changed; putting back all removes ``faulthandler``'s, in C."""
    connector = _read(trainer, "_signal_connector")
    for signum, handler in list(_read(connector, "_original_handlers").items()):
        if signal.getsignal(signum) == handler:
            del connector._original_handlers[signum]
    connector.teardown()


# What the Trainer does now, read from another thread and at no cost to it.


def current_hook(frame: FrameType | None, trainer: Any) -> str:
    """The innermost hook, wait for a batch or call between ranks that a frame is in: ``train_dataloader_next``."""
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
    """How far the Trainer is: ``train: epoch 3, step 512``."""
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
