"""Check the arguments of the strategy that are passed on to Lightning and DDP."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.errors import ConfigurationError

from .private.lightning_tree import pl

_SET_BY_LIGHTNING = ("module", "device_ids")

# For each field, an attribute that its values have, the rule, and a remedy. Lightning and
# torch accept any class with these attributes, so the class itself is not checked.
_RULES = {
    "bucket_cap_mb": ("__int__", "a number of megabytes", "bucket_cap_mb=25"),
    "checkpoint_io": ("teardown", "a CheckpointIO", "checkpoint_io=RankZeroCheckpointIO()"),
    "cluster_environment": (
        "set_global_rank",
        "a ClusterEnvironment",
        "cluster_environment=SLURMEnvironment()",
    ),
}


def refuse_mistyped(values: Mapping[str, Any]) -> None:
    """Raise if a value would be refused only after processes were started.

    Raises:
        ConfigurationError: the value is neither ``None`` nor of the field's kind.
    """
    for field, (name, kind, example) in _RULES.items():
        value = values.get(field)
        if value is not None and not hasattr(value, name):
            raise ConfigurationError(
                f"{field} must be {kind} or None (got {value!r}); write, for example, {example}"
            )


def refuse_unknown(init: Callable[..., None], ddp_kwargs: Iterable[str]) -> None:
    """Raise if DistributedDataParallel does not have one of the arguments.

    Args:
        init: the strategy's ``__init__``, whose own arguments the error may suggest.
        ddp_kwargs: the names of the other arguments that it was given.

    Raises:
        ConfigurationError: the error names the most similar argument and those of
            DistributedDataParallel.
    """
    ddp_arguments = inspect.signature(DistributedDataParallel).parameters
    options = [name for name in ddp_arguments if name not in _SET_BY_LIGHTNING]
    unknown = [name for name in ddp_kwargs if name not in options]
    if not unknown:
        return
    arguments = [
        name
        for name, parameter in inspect.signature(init).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    similar = difflib.get_close_matches(unknown[0], [*arguments, *options], n=1)
    remedy = f"did you mean {similar[0]}?" if similar else "remove it."
    raise ConfigurationError(
        f"DDPExtStrategy has no argument {unknown[0]!r}; {remedy} Besides its own arguments, it"
        f" accepts those of DistributedDataParallel in torch {torch.__version__}:"
        f" {', '.join(options)}"
    )


def refuse_accumulating_static_graph(trainer: Any) -> None:
    """Raise if the first batches of a static graph would only accumulate gradients.

    Raises:
        ConfigurationError: the first step has more than one batch, for which torch would
            report an internal error.
    """
    if not getattr(trainer.strategy.model, "static_graph", False):
        return
    batches = trainer.accumulate_grad_batches
    for callback in trainer.callbacks:
        if isinstance(callback, pl.callbacks.GradientAccumulationScheduler):
            batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
    if batches > 1:
        raise ConfigurationError(
            f"static_graph=True needs a first step of one batch (got {batches}, by"
            " accumulate_grad_batches); remove static_graph, or accumulate from the second epoch"
            f" with GradientAccumulationScheduler({{1: {batches}}})"
        )
