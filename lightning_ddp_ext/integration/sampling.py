"""What a strategy's ranks do about data together: which sampler a loader gets, and what comes of it."""

from __future__ import annotations

import os
from collections.abc import Sized
from typing import Any, Literal

from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from lightning_ddp_ext.integration.evaluation import EVALUATED, Evaluation
from lightning_ddp_ext.integration.lightning_tree import RunningStage, Strategy, refuse_missing

Order = Literal["torch", "scalable"]


class Sampling:
    """The samplers and loaders of a strategy's ranks.

    Args:
        strategy: whose ranks.
        order: whose order of training samples is put into loaders: torch's, or ours, which needs no list of them.
        exact_evaluation: whether evaluation sees each sample once.
    """

    def __init__(self, strategy: Strategy, *, order: Order = "torch", exact_evaluation: bool = True) -> None:
        self._strategy = strategy
        self._order = order
        self._exact_evaluation = exact_evaluation
        self.evaluation = Evaluation(strategy)

    def attach(self, trainer: Any) -> None:
        """Have the Trainer ask us which sampler to put into a loader where it would put its own."""
        connector = trainer._data_connector
        refuse_missing(type(connector), "_resolve_sampler", "_requires_distributed_sampler")
        resolve_own = type(connector)._resolve_sampler

        def resolve(dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None) -> Any:
            if connector._requires_distributed_sampler(dataloader):
                chosen = self._sampler_for(dataloader, shuffle and not trainer.overfit_batches, mode)
                if chosen is not None:
                    return chosen
            return resolve_own(connector, dataloader, shuffle, mode)

        connector._resolve_sampler = resolve
        self.evaluation.attach(trainer)

    def _sampler_for(self, loader: DataLoader[Any], shuffle: bool, stage: RunningStage | None) -> Sampler[int] | None:
        """Our sampler in the place of Lightning's; ``None`` for Lightning's own."""
        if stage in EVALUATED and self._exact_evaluation:
            return self.evaluation.sampler_for(loader, shuffle)
        return None

    def process(self, loader: object) -> object:
        """What the Trainer is to iterate over in the place of ``loader``."""
        if isinstance(loader, DataLoader):
            self.evaluation.balance(loader)
        return loader
