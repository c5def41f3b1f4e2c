"""Check the names of the strategy's arguments."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable

import torch
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext.errors import ConfigurationError

_SET_BY_LIGHTNING = ("module", "device_ids")


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
