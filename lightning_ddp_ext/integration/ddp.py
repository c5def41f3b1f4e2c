"""Handle steps that train other parameters than those that DDP averages.

When DDP is built, it leaves out frozen parameters and averages the gradients of all others.
A later step may differ in two ways:

- It trains a parameter that DDP leaves out, because it was unfrozen since then. DDP is
  built again before the step.
- Its backward pass does not reach a parameter that DDP averages. DDP's error gets the names
  of these unused parameters, and a remedy.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.errors import DivergenceError
from lightning_ddp_ext.rank_lists import listed

from .private.compat import unwrap_ddp
from .start.devices import RankDevicesStrategy
from .strategy_ranks import enter_call


class GradientAveraging:
    """The parameters that DDP averages and those that it leaves out.

    The strategy calls :meth:`on_ddp_formed` whenever DDP has wrapped the module, and the
    other methods in a step, while there are frozen parameters.

    Args:
        strategy: our strategy.

    Attributes:
        frozen: the parameters that DDP leaves out because they were frozen when it was
            built, by name; empty on a single rank, which averages nothing.
    """

    def __init__(self, strategy: RankDevicesStrategy) -> None:
        self._strategy = strategy
        # The parameters of which DDP averages the gradients, in its order, by name.
        self._averaged: dict[str, Parameter] = {}
        # Whether the last backward pass of this DDP left its gradients to a later one.
        self._is_accumulating = False
        self.frozen: dict[str, Parameter] = {}

    def on_ddp_formed(self) -> None:
        """Record which parameters a new DDP averages."""
        ddp: Any = self._strategy.model
        module = self._strategy.lightning_module
        if module is None:  # a user forms DDP without a Trainer
            module = ddp.module
        ignored = getattr(ddp, "parameters_to_ignore", ())
        named = {name: each for name, each in module.named_parameters() if name not in ignored}
        self._averaged = {name: each for name, each in named.items() if each.requires_grad}
        self._is_accumulating = False
        self.frozen = {}
        if isinstance(ddp, DistributedDataParallel) and self._strategy.world_size > 1:
            self.frozen = {name: each for name, each in named.items() if not each.requires_grad}

    # Parameters that are unfrozen during training; see
    # https://github.com/Lightning-AI/pytorch-lightning/issues/20340.

    def before_step(self) -> None:
        """Build DDP again if parameters were unfrozen after it was built.

        It then averages these as well. Collective if there are such parameters.

        Raises:
            DivergenceError: DDP would leave out gradients of earlier batches.
        """
        unfrozen = self._unfrozen()
        if not unfrozen:
            return
        finds_unused = getattr(self._strategy.model, "find_unused_parameters", False)
        if self._is_accumulating and finds_unused:
            # A new DDP takes parameters for unused if only earlier batches used them.
            raise _refusal(unfrozen, "the first batch whose gradients are accumulated")
        enter_call(
            f"a step that trains the unfrozen {listed(unfrozen)}",
            remedy="unfreeze the same parameters on every rank, before the same step",
        )
        self._build_ddp_again()

    def _build_ddp_again(self) -> None:
        """Build DDP with the unfrozen parameters and all those that it averages already.

        Some of these may be frozen only for a while, as in a GAN. DDP would leave out a
        parameter that is frozen when it is built.
        """
        frozen_now = [each for each in self._averaged.values() if not each.requires_grad]
        self._wait_for_gpu()
        unwrap_ddp(self._strategy)
        for parameter in frozen_now:
            parameter.requires_grad_(True)
        try:
            self._strategy.configure_ddp()  # calls `on_ddp_formed`
        finally:
            for parameter in frozen_now:
                parameter.requires_grad_(False)
        self._wait_for_gpu()

    def _wait_for_gpu(self) -> None:
        """Wait for all streams, since Lightning builds DDP in one of its own."""
        if self._strategy.root_device.type == "cuda":
            torch.cuda.synchronize(self._strategy.root_device)

    def before_backward(self) -> None:
        """Refuse parameters that were unfrozen within the step.

        Also record whether this backward pass leaves its gradients to a later one.

        Raises:
            DivergenceError: DDP would not average the gradients of these parameters.
        """
        unfrozen = self._unfrozen()
        if unfrozen:
            raise _refusal(unfrozen, "a training step")
        ddp: Any = self._strategy.model
        self._is_accumulating = not ddp.require_backward_grad_sync

    def _unfrozen(self) -> list[str]:
        return [name for name, parameter in self.frozen.items() if parameter.requires_grad]

    # Parameters that a backward pass does not reach.

    def name_unused(self, error: RuntimeError) -> None:
        """Prepend names and a remedy to DDP's message about unused parameters.

        The other ranks then report them too. Other errors are unchanged.
        """
        message = str(error)
        # HACK: only the text of torch's error lists these parameters, by their numbers in DDP's
        # order; see Reducer::ensure_prior_reduction_finished in torch's reducer.cpp.
        unused = re.search(r"which did not receive grad for rank (\d+): ([\d ]+)", message)
        if unused is None or "find_unused_parameters" not in message:
            return
        rank, numbers = unused.groups()
        averaged = dict(enumerate(self._averaged))
        names = [averaged[number] for number in map(int, numbers.split()) if number in averaged]
        error.args = (
            f"a backward pass on rank {rank} did not reach these parameters:"
            f" {listed(names)}; DDP waits for their gradients in each backward"
            " pass. If the loss is not to depend on them, choose"
            " strategy='ddp_ext_find_unused_parameters_true', or"
            f" DDPExtStrategy(find_unused_parameters=True)\n{message}",
        )


def _refusal(unfrozen: list[str], too_late: str) -> DivergenceError:
    """Return the error for parameters that were unfrozen at a point that is too late."""
    return DivergenceError(
        f"{listed(unfrozen)} must be unfrozen before {too_late}, because DDP would not average"
        " all of their gradients; unfreeze parameters in on_train_batch_start or"
        " on_train_epoch_start, or with a callback such as BackboneFinetuning",
        names=tuple(unfrozen),
    )
