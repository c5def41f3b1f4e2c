"""Configure how DDP averages gradients, and name unused parameters in its error."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Parameter

from lightning_ddp_ext.reductions.gradients import average_gradients

from .start.devices import RankDevicesStrategy

CommHook = Callable[..., Any]
Wrapper = Callable[[CommHook], CommHook]

_SHOWN = 10  # maximum number of parameters that an error names


class GradientAveraging:
    """Makes DDP average the gradients of a strategy's ranks.

    If a comm hook is set, DDP uses it, even on CPU. :meth:`on_ddp_formed` is called
    first, when DDP has wrapped the module.

    Args:
        strategy: our strategy.
        hook: averages the gradients of a bucket, if given.
        wrapper: wraps the hook, if given.
        state: what DDP passes to the hook.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        *,
        hook: CommHook | None,
        wrapper: Wrapper | None,
        state: object,
    ) -> None:
        self._strategy = strategy
        self._hook = hook
        self._wrapper = wrapper
        self._state = state
        # The module's parameters when DDP was built, without those that DDP ignores.
        self._trainable_names: list[str] = []  # in DDP's order, as its error numbers them
        self._frozen: list[Parameter] = []

    def on_ddp_formed(self) -> None:
        """Record which parameters DDP averages, and register the comm hook on CPU.

        On GPUs, Lightning registers it.
        """
        ddp: Any = self._strategy.model
        module = self._strategy.lightning_module
        if module is None:  # a user forms DDP without a Trainer
            module = ddp.module
        ignored = getattr(ddp, "parameters_to_ignore", ())
        averaged = {
            name: parameter for name, parameter in module.named_parameters() if name not in ignored
        }
        self._trainable_names = [name for name, each in averaged.items() if each.requires_grad]
        self._frozen = [each for each in averaged.values() if not each.requires_grad]
        if self._hook is not None and self._strategy.root_device.type == "cpu":
            hook = self._hook if self._wrapper is None else self._wrapper(self._hook)
            ddp.register_comm_hook(self._state, hook)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward pass in the block, then average gradients that DDP leaves out.

        DDP ignores parameters that were frozen when it was built, also if they are unfrozen
        later. Collective if there are such ones, unless the gradients of this step are only
        accumulated. See https://github.com/Lightning-AI/pytorch-lightning/issues/20340.
        """
        unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
        yield  # a hook may freeze them again
        is_synced = getattr(self._strategy.model, "require_backward_grad_sync", True)
        if unfrozen and is_synced and self._strategy.world_size > 1:
            average_gradients(unfrozen)

    def name_unused(self, error: BaseException, message: str) -> None:
        """Prepend names and a remedy to DDP's message about unused parameters.

        Other errors are unchanged, and numbers without a known name are left out.
        """
        # HACK: only the text of torch's error lists these parameters, by their numbers;
        # see Reducer::ensure_prior_reduction_finished in torch's reducer.cpp. An error
        # with another text stays as it is.
        unused = re.search(r"which did not receive grad for rank (\d+): ([\d ]+)", message)
        if unused is None or "find_unused_parameters" not in message:
            return
        rank, numbers = unused.groups()
        names = [
            self._trainable_names[int(number)]
            for number in numbers.split()
            if int(number) < len(self._trainable_names)
        ]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        sentence = (
            f"rank {rank} did not use these parameters to compute the loss that training_step"
            f" returned: {', '.join(names[:_SHOWN])}{more}; DDP waits for their gradients. If this"
            " is intended, choose strategy='ddp_ext_find_unused_parameters_true', or"
            " DDPExtStrategy(find_unused_parameters=True)"
        )
        error.args = (f"{sentence}\n{message}",)
