"""Set up DDP's comm hook, rebuild DDP for unfrozen parameters, and name parameters in its error about unused ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .lightning_tree import pl, rank_zero_info

CommHook = Callable[..., Any]

_SHOWN = 10  # parameters in a message


def register_on_cpu(
    model: DistributedDataParallel, hook: CommHook | None, state: object | None, wrapper: Callable[..., Any] | None
) -> None:
    """Register the comm hook; Lightning only does that on GPUs."""
    if hook is not None:
        model.register_comm_hook(state=state, hook=hook if wrapper is None else wrapper(hook))


def form_anew(strategy: pl.strategies.DDPStrategy, frozen: Iterable[nn.Parameter]) -> None:
    """Rebuild DDP if a parameter was unfrozen: DDP does not average gradients of parameters that were frozen before.

    See https://github.com/Lightning-AI/pytorch-lightning/issues/20340.
    """
    unfrozen = [parameter for parameter in frozen if parameter.requires_grad]
    if not unfrozen:
        return
    rank_zero_info(f"rebuilt DDP, because {len(unfrozen)} parameters are no longer frozen")
    for parameter in unfrozen:
        dist.broadcast(parameter.data, src=0)
    if strategy.root_device.type == "cuda":
        torch.cuda.synchronize(strategy.root_device)  # Lightning forms DDP on a separate stream
    _forget_buckets(strategy._ddp_comm_state)
    strategy.model = strategy.lightning_module
    strategy._pl_static_graph_delay_done = False
    before = strategy._ddp_kwargs
    strategy._ddp_kwargs = {**before, "init_sync": False}  # otherwise every rank gets rank 0's running statistics
    strategy.configure_ddp()
    strategy._ddp_kwargs = before


def _forget_buckets(state: Any) -> None:
    """Have a ``PowerSGDState`` start with new buckets, which DDP rearranges after its first step."""
    if hasattr(state, "start_powerSGD_iter"):
        state.iter = min(state.iter, max(0, state.start_powerSGD_iter - 2))
        for known in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
            known.clear()


def name_unused(error: BaseException, message: str, module: nn.Module | None) -> None:
    """Prepend names and remedy to DDP's message about unused parameters; return other errors unchanged."""
    found = re.search(r"which did not receive grad for rank (\d+): ([\d ]+)", message)
    if found is None or module is None or "find_unused_parameters" not in message:
        return
    known = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    unused = [known[number] for number in map(int, found[2].split()) if number < len(known)]
    more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
    sentence = (
        f"rank {found[1]} did not use these parameters in the loss that training_step returned: "
        f"{', '.join(unused[:_SHOWN])}{more}; DDP waits for their gradients. If that is meant, choose "
        "strategy='ddp_ext_find_unused_parameters_true', or DDPExtStrategy(find_unused_parameters=True)"
    )
    error.args = (f"{sentence}\n{message}",)
