"""Check what the Trainer restores, and who gets the weights before the model copies them."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_ddp_ext.checkpoint.location import PathOrUrl
from lightning_ddp_ext.errors import CheckpointError

from ..private.lightning_tree import pl


def raise_unless_saved_by_trainer(content: Any, path: PathOrUrl) -> None:
    """Raise if a file has no weights where Lightning looks for them.

    Raises:
        CheckpointError: it may contain a plain state dict.
    """
    if not isinstance(content, dict) or "state_dict" not in content:
        raise CheckpointError(
            f"checkpoint {path} was not saved by a Trainer: it has no entry 'state_dict'; to start"
            f" with the weights in it, call model.load_state_dict(torch.load({str(path)!r})), and"
            " leave out ckpt_path"
        )


def may_keep_weights(module: pl.LightningModule, trainer: Any) -> bool:
    """Whether a user's code gets the file's weights before the model copies them.

    It may read, change or keep them. Lightning's base classes and this package do not.
    """
    hook_owners: list[tuple[Any, type]] = [(module, pl.LightningModule)]
    if trainer is not None:
        hook_owners += [(callback, pl.Callback) for callback in trainer.callbacks]
        hook_owners.append((trainer.precision_plugin, pl.plugins.Precision))
    return (
        _is_overridden(module, pl.LightningModule, "load_state_dict")
        or any(_is_overridden(owner, base, "on_load_checkpoint") for owner, base in hook_owners)
        or any(_may_load_differently(part) for part in module.modules())
    )


def _is_overridden(owner: Any, base: type, name: str) -> bool:
    """Whether a class other than ``base`` or ours defines this method of ``owner``.

    Lightning's own subclasses count as well, since WeightAveraging keeps the weights.
    """
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
