"""Give each rank several of the Trainer's devices, for models that span devices."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import nn
from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError

from ..private.lightning_tree import pl


class RankDevicesStrategy(pl.strategies.DDPStrategy):
    """Lightning's ``ddp`` with ``devices_per_rank`` devices for each rank.

    The module places its parts on them; Lightning moves batches to the first one.
    """

    devices_per_rank: int = 1

    @property
    def current_trainer(self) -> Any:  # Lightning's type lacks what our modules read
        """The Trainer that runs the model."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def rank_devices(self) -> list[torch.device]:
        """This rank's ``devices_per_rank`` devices; on CPU, each of them is the CPU."""
        first = self.local_rank * self.devices_per_rank
        return (self.parallel_devices or [])[first : first + self.devices_per_rank]

    @property
    @override
    def root_device(self) -> torch.device:
        return self.rank_devices[0]

    @property
    @override
    def num_processes(self) -> int:
        devices = len(self.parallel_devices or ())
        per_rank = self.devices_per_rank
        unused = devices % per_rank
        if unused:
            raise ConfigurationError(
                f"devices must be a multiple of devices_per_rank={per_rank} (got {devices}); write,"
                f" for example, devices={max(devices - unused, per_rank)}"
            )
        return devices // per_rank

    @override
    def determine_ddp_device_ids(self) -> list[int] | None:
        return None if self.devices_per_rank > 1 else super().determine_ddp_device_ids()

    @override
    def model_to_device(self) -> None:
        if self.devices_per_rank == 1:
            super().model_to_device()
        else:
            assert self.model is not None
            for module in self.model.modules():
                # Its states are not parameters, so the module does not place them.
                if isinstance(module, torchmetrics.Metric):
                    module.to(self.root_device)
            _check_parameters(self.model, self.rank_devices)


def _check_parameters(model: nn.Module, devices: list[torch.device]) -> None:
    """Raise if a parameter is not on one of a rank's devices."""
    for name, parameter in model.named_parameters():
        if parameter.device not in devices:
            raise ConfigurationError(
                f"with devices_per_rank={len(devices)} the module must place its parameters itself,"
                f" but {name} is on {parameter.device}; put it on one of"
                f" self.trainer.strategy.rank_devices ({', '.join(map(str, devices))}) in"
                " configure_model"
            )
