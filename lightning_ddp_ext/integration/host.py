"""Describe the strategy's attributes that its collaborators use, for a type checker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from .private.lightning_tree import ClusterEnvironment, pl

T = TypeVar("T")


class AnyHost(Protocol):
    """A strategy of any kind, also a stock one."""

    @property
    def root_device(self) -> torch.device: ...

    @property
    def lightning_module(self) -> pl.LightningModule | None: ...

    @property
    def checkpoint_io(self) -> pl.plugins.CheckpointIO: ...

    @property
    def is_global_zero(self) -> bool: ...

    def barrier(self, name: str | None = None) -> None: ...

    def broadcast(self, obj: T, src: int = 0) -> T: ...


class Host(AnyHost, Protocol):
    """Our strategy, as its collaborators see it."""

    @property
    def current_trainer(self) -> Any: ...  # Lightning's type lacks what our modules read

    @property
    def model(self) -> torch.nn.Module | None: ...

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...

    @property
    def precision_plugin(self) -> pl.plugins.Precision: ...

    @property
    def cluster_environment(self) -> ClusterEnvironment | None: ...

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]: ...

    @property
    def world_size(self) -> int: ...

    @property
    def global_rank(self) -> int: ...

    @property
    def rank_devices(self) -> list[torch.device]: ...
