"""Make DDP average unfrozen parameters, and name unused ones in its error."""

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
    """Makes DDP also average gradients that it would leave out, and names unused parameters.

    :meth:`on_ddp_formed` is called whenever DDP has wrapped the module.

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

    def include_unfrozen(self) -> None:
        """Build DDP again before a step, if parameters were unfrozen after it was built.

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
        remedy = "unfreeze the same parameters on every rank, before the same step"
        enter_call(f"a step that trains the unfrozen {listed(unfrozen)}", remedy=remedy)
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
        self._strategy.configure_ddp()  # calls `on_ddp_formed`
        for parameter in frozen_now:
            parameter.requires_grad_(False)
        self._wait_for_gpu()

    def refuse_unfrozen(self) -> None:
        """Raise before a backward pass if parameters were unfrozen within the step.

        Raises:
            DivergenceError: DDP would not average their gradients.
        """
        unfrozen = self._unfrozen()
        if unfrozen:
            raise _refusal(unfrozen, "a training step")
        ddp: Any = self._strategy.model
        self._is_accumulating = not ddp.require_backward_grad_sync

    def _unfrozen(self) -> list[str]:
        return [name for name, parameter in self.frozen.items() if parameter.requires_grad]

    def _wait_for_gpu(self) -> None:
        """Wait for all streams, since Lightning builds DDP in one of its own."""
        if self._strategy.root_device.type == "cuda":
            torch.cuda.synchronize(self._strategy.root_device)

    def name_unused(self, error: RuntimeError) -> None:
        """Prepend names and a remedy to DDP's message about unused parameters.

        The other ranks then report them too. Other errors are unchanged.
        """
        message = str(error)
        unused = _unused_in(message)
        if unused is None:
            return
        rank, numbers = unused
        averaged = list(self._averaged)
        names = [averaged[number] for number in numbers if number < len(averaged)]
        sentence = (
            f"a backward pass on rank {rank} did not reach these parameters:"
            f" {listed(names)}; DDP waits for their gradients in each backward"
            " pass. If the loss is not to depend on them, choose"
            " strategy='ddp_ext_find_unused_parameters_true', or"
            " DDPExtStrategy(find_unused_parameters=True)"
        )
        error.args = (f"{sentence}\n{message}",)


def _unused_in(message: str) -> tuple[str, list[int]] | None:
    """Return the rank and the parameters that DDP's error about unused parameters names.

    Parameters are numbers in DDP's order. Return ``None`` for another message.
    """
    # HACK: only the text of torch's error lists these parameters; see
    # Reducer::ensure_prior_reduction_finished in torch's reducer.cpp.
    unused = re.search(r"which did not receive grad for rank (\d+): ([\d ]+)", message)
    if unused is None or "find_unused_parameters" not in message:
        return None
    rank, numbers = unused.groups()
    return rank, [int(number) for number in numbers.split()]


def _refusal(unfrozen: list[str], too_late: str) -> DivergenceError:
    """Return the error for parameters that were unfrozen at a point that is too late."""
    return DivergenceError(
        f"{listed(unfrozen)} must be unfrozen before {too_late}, because DDP would not average"
        " all of their gradients; unfreeze parameters in on_train_batch_start or"
        " on_train_epoch_start, or with a callback such as BackboneFinetuning",
        names=tuple(unfrozen),
    )
