"""Describe what a Trainer is doing, for the report of a hang.

A watchdog's thread reads this from the main thread's frames, so training pays nothing.
"""

from __future__ import annotations

import traceback
from types import FrameType
from typing import Any

_OUR_HOOKS = __package__.removesuffix("private")  # also as lightning_ddp_ext.pytorch_lightning
_CALLS_BETWEEN_RANKS = ("save_checkpoint", "barrier", "broadcast", "reduce")
_FETCHING = ("__next__", "__iter__", "setup")


def current_hook(frame: FrameType | None, trainer: Any) -> str:
    """Return a frame's innermost hook, batch fetch or call between ranks.

    Outside of these, return the stage, or ``user code``.
    """
    stage = _stage_of(trainer)
    frames = [] if frame is None else traceback.walk_stack(frame)
    for caller, _ in frames:
        module = str(caller.f_globals.get("__name__"))
        function = caller.f_code.co_name
        if module.endswith(".loops.fetchers") and function in _FETCHING:
            return f"{stage or 'a'}_dataloader_next"
        if module.endswith(".trainer.call") and caller.f_locals.get("hook_name"):
            return str(caller.f_locals["hook_name"])
        if _has_calls_between_ranks(module) and function in _CALLS_BETWEEN_RANKS:
            return function
    return stage or "user code"


def _has_calls_between_ranks(module: str) -> bool:
    """Whether a module is Lightning's or ours, with a strategy's or a Trainer's methods."""
    is_ours = module.startswith(_OUR_HOOKS)
    return is_ours or ".strategies." in module or ".trainer." in module


def progress_of(trainer: Any) -> str:
    """Return the Trainer's progress, or only its stage.

    An example is ``train: epoch 3, step 512``.
    """
    stage = _stage_of(trainer)
    if trainer.training or trainer.validating or trainer.sanity_checking:
        return f"{stage}: epoch {trainer.current_epoch}, step {trainer.global_step}"
    return stage


def _stage_of(trainer: Any) -> str:
    if trainer.sanity_checking:
        return "sanity_check"
    return str(getattr(trainer.state.stage, "dataloader_prefix", None) or "")
