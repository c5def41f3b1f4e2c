"""Tell whether a restore only copies a file's weights into the model.

Weights that are only copied can stay mapped from the file. If a hook or module may also
change or keep them, they are read into memory first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..private.lightning_tree import pl


def may_be_kept(module: pl.LightningModule | None, trainer: Any) -> bool:
    """Whether code other than torch's gets the file's weights before the model copies them.

    Args:
        module: the module that is restored; ``None`` if it is not known.
        trainer: the Trainer that restores it; ``None`` without one.
    """
    if module is None:
        return True
    owners: list[tuple[Any, type]] = [(module, pl.LightningModule)]
    if trainer is not None:
        owners += [(callback, pl.Callback) for callback in trainer.callbacks]
        owners.append((trainer.precision_plugin, pl.plugins.Precision))
    return (
        _is_overridden(module, pl.LightningModule, "load_state_dict")
        or any(_is_overridden(owner, base, "on_load_checkpoint") for owner, base in owners)
        or any(_may_keep(part) for part in module.modules())
    )


def _is_overridden(owner: Any, base: type, name: str) -> bool:
    """Whether a class other than ``base`` or ours defines this method of ``owner``.

    Lightning's own subclasses count as well, since WeightAveraging keeps the weights.
    """
    method = getattr(owner, name)
    function = getattr(method, "__func__", method)  # it may be an attribute of the object
    is_ours = str(getattr(function, "__module__", "")).startswith("lightning_ddp_ext.")
    return function is not getattr(base, name) and not is_ours


def _may_keep(module: nn.Module) -> bool:
    """Whether a module does more than copy its entries from a state dict.

    Without a public name for these attributes, a missing one counts as true, which is
    only slower.
    """
    load_method = getattr(type(module), "_load_from_state_dict", None)
    overrides_loading = not getattr(load_method, "__module__", "").startswith("torch.nn.")
    has_hooks = bool(getattr(module, "_load_state_dict_pre_hooks", True))
    has_state = type(module).set_extra_state is not nn.Module.set_extra_state
    return overrides_loading or has_hooks or has_state
