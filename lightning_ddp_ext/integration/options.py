"""Check the names and values of the strategy's arguments."""

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
    options = [
        name
        for name in inspect.signature(DistributedDataParallel).parameters
        if name not in _SET_BY_LIGHTNING
    ]
    for name in ddp_kwargs:
        if name not in options:
            near = difflib.get_close_matches(
                name, [*inspect.signature(init).parameters, *options], n=1
            )
            remedy = f"did you mean {near[0]}?" if near else "remove it."
            raise ConfigurationError(
                f"DDPExtStrategy has no argument {name!r}; {remedy} Besides its own arguments, it"
                f" accepts those of DistributedDataParallel in torch {torch.__version__}:"
                f" {', '.join(options)}"
            )


def check_choice(field: str, value: object, *allowed: object) -> None:
    """Raise if the value is not in ``allowed``, of which the first is the default."""
    if not any(type(value) is type(each) and value == each for each in allowed):
        choices = " or ".join(map(repr, allowed))
        raise ConfigurationError(
            f"{field} must be {choices} (got {value!r}); the default is {allowed[0]!r}"
        )
