"""What of a model and its optimisers must be the same on all ranks?"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.supervision.agreement import DIGEST
from lightning_ddp_ext.supervision.description import kind_of, text_of
from lightning_ddp_ext.supervision.digest import digests

BuffersCompared = Literal["constant", "all", "none"]

_PER_RANK = {"prev_loss"}  # LBFGS's own loss, which nobody averages
_NUMBERS = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True)
class Entry:
    """A tensor or a number that all ranks have.

    Args:
        value: itself.
        holder, key: where a number is found: ``holder[key]``.
        first: of a tensor that may change on each rank in its own way, the digest that it had when training began.
    """

    value: Any
    holder: Any = None
    key: Any = None
    first: int | None = None


State = dict[str, Entry]


def texts_of(state: Mapping[str, Entry]) -> dict[str, str]:
    """By name, what ranks compare: dtype, shape and digest of tensors, and numbers as they are."""
    tensors = {name: each.value for name, each in state.items() if isinstance(each.value, Tensor)}
    digest_of = dict(zip(tensors, digests(list(tensors.values())), strict=True))
    return {name: _text(each, digest_of.get(name)) for name, each in state.items()}


def _text(entry: Entry, digest: int | None) -> str:
    if digest is None:
        return text_of(entry.value)
    has_changed = entry.first not in (None, digest)
    return f"{kind_of(entry.value)}{DIGEST}{'changed' if has_changed else f'{digest:x}'}"


def is_ignored(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern fits the whole name or its last word, which is the one that the user's code has.

    >>> is_ignored("optimizer 0: exp_avg of encoder.0.weight", ["encoder.*"])
    True
    """
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in (name, name.rpartition(" ")[2]))


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether each rank has the state of some of the parameters only."""
    return _is_a(optimizer, "ZeroRedundancyOptimizer")


def is_averaging(optimizer: Optimizer) -> bool:
    """Whether it lets the ranks' parameters differ until it averages them."""
    return _is_a(optimizer, "PostLocalSGDOptimizer")


def _is_a(optimizer: Optimizer, name: str) -> bool:
    module = sys.modules.get("torch.distributed.optim")  # slow to import, and there if one is in use
    kind = getattr(module, name, None)
    return kind is not None and isinstance(optimizer, kind)


class Replicas:
    """A model under training, of which every rank has one.

    Args:
        model: with the names that its parameters and buffers are known by.
        buffers: which of them count. ``"constant"``: those that are on some rank what they were when this object was
            made, and the statistics of BatchNorm layers that are synchronised over all ranks; not those of others that
            are being trained, not those that are not saved, and, where ``are_buffers_sent`` is false, synchronised ones
            only. ``"all"`` or ``"none"``.
        are_buffers_sent: whether DDP gives all ranks the buffers of rank 0, before each forward.
        ignore: patterns of names that do not count.
    """

    def __init__(
        self,
        model: Module,
        *,
        buffers: BuffersCompared = "constant",
        are_buffers_sent: bool = True,
        ignore: Sequence[str] = (),
    ) -> None:
        self._model = model
        self._buffers = buffers
        self._are_buffers_sent = are_buffers_sent
        self._ignore = ignore
        self.remember_buffers()

    def remember_buffers(self) -> None:
        """From now on, a constant buffer is one that stays as it is now."""
        buffers = {name: buffer for name, buffer in self._model.named_buffers() if _can_be_read(buffer)}
        self._first = dict(zip(buffers, digests(list(buffers.values())), strict=True))

    def state(self, optimizers: Sequence[Optimizer]) -> State:
        """All that counts, by name; what explains the rest comes first."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        titled = [(f"optimizer {index}", optimizer) for index, optimizer in enumerate(optimizers)]
        found = {name: each for title, optimizer in titled for name, each in _options(title, optimizer)}
        found |= dict(self._parameters()) | dict(self._named_buffers())
        for title, optimizer in titled:
            if not is_sharded(optimizer):
                found |= dict(_optimizer_state(title, optimizer, names))
        return {name: each for name, each in found.items() if not is_ignored(name, self._ignore)}

    def _parameters(self) -> Iterator[tuple[str, Entry]]:
        ignored = getattr(self._model, "_ddp_params_and_buffers_to_ignore", ())
        for name, parameter in self._model.named_parameters():
            if name not in ignored and _can_be_read(parameter):
                yield f"parameter {name}", Entry(parameter)

    def _named_buffers(self) -> Iterator[tuple[str, Entry]]:
        if self._buffers == "none":
            return
        equal, own = self._equal_buffers(), self._own_buffers()
        for name, buffer in self._model.named_buffers():
            if not _can_be_read(buffer):
                continue
            if self._buffers == "all" or name in equal:
                yield f"buffer {name}", Entry(buffer)
            elif self._are_buffers_sent and name not in own:
                yield f"buffer {name}", Entry(buffer, first=self._first.get(name, 0))

    def _equal_buffers(self) -> set[str]:
        """Those of layers that have the statistics of all ranks' batches."""
        return {name for name, layer, _ in _buffers_and_owners(self._model) if _is_synchronised(layer)}

    def _own_buffers(self) -> set[str]:
        """Those that each rank has for itself."""
        ignored = set(getattr(self._model, "_ddp_params_and_buffers_to_ignore", ()))
        return ignored | {
            name
            for name, owner, key in _buffers_and_owners(self._model)
            if key in owner._non_persistent_buffers_set or (isinstance(owner, _NormBase) and owner.training)
        }


def _options(title: str, optimizer: Optimizer) -> Iterator[tuple[str, Entry]]:
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                yield f"{title}: {key} of group {number}", Entry(value, group, key)


def _optimizer_state(title: str, optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Entry]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"group{number}.{place}")
            for key, entry in _leaves(optimizer.state.get(parameter, {})):
                yield f"{title}: {key} of {name}", entry


def _leaves(holder: Any, path: str = "") -> Iterator[tuple[str, Entry]]:
    """The tensors and numbers in nested dictionaries and lists."""
    items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
    for key, value in items:
        name = f"{path}.{key}".lstrip(".")
        if key in _PER_RANK:
            continue
        if isinstance(value, (Mapping, list, tuple)):
            yield from _leaves(value, name)
        elif isinstance(value, _NUMBERS) or (isinstance(value, Tensor) and _can_be_read(value)):
            yield name, Entry(value, holder, key)


def _buffers_and_owners(model: Module) -> Iterator[tuple[str, Module, str]]:
    for path, module in model.named_modules():
        for key, _ in module.named_buffers(recurse=False):
            yield f"{path}.{key}".lstrip("."), module, key


def _can_be_read(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type != "meta"


def _is_synchronised(module: Module) -> bool:
    if isinstance(module, SyncBatchNorm):
        return bool(module._ddpx_context.world_size == dist.get_world_size())
    if isinstance(module, torch.nn.SyncBatchNorm):
        return bool(dist.get_world_size(module.process_group) == dist.get_world_size())
    return False
