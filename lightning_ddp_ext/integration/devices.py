"""Share out the devices of a Trainer among ranks that have several each."""

from __future__ import annotations

import torch
import torchmetrics
from torch import nn

from lightning_ddp_ext.errors import OptionError


def ranks_of(devices: int, *, per_rank: int) -> int:
    """The number of ranks that so many devices make; refuse devices that would be left over."""
    if devices % per_rank:
        raise OptionError(
            f"devices must be a multiple of devices_per_rank={per_rank} (got {devices}); choose "
            f"{devices - devices % per_rank} or {devices + per_rank - devices % per_rank} devices"
        )
    return devices // per_rank


def check_parts(model: nn.Module, devices: list[torch.device]) -> None:
    """Move metrics to a rank's first device, and refuse a parameter that is on none of its devices."""
    for module in model.modules():
        if isinstance(module, torchmetrics.Metric):
            module.to(devices[0])
    for name, parameter in model.named_parameters():
        if parameter.device not in devices:
            raise OptionError(
                f"with devices_per_rank={len(devices)} the module places its parts by itself, and {name} "
                f"is on {parameter.device}; put it on one of self.trainer.strategy.rank_devices "
                f"({', '.join(map(str, devices))}) in configure_model"
            )
