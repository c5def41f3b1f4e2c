"""Adapt the content of a checkpoint to the model, and find hooks that need its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_ddp_ext.checkpoint.key_prefixes import is_plain_state_dict, names_in_model, renamed
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.rank_lists import listed

from ..private.lightning_tree import lightning_version, pl, rank_zero_info


def adapted(content: Any, path: str, model: nn.Module | None) -> dict[str, Any]:
    """Return a checkpoint written by any program in the form that Lightning restores.

    A plain state dict gets the missing entries of a checkpoint, and names with
    ``module.`` or ``_orig_mod.`` are replaced by the model's names.
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
        found = (
            listed(map(repr, content)) if isinstance(content, Mapping) else type(content).__name__
        )
        raise CheckpointError(
            f"checkpoint {path} has no state dict in an entry 'state_dict' (got {found}); save the"
            " model's state_dict() alone, or under that name"
        )
    content.setdefault("pytorch-lightning_version", lightning_version)
    names = {} if model is None else names_in_model(content["state_dict"], model.state_dict())
    if names:
        content["state_dict"] = renamed(content["state_dict"], names)
    return content


def wants_content(module: pl.LightningModule, trainer: Any) -> bool:
    """Whether a hook gets the file's weights before they are loaded.

    It may read, change or keep them.
    """
    bases: list[tuple[Any, type]] = [(module, pl.LightningModule)]
    if trainer is not None:
        bases += [(callback, pl.Callback) for callback in trainer.callbacks]
        bases.append((trainer.precision_plugin, pl.plugins.Precision))
    return (
        _is_users_hook(module, pl.LightningModule, "load_state_dict")
        or any(_is_users_hook(owner, base, "on_load_checkpoint") for owner, base in bases)
        or any(_changes_what_it_loads(part) for part in module.modules())
    )


def _is_users_hook(owner: Any, base: type, name: str) -> bool:
    """Whether a hook is the user's.

    Hooks of Lightning and of this package ignore the weights.
    """
    hook = getattr(owner, name)
    function = getattr(hook, "__func__", hook)  # may also be an attribute of the object
    is_ours = str(getattr(function, "__module__", "")).startswith("lightning_ddp_ext.")
    return function is not getattr(base, name) and not is_ours


def _changes_what_it_loads(module: nn.Module) -> bool:
    # If torch renames one of these, the result is True, which is only slower.
    load_method = getattr(type(module), "_load_from_state_dict", None)
    overrides_loading = not getattr(load_method, "__module__", "").startswith("torch.nn.")
    return overrides_loading or bool(getattr(module, "_load_state_dict_pre_hooks", True))
