"""Adapt the content of a checkpoint to the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_ddp_ext.checkpoint.key_prefixes import is_plain_state_dict, names_in_model, renamed
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.rank_lists import listed

from ..private.lightning_tree import lightning_version, rank_zero_info


def adapt_to_model(content: Any, path: str, model: nn.Module | None) -> dict[str, Any]:
    """Bring a checkpoint written by any program into the form that Lightning restores.

    A plain state dict gets the missing entries of a checkpoint, and names with
    ``module.`` or ``_orig_mod.`` are replaced by the model's names. A dict that already
    has a state dict is changed in place, and returned.

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
        raise CheckpointError(
            f"checkpoint {path} has no state dict in an entry 'state_dict' (got"
            f" {_kind_of(content)}); save the model's state_dict() alone, or under that name"
        )
    content.setdefault("pytorch-lightning_version", lightning_version)
    names = {} if model is None else names_in_model(content["state_dict"], model.state_dict())
    if names:
        content["state_dict"] = renamed(content["state_dict"], names)
    return content


def _kind_of(content: Any) -> str:
    """Return a dict's entries with their types, or the type of anything else."""
    if not isinstance(content, dict):
        return type(content).__name__
    return listed(f"{name!r}: {type(value).__name__}" for name, value in content.items())
