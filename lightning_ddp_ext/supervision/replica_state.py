"""Collect what must be the same on all ranks, by name, and describe it in texts that can be compared."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.supervision.cross_rank_diff import DIGEST
from lightning_ddp_ext.supervision.digest import digests

_PER_RANK = {"prev_loss"}  # LBFGS keeps each rank's own loss
_NUMBERS = (bool, int, float, complex, np.generic)
_PLAIN = (*_NUMBERS, str, bytes, range, type(None), PurePath, enum.Enum, torch.dtype, torch.device)


@dataclass(frozen=True)
class Entry:
    """A value that all ranks must have.

    Args:
        value: a tensor, an option or a number.
        holder, key: where an option or a number is stored: ``holder[key]``.
        first: a buffer's digest when training began; a buffer that has changed since on all ranks counts as the same.
    """

    value: Any
    holder: Any = None
    key: Any = None
    first: int | None = None


def structure_texts(model: Module) -> dict[str, str]:
    """Describe a model by the classes of its modules, and the dtypes and shapes of its parameters and buffers.

    >>> for name, text in structure_texts(torch.nn.Linear(2, 1, bias=False)).items():
    ...     print(f"{name}: {text}")
    model: torch.nn.modules.linear.Linear
    parameter weight: float32 (1, 2), requires_grad=True
    """
    found = {f"module {name}" if name else "model": _class_name(module) for name, module in model.named_modules()}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = f"{_kind(parameter)}, requires_grad={parameter.requires_grad}"
    return found | {f"buffer {name}": _kind(buffer) for name, buffer in model.named_buffers()}


def option_texts(title: str, options: Mapping[Any, Any]) -> dict[str, str]:
    """Describe options, and those nested in them.

    >>> option_texts("hyper-parameter", {"optimiser": {"lr": 0.1}, "loss": torch.nn.MSELoss()})
    {'hyper-parameter optimiser.lr': '0.1', 'hyper-parameter loss': 'torch.nn.modules.loss.MSELoss'}
    """
    return {f"{title} {path}": _text(entry.value) for path, entry in _leaves(options)}


def entry_texts(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Describe tensors by dtype, shape and digest, and other values by themselves."""
    tensors = {name: entry.value for name, entry in entries.items() if isinstance(entry.value, Tensor)}
    texts = {name: _text(entry.value) for name, entry in entries.items()}
    for name, digest in tensor_digests(tensors).items():
        has_changed = entries[name].first not in (None, digest)
        texts[name] += f"{DIGEST}{'changed' if has_changed else f'{digest:x}'}"
    return texts


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digests of all tensors but sparse, quantised and meta ones, by name."""
    dense = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    }
    return dict(zip(dense, digests(list(dense.values())), strict=True))


def replica_entries(
    model: Module, optimizers: Sequence[Optimizer], first_digests: Mapping[str, int]
) -> dict[str, Entry]:
    """Return what must be the same, by name; causes come before effects, such as learning rates before parameters.

    Args:
        model: the model in training.
        optimizers: its optimisers.
        first_digests: of buffers before training, by name; others are left out unless they are synchronised.
    """
    parameters = {f"parameter {name}": Entry(parameter) for name, parameter in model.named_parameters()}
    buffers = dict(_buffers(model, first_digests))
    return dict(_options(optimizers)) | parameters | buffers | dict(_optimizer_states(optimizers, model))


def _buffers(model: Module, first_digests: Mapping[str, int]) -> Iterator[tuple[str, Entry]]:
    for path, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            name = f"{path}.{key}".lstrip(".")
            if _is_synchronised(module):
                yield f"buffer {name}", Entry(buffer)
            elif name in first_digests and not _is_per_rank(module, key):
                yield f"buffer {name}", Entry(buffer, first=first_digests[name])


def _is_synchronised(module: Module) -> bool:
    if not isinstance(module, (SyncBatchNorm, torch.nn.SyncBatchNorm)):
        return False
    return dist.get_world_size(module.process_group) == dist.get_world_size()


def _is_per_rank(module: Module, key: str) -> bool:
    return key in module._non_persistent_buffers_set or (isinstance(module, _NormBase) and module.training)


def _options(optimizers: Sequence[Optimizer]) -> Iterator[tuple[str, Entry]]:
    for index, optimizer in enumerate(optimizers):
        yield f"optimizer {index}", Entry(type(optimizer))
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield f"optimizer {index}: {key} of group {number}", Entry(value, group, key)


def _optimizer_states(optimizers: Sequence[Optimizer], model: Module) -> Iterator[tuple[str, Entry]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            continue  # each rank has the state of other parameters
        for number, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
            name = names.get(id(parameter), f"parameter {number}")
            for path, entry in _leaves(optimizer.state.get(parameter, {})):
                if entry.key not in _PER_RANK:
                    yield f"optimizer {index}: {path} of {name}", entry


def _leaves(holder: Any, path: str = "") -> Iterator[tuple[str, Entry]]:
    """Yield what is in nested dictionaries and lists, with its path."""
    items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
    for key, value in items:
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, (Mapping, Sequence)) and not isinstance(value, _PLAIN) and value:
            yield from _leaves(value, name)
        else:
            yield name, Entry(value, holder, key)


def _text(value: Any) -> str:
    """Describe a value without addresses, which differ between processes."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return _kind(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_text, value))})"
    return _class_name(value)


def _kind(tensor: Tensor) -> str:
    shape = "not yet known" if is_lazy(tensor) else tuple(tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def _class_name(value: Any) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"
