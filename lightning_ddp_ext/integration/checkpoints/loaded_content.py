"""Adapt the content of a checkpoint to the model, and find code that may keep its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_ddp_ext.checkpoint.key_prefixes import is_plain_state_dict, names_in_model, renamed
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.rank_lists import listed

from ..private.lightning_tree import lightning_version, pl, rank_zero_info


def adapt_to_model(content: Any, path: str, model: nn.Module | None) -> dict[str, Any]:
    """Return a checkpoint written by any program in the form that Lightning restores.

    A plain state dict gets the missing entries of a checkpoint, and names with
    ``module.`` or ``_orig_mod.`` are replaced by the model's names.

    Raises:
        CheckpointError: the content has no state dict.
    """
    if is_plain_state_dict(content):
        rank_zero_info(
            f"{path} is a plain state dict: its weights are loaded, and optimisers, learning rates"
            " and progress start from scratch"
        )
        content = {
            "state_dict": content,
            "epoch": 0,
            "global_step": 0,
            "optimizer_states": [],
            "lr_schedulers": [],
        }
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), Mapping):
        is_mapping = isinstance(content, Mapping)
        found = listed(map(repr, content)) if is_mapping else type(content).__name__
        raise CheckpointError(
            f"checkpoint {path} has no state dict in an entry 'state_dict' (got {found}); save the"
            " model's state_dict() alone, or under that name"
        )
    content.setdefault("pytorch-lightning_version", lightning_version)
    names = {} if model is None else names_in_model(content["state_dict"], model.state_dict())
    if names:
        content["state_dict"] = renamed(content["state_dict"], names)
    return content


def may_keep_weights(module: pl.LightningModule, trainer: Any) -> bool:
    """Whether a user's code gets the file's weights before the model copies them.

    It may read, change or keep them. Hooks of Lightning and of this package do not.
    """
    hook_owners: list[tuple[Any, type]] = [(module, pl.LightningModule)]
    if trainer is not None:
        hook_owners += [(callback, pl.Callback) for callback in trainer.callbacks]
        hook_owners.append((trainer.precision_plugin, pl.plugins.Precision))
    return (
        _is_users_method(module, pl.LightningModule, "load_state_dict")
        or any(_is_users_method(owner, base, "on_load_checkpoint") for owner, base in hook_owners)
        or any(_may_load_differently(part) for part in module.modules())
    )


def _is_users_method(owner: Any, base: type, name: str) -> bool:
    method = getattr(owner, name)
    function = getattr(method, "__func__", method)  # may also be an attribute of the object
    is_ours = str(getattr(function, "__module__", "")).startswith("lightning_ddp_ext.")
    return function is not getattr(base, name) and not is_ours


def _may_load_differently(module: nn.Module) -> bool:
    """Whether a module does more than copy its entries from a state dict.

    If torch renames one of these attributes, this is true, which is only slower.
    """
    load_method = getattr(type(module), "_load_from_state_dict", None)
    overrides_loading = not getattr(load_method, "__module__", "").startswith("torch.nn.")
    return overrides_loading or bool(getattr(module, "_load_state_dict_pre_hooks", True))
