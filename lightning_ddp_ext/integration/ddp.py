"""Configure how DDP averages gradients, and name unused parameters in its error."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.reductions.gradients import average_gradients

from .start.devices import RankDevicesStrategy

CommHook = Callable[..., Any]
Wrapper = Callable[[CommHook], CommHook]

_SHOWN = 10  # maximum number of parameters that an error names


class GradientAveraging:
    """Makes DDP average the gradients of a strategy's ranks.

    If a comm hook is set, DDP uses it, even on CPU. With a single CPU rank the training
    step bypasses DDP.

    Args:
        strategy: our strategy.
        options: the names of the arguments of ``DistributedDataParallel`` that the user
            gave.
        hook: the comm hook, if any; for it, ``wrapper`` and ``state`` see
            ``DDPExtStrategy``.

    Attributes:
        is_needless: whether DDP has nothing to do: there is a single CPU rank, and no
            hook, option or sparse layer that DDP acts on.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        options: Collection[str],
        *,
        hook: CommHook | None,
        wrapper: Wrapper | None,
        state: object,
    ) -> None:
        self._strategy = strategy
        self._options = options
        self._hook = hook
        self._wrapper = wrapper
        self._state = state
        self.is_needless = False
        self._averaged: list[str] = []
        self._frozen: list[Parameter] = []

    def on_ddp_formed(self) -> None:
        """Record which parameters DDP averages, and register the comm hook on CPU.

        On GPUs, Lightning registers it.
        """
        module = self._strategy.lightning_module
        model: Any = self._strategy.model
        self.is_needless = False
        ignored = getattr(model, "parameters_to_ignore", ())
        known = (
            []
            if module is None
            else [each for each in module.named_parameters() if each[0] not in ignored]
        )
        # In DDP's order.
        self._averaged = [name for name, parameter in known if parameter.requires_grad]
        self._frozen = [parameter for _, parameter in known if not parameter.requires_grad]
        hook = self._hook
        if module is not None and hook is not None and self._strategy.root_device.type == "cpu":
            model.register_comm_hook(
                self._state, hook if self._wrapper is None else self._wrapper(hook)
            )

    def on_train_start(self) -> None:
        """Bypass DDP in the steps of a single CPU rank.

        It is not bypassed if the user has changed what DDP does.
        """
        model = self._strategy.model
        # On a GPU, DDP also moves inputs to the device.
        is_on_gpu = self._strategy.root_device.type != "cpu"
        if self._strategy.world_size > 1 or is_on_gpu or type(model) is not DistributedDataParallel:
            return
        # If torch renames this, DDP is not bypassed, which is only slower.
        described = getattr(model, "_get_ddp_logging_data", None)
        if self._options or described is None or described().get("comm_hook"):
            return
        if any(getattr(module, "sparse", False) is True for module in model.modules()):
            return  # DDP would also coalesce their gradients
        self.is_needless = True
        model.require_backward_grad_sync = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Average gradients of parameters that were unfrozen after DDP was built.

        DDP ignores parameters that were frozen then. Collective if there are unfrozen
        ones, unless the gradients of this step are only accumulated. See
        https://github.com/Lightning-AI/pytorch-lightning/issues/20340.
        """
        unfrozen = [parameter for parameter in self._frozen if parameter.requires_grad]
        yield  # a hook may freeze them again
        is_synced = getattr(self._strategy.model, "require_backward_grad_sync", True)
        if unfrozen and is_synced and self._strategy.world_size > 1:
            average_gradients(unfrozen)

    def training_step(self, as_lightning: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's training step as Lightning does.

        If DDP is not needed, its forward pass is left out.
        """
        if not self.is_needless:
            return as_lightning(*args, **kwargs)
        module = self._strategy.lightning_module
        assert module is not None
        with self._strategy.precision_plugin.train_step_context():
            return module.training_step(*args, **kwargs)

    def name_unused(self, error: BaseException, message: str) -> None:
        """Prepend names and a remedy to DDP's message about unused parameters.

        Other errors are unchanged.
        """
        found = re.search(r"which did not receive grad for rank (\d+): ([\d ]+)", message)
        if found is None or "find_unused_parameters" not in message:
            return
        numbers = [int(number) for number in found[2].split()]
        unused = [self._averaged[number] for number in numbers if number < len(self._averaged)]
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        sentence = (
            f"rank {found[1]} did not use these parameters to compute the loss that training_step"
            f" returned: {', '.join(unused[:_SHOWN])}{more}; DDP waits for their gradients. If this"
            " is intended, choose strategy='ddp_ext_find_unused_parameters_true', or"
            " DDPExtStrategy(find_unused_parameters=True)"
        )
        error.args = (f"{sentence}\n{message}",)
