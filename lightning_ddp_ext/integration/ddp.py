"""Check the arguments of DDP, configure how it averages gradients, and explain its error."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.errors import ConfigurationError, DivergenceError
from lightning_ddp_ext.rank_lists import listed

from .named_calls import enter_call
from .private.compat import unwrap_ddp
from .private.lightning_tree import pl, rank_zero_warn
from .start.devices import RankDevicesStrategy
from .strategy_ranks import refuse

CommHook = Callable[..., Any]
Wrapper = Callable[[CommHook], CommHook]

_SET_BY_LIGHTNING = ("module", "device_ids")  # arguments of DDP
_SHOWN = 10  # maximum number of parameters that an error names


def refuse_unknown(init: Callable[..., None], ddp_kwargs: Iterable[str]) -> None:
    """Raise if DistributedDataParallel does not have one of the arguments.

    Raises:
        ConfigurationError: the error names the most similar argument and those of
            DistributedDataParallel.
    """
    ddp_arguments = inspect.signature(DistributedDataParallel).parameters
    options = [name for name in ddp_arguments if name not in _SET_BY_LIGHTNING]
    unknown = [name for name in ddp_kwargs if name not in options]
    if not unknown:
        return
    own = [
        name
        for name, parameter in inspect.signature(init).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    similar = difflib.get_close_matches(unknown[0], [*own, *options], n=1)
    remedy = f"did you mean {similar[0]}?" if similar else "remove it."
    raise ConfigurationError(
        f"DDPExtStrategy has no argument {unknown[0]!r}; {remedy} Besides its own arguments, it"
        f" accepts those of DistributedDataParallel in torch {torch.__version__}:"
        f" {', '.join(options)}"
    )


class GradientAveraging:
    """Makes DDP average the gradients of a strategy's ranks.

    If a comm hook is set, DDP uses it, even on CPU. :meth:`on_ddp_formed` is called
    first, when DDP has wrapped the module.

    Args:
        strategy: our strategy.
        hook: averages the gradients of a bucket, if given.
        wrapper: wraps the hook, if given.
        state: what DDP passes to the hook.

    Attributes:
        frozen: the parameters that DDP leaves out because they were frozen when it was
            built, by name; empty on a single rank, which averages nothing.
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
        self._averaged: dict[str, Parameter] = {}  # in DDP's order, as its error numbers them
        self._is_accumulating = False  # since the last backward pass
        self.frozen: dict[str, Parameter] = {}

    def on_ddp_formed(self) -> None:
        """Record which parameters DDP averages, and register the comm hook on CPU.

        On GPUs, Lightning registers it.
        """
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
        if self._hook is not None and self._strategy.root_device.type == "cpu":
            hook = self._hook if self._wrapper is None else self._wrapper(self._hook)
            self._register(ddp, hook)

    def _register(self, ddp: Any, hook: CommHook) -> None:
        """Register the comm hook on CPU, or warn why it only works on GPUs."""
        state: Any = self._state
        is_local = isinstance(state, PostLocalSGDState) and state.post_local_gradient_allreduce
        try:
            if is_local and state.subgroup is None:
                raise ValueError("its PostLocalSGDState needs subgroup=")
            ddp.register_comm_hook(state, hook)
        except Exception as error:
            name = getattr(hook, "__name__", repr(hook))
            rank_zero_warn(f"ddp_comm_hook {name} is left out on CPU: {error}")

    def check_first_step(self) -> None:
        """Refuse a static graph whose first batches only accumulate gradients.

        Collective: every rank must call it.

        Raises:
            ConfigurationError: torch would report an internal error.
        """
        trainer = self._strategy.current_trainer
        factors = [
            callback.get_accumulate_grad_batches(trainer.current_epoch)
            for callback in trainer.callbacks
            if isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
        ]
        batches = max([trainer.accumulate_grad_batches, *factors])
        if batches > 1 and getattr(self._strategy.model, "static_graph", False):
            error = ConfigurationError(
                f"static_graph=True needs a first step of one batch (got {batches}, by"
                " accumulate_grad_batches); remove static_graph, or accumulate from the second"
                f" epoch with GradientAccumulationScheduler({{1: {batches}}})"
            )
            refuse(self._strategy, error)

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
        # DDP keeps parameters that are frozen only for a while, as those of a GAN.
        frozen_now = [each for each in self._averaged.values() if not each.requires_grad]
        self._wait_for_gpu()
        unwrap_ddp(self._strategy)
        for parameter in frozen_now:
            parameter.requires_grad_(True)
        self._strategy.configure_ddp()
        for parameter in frozen_now:
            parameter.requires_grad_(False)
        self._wait_for_gpu()
        own_state = self._state
        if isinstance(own_state, PowerSGDState):
            # It has tensors for each bucket, and DDP changes buckets again after a step.
            own_state.iter = min(own_state.iter, own_state.start_powerSGD_iter - 2)
            for by_bucket in (
                own_state.error_dict,
                own_state.p_memory_dict,
                own_state.q_memory_dict,
            ):
                by_bucket.clear()

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
        averaged = [*self._averaged]
        names = [averaged[int(each)] for each in numbers.split() if int(each) < len(averaged)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        sentence = (
            f"a backward pass on rank {rank} did not reach these parameters:"
            f" {', '.join(names[:_SHOWN])}{more}; DDP waits for their gradients in each backward"
            " pass. If the loss is not to depend on them, choose"
            " strategy='ddp_ext_find_unused_parameters_true', or"
            " DDPExtStrategy(find_unused_parameters=True)"
        )
        error.args = (f"{sentence}\n{message}",)


def _refusal(unfrozen: list[str], too_late: str) -> DivergenceError:
    return DivergenceError(
        f"{listed(unfrozen)} must be unfrozen before {too_late}, because DDP would not average"
        " all of their gradients; unfreeze parameters in on_train_batch_start or"
        " on_train_epoch_start, or with a callback such as BackboneFinetuning",
        names=tuple(unfrozen),
    )
