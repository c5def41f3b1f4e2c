"""What Lightning's loops are in right now, read from another thread and at no cost to them."""

from __future__ import annotations

from types import FrameType
from typing import Any

# Functions of Lightning's trainer/call.py that run hooks, and have the hook's name in a local variable of this name.
_CALLERS = {
    "_call_callback_hooks",
    "_call_lightning_datamodule_hook",
    "_call_lightning_module_hook",
    "_call_strategy_hook",
}
_HOOK = "hook_name"
# What is worth a name of its own, where no hook runs.
_CALLS = {"save_checkpoint", "barrier", "broadcast", "reduce"}


def doing(frame: FrameType | None, trainer: Any) -> str:
    """The innermost of Lightning's activities that the frame is in, such as ``train_dataloader_next``."""
    while frame is not None:
        found = _activity(frame, trainer)
        if found:
            return found
        frame = frame.f_back
    return _stage(trainer) or "user code"


def progress(trainer: Any) -> str:
    """How far it is."""
    text = f"epoch {trainer.current_epoch}, step {trainer.global_step}"
    if trainer.training or trainer.validating or trainer.sanity_checking:
        return f"{_stage(trainer)}: {text}"
    return _stage(trainer)


def _activity(frame: FrameType, trainer: Any) -> str:
    module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    if module.endswith(".loops.fetchers") and function in ("__next__", "__iter__", "setup"):
        return f"{_stage(trainer) or 'a'}_dataloader_next"
    if module.endswith(".trainer.call") and function in _CALLERS:
        return str(frame.f_locals.get(_HOOK, ""))
    is_between = module.startswith(str(__package__)) or ".strategies." in module or ".trainer." in module
    return function if is_between and function in _CALLS else ""


def _stage(trainer: Any) -> str:
    if trainer.sanity_checking:
        return "sanity_check"
    prefix = getattr(trainer.state.stage, "dataloader_prefix", None)
    return str(prefix or "")
