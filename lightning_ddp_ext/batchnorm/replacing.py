"""A module that stands where a layer did, for a while, with the layer's own weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from lightning_ddp_ext.batchnorm.exchange import Peers
from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.errors import ConversionError

_STANDS_FOR = "_ddpx_stands_for"


def replace(layer: Module, to_sync: Callable[[Any, Any], Module], peers: Peers) -> Module:
    """The module that ``to_sync(layer, process_group)`` makes of a layer, with the layer's own tensors, mode and hooks.

    Raises:
        ConversionError: it is the layer itself, no module, or has other keys in its state dict.
    """
    made = to_sync(layer, peers.exchange.process_group)
    _check(made, layer, peers.exchange.names[peers.number])
    _hand_over_tensors(layer, made)  # optimizers and DDP may know them already
    for module in made.modules():
        if isinstance(module, SyncBatchNorm):
            module._ddpx_peers = peers
    made.train(layer.training)
    runs_them_itself = layer in made.modules()
    vars(made)[_STANDS_FOR] = (layer, {} if runs_them_itself else _share_hooks(made, layer))
    return made


def is_replacement(module: Module) -> bool:
    """Whether the module stands where a layer did."""
    return _STANDS_FOR in vars(module)


def put_back(made: Module) -> Module | None:
    """The layer that a module stands for, with its mode and what tensors it has now; ``None``: it stands for none."""
    if not is_replacement(made):
        return None
    layer: Module
    layer, hooks_of_made = vars(made).pop(_STANDS_FOR)
    _take_off_hooks(made, layer, hooks_of_made)
    _hand_over_tensors(made, layer)
    layer.train(made.training)
    return layer


def _check(made: Any, layer: Module, name: str) -> None:
    what = f"the converter of {type(layer).__name__} (layer {name})"
    if not isinstance(made, Module) or made is layer:
        got = "the layer itself" if made is layer else repr(made)
        raise ConversionError(
            f"{what} must return another module (got {got}); to keep the layer, register a subclass of SyncBatchNorm"
        )
    before, after = layer.state_dict().keys(), made.state_dict().keys()
    if before != after:
        raise ConversionError(
            f"{what} must return a module with the same keys in its state dict, or checkpoints could not be read later "
            f"(got {', '.join(after)} for {', '.join(before)})"
        )


def _hand_over_tensors(giver: Module, taker: Module) -> None:
    """Let ``taker`` have what ``giver`` has under the same names in its state dict: the very tensors."""
    given = giver.state_dict(keep_vars=True)
    in_place_of = {id(tensor): given[name] for name, tensor in taker.state_dict(keep_vars=True).items()}
    for module in taker.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update((name, in_place_of.get(id(tensor), tensor)) for name, tensor in tensors.items())


def _share_hooks(made: Module, layer: Module) -> dict[str, list[int]]:
    """Let both have the very same hooks, so that handles that were given out go on removing them.

    Returns:
        by kind, the numbers of those that ``made`` had.
    """
    hooks_of_made = {}
    for name, hooks in vars(layer).items():
        if "_hooks" in name and isinstance(hooks, dict):
            hooks_of_made[name] = list(vars(made).get(name, {}))
            hooks.update(vars(made).get(name, {}))
            vars(made)[name] = hooks
    if layer._is_full_backward_hook is not None:
        made._is_full_backward_hook = layer._is_full_backward_hook
    return hooks_of_made


def _take_off_hooks(made: Module, layer: Module, hooks_of_made: dict[str, list[int]]) -> None:
    for name, numbers in hooks_of_made.items():
        for number in numbers:
            vars(layer)[name].pop(number, None)
    if layer._backward_hooks:
        layer._is_full_backward_hook = made._is_full_backward_hook
