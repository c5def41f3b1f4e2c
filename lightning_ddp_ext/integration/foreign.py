"""What others have written, made into what Lightning expects of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_ddp_ext.checkpoint.key_prefixes import (
    as_lightning_checkpoint,
    is_plain_state_dict,
    names_in_model,
    renamed,
)
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.integration.lightning_tree import lightning_version, rank_zero_info


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
        content = as_lightning_checkpoint(content, lightning_version)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), Mapping):
        raise CheckpointError(
            f"checkpoint {path} has no entry 'state_dict' ({_described(content)}); save the model's state_dict() "
            "alone, or under that name"
        )
    content.setdefault("pytorch-lightning_version", lightning_version)
    if model is not None:
        names = names_in_model(content["state_dict"], model.state_dict())
        if names:
            content["state_dict"] = renamed(content["state_dict"], names)
    return content


def _described(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"it is a {type(content).__name__}"
    return f"it has {', '.join(repr(key) for key in list(content)[:8]) or 'nothing'}"
