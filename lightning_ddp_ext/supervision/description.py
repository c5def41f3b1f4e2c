"""What is this model, and what are these options, in words that ranks can compare and people can read?"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

_DEEPEST = 12
_PLAIN = (bool, int, float, complex, str, bytes, type(None), PurePath, enum.Enum, np.generic, torch.dtype, torch.device)


def structure_of(model: Module) -> dict[str, str]:
    """Classes of modules, and dtypes and shapes of parameters and buffers, by name.

    >>> for name, text in structure_of(torch.nn.Linear(2, 1, bias=False)).items():
    ...     print(f"{name}: {text}")
    model: torch.nn.modules.linear.Linear
    parameter weight: float32 (1, 2), requires_grad=True
    """
    found = {f"module {name}" if name else "model": _class_of(module) for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = f"{kind_of(parameter)}, requires_grad={parameter.requires_grad}"
    return found | {f"buffer {name}": kind_of(buffer) for name, buffer in model.named_buffers()}


def options_of(title: str, options: Mapping[Any, Any]) -> dict[str, str]:
    """The values of options, and of those within them, by name.

    >>> options_of("hyper-parameter", {"optimiser": {"lr": 0.1}, "loss": torch.nn.MSELoss()})
    {'hyper-parameter optimiser.lr': '0.1', 'hyper-parameter loss': 'torch.nn.modules.loss.MSELoss'}
    """
    return {f"{title} {path}": text_of(value) for path, value in _flat(options)}


def kind_of(tensor: Tensor) -> str:
    """Dtype and shape.

    >>> kind_of(torch.zeros(2, 1))
    'float32 (2, 1)'
    """
    shape = "not yet known" if is_lazy(tensor) else tuple(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def text_of(value: Any, depth: int = 0) -> str:
    """What a value is, without what is another one in every process, such as addresses."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"tensor {kind_of(value)}"
    if depth == _DEEPEST or isinstance(value, type) or callable(value):
        return _class_of(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key!r}: {text_of(each, depth + 1)}' for key, each in value.items()))}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(text_of(each, depth + 1) for each in value))}}}"
    if isinstance(value, Sequence):
        return f"[{', '.join(text_of(each, depth + 1) for each in value)}]"
    return _class_of(value)


def _flat(options: Mapping[Any, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value and depth < _DEEPEST:
            yield from _flat(value, name, depth + 1)
        else:
            yield name, value


def _class_of(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
