"""What others have written, made into what Lightning expects of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_ddp_ext.checkpoint.key_prefixes import is_plain_state_dict, names_in_model, renamed
from lightning_ddp_ext.errors import CheckpointError

from .lightning_tree import lightning_version, rank_zero_info


def adapted(content: Any, path: str, model: nn.Module | None = None) -> dict[str, Any]:
    """The checkpoint as Lightning restores it.

    A plain state dict gets what a checkpoint has around it, and names with ``module.`` or ``_orig_mod.`` in them become
    the model's, where there is one.

    Raises:
        CheckpointError: it has no weights.
    """
    if is_plain_state_dict(content):
        rank_zero_info(
            f"{path} is a plain state dict: its weights are loaded, and optimisers, learning rates and progress "
            "start anew"
        )
        content = {"state_dict": content, "epoch": 0, "global_step": 0, "optimizer_states": [], "lr_schedulers": []}
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), Mapping):
        keys = ", ".join(repr(key) for key in list(content)[:8]) or "nothing" if isinstance(content, Mapping) else ""
        described = f"it has {keys}" if keys else f"it is a {type(content).__name__}"
        raise CheckpointError(
            f"checkpoint {path} has no entry 'state_dict' ({described}); save the model's state_dict() alone, or under "
            "that name"
        )
    content.setdefault("pytorch-lightning_version", lightning_version)
    names = {} if model is None else names_in_model(content["state_dict"], model.state_dict())
    if names:
        content["state_dict"] = renamed(content["state_dict"], names)
    return content
