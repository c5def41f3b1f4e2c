"""What a strategy's ranks do about data together: which sampler a loader gets, and where it is read from."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader, RandomSampler, Sampler, SequentialSampler

from lightning_ddp_ext.data.balance import LevelledBatchSampler
from lightning_ddp_ext.data.default_samplers import SharedSampler, TorchOrderSampler
from lightning_ddp_ext.data.resumable import Resumable
from lightning_ddp_ext.data.samplers import ScalableDistributedSampler
from lightning_ddp_ext.data.weighted import DistributedWeightedSampler
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.integration.checkpoints import Checkpoints
from lightning_ddp_ext.integration.epochs import Epochs
from lightning_ddp_ext.integration.evaluation import EVALUATED, Evaluation
from lightning_ddp_ext.integration.lightning_tree import RunningStage, Strategy, rank_zero_info, refuse_missing
from lightning_ddp_ext.integration.resuming import Resuming
from lightning_ddp_ext.integration.uneven import Inputs, UnevenInputs
from lightning_ddp_ext.integration.watching import Watch

Order = Literal["torch", "scalable"]


class Sampling:
    """The samplers and loaders of a strategy's ranks.

    Args:
        strategy: whose ranks.
        checkpoints: what these do about checkpoints.
        order: whose order of training samples is put into loaders: torch's, or ours, which needs no list of them.
        exact_evaluation: whether evaluation sees each sample once.
        uneven_inputs: how an epoch ends where the ranks have different numbers of training batches.

    Raises:
        ConfigurationError: ``order`` or ``exact_evaluation`` is none of the allowed values.
    """

    def __init__(
        self,
        strategy: Strategy,
        checkpoints: Checkpoints,
        *,
        order: Order = "torch",
        exact_evaluation: bool = True,
        uneven_inputs: UnevenInputs | None = None,
    ) -> None:
        _check_choice("sampler", order, get_args(Order))
        _check_choice("exact_evaluation", exact_evaluation, (True, False))
        self._chosen = (strategy, checkpoints, order, exact_evaluation, uneven_inputs)
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._order = order
        self._exact_evaluation = exact_evaluation
        self._watch = Watch(self._before_iterator, self._after_iterator)
        self._agreed_seed: int | None = None
        self._trainer: Any = None
        self.resuming = Resuming(strategy)
        self.inputs = Inputs(strategy, self.resuming, uneven=uneven_inputs)
        self.epochs = Epochs()
        self.evaluation = Evaluation(strategy)

    # A strategy travels to spawned ranks by pickle; what belongs to a Trainer does not.

    def __getstate__(self) -> dict[str, Any]:
        return {"chosen": self._chosen}

    def __setstate__(self, state: dict[str, Any]) -> None:
        strategy, checkpoints, order, exact_evaluation, uneven_inputs = state["chosen"]
        self.__init__(  # type: ignore[misc]
            strategy, checkpoints, order=order, exact_evaluation=exact_evaluation, uneven_inputs=uneven_inputs
        )

    def attach(self, trainer: Any) -> None:
        """Have the Trainer ask us which sampler to put into a loader where it would put its own."""
        self._trainer = trainer
        self._agreed_seed = None
        self.resuming.attach(trainer)
        self.inputs.attach(trainer)
        self.epochs.attach(trainer)
        connector = trainer._data_connector
        leave_ours_alone(connector)
        refuse_missing(type(connector), "_resolve_sampler")
        resolve_own = type(connector)._resolve_sampler

        def resolve(dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None) -> Any:
            if connector._requires_distributed_sampler(dataloader):
                chosen = self._sampler_for(dataloader, shuffle and not trainer.overfit_batches, mode)
                if chosen is not None:
                    return chosen
            return resolve_own(connector, dataloader, shuffle, mode)

        connector._resolve_sampler = resolve
        self.evaluation.attach(trainer)

    def detach(self) -> None:
        """Leave the loaders as they were found."""
        self.inputs.detach(interrupted=self._checkpoints.is_interrupted)
        self.resuming.detach()
        self.evaluation.put_back()
        for loader in self._watch.end():
            self.epochs.forget(loader)

    def add_to(self, checkpoint: dict[str, Any], what: str) -> None:
        """Put into a checkpoint where each rank's data are. Collective, unless the Trainer is interrupted."""
        is_alone = self._checkpoints.is_interrupted
        to_rank_zero = None if is_alone else lambda value: self._checkpoints.to_rank_zero(value, what)
        self.resuming.add_to(checkpoint, seed=self._agreed_seed, to_rank_zero=to_rank_zero)

    # Which sampler.

    def _sampler_for(self, loader: DataLoader[Any], shuffle: bool, stage: RunningStage | None) -> Sampler[int] | None:
        """Our sampler in the place of Lightning's; ``None`` for Lightning's own."""
        if set(self._trainer.distributed_sampler_kwargs) != {"num_replicas", "rank"}:
            return None  # a strategy of the user's own, that wants something else of Lightning's
        if stage == RunningStage.TRAINING:
            return self._training_sampler(loader, shuffle)
        if stage in EVALUATED and self._exact_evaluation:
            return self.evaluation.sampler_for(loader, shuffle, self.seed)
        return None

    def _training_sampler(self, loader: DataLoader[Any], shuffle: bool) -> Sampler[int]:
        ranks = self._trainer.distributed_sampler_kwargs
        if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
            return SharedSampler(loader.sampler, seed=self.seed, **ranks)
        if self._order == "scalable":
            return ScalableDistributedSampler(loader.dataset, shuffle=shuffle, seed=self.seed, **ranks)
        return TorchOrderSampler(loader.dataset, shuffle=shuffle, seed=self.seed, **ranks)

    @property
    def seed(self) -> int:
        """Of the orders of samples: the resumed run's, else rank 0's. Collective, the first time."""
        if self._agreed_seed is None:
            self._agreed_seed = self._strategy.broadcast(int(os.environ.get("PL_GLOBAL_SEED", 0)))
        resumed = self.resuming.seed  # known later, if loaders are asked for before the Trainer restores anything
        if resumed is not None and resumed != self._agreed_seed:
            rank_zero_info(f"samples are shuffled with the checkpoint's seed, {resumed}, not {self._agreed_seed}")
            self._agreed_seed = resumed
        return self._agreed_seed

    # Before a loader is read.

    def process(self, loader: object) -> object:
        """What the Trainer is to iterate over in the place of ``loader``."""
        if isinstance(loader, DataLoader):
            _check_weights(loader)
            self.evaluation.balance(loader)
        if not self._trainer.training:
            self.evaluation.warn_of_repeats(loader)
        else:
            self.inputs.check(loader)
            self.epochs.warn_of_same_orders(loader)
        self._watch.add(loader)
        return loader

    def _before_iterator(self, loader: object) -> None:
        self.epochs.tell(loader)
        index = self._training_index(loader)
        if index is not None:
            self.resuming.before_iterator(index, self.epochs.now)

    def _after_iterator(self, loader: object) -> None:
        if self._training_index(loader) is not None:
            self.resuming.after_iterator()

    def _training_index(self, loader: object) -> int | None:
        combined = self._trainer.fit_loop._combined_loader
        if not self._trainer.training or combined is None or not self.resuming.reads.are_under_way:
            return None
        return next((index for index, other in enumerate(combined.flattened) if other is loader), None)


def leave_ours_alone(connector: Any) -> None:
    """Have a Trainer's data connector keep batch samplers that share out batches by themselves."""
    refuse_missing(type(connector), "_requires_distributed_sampler")
    requires_own = type(connector)._requires_distributed_sampler

    def requires(dataloader: DataLoader[Any]) -> bool:
        batch_sampler = dataloader.batch_sampler
        owned = (batch_sampler, getattr(batch_sampler, "sampler", None))
        is_ours = any(isinstance(each, (Resumable, LevelledBatchSampler)) for each in owned)
        return not is_ours and requires_own(connector, dataloader)

    connector._requires_distributed_sampler = requires


def _check_weights(loader: DataLoader[Any]) -> None:
    """Weights of another number than there are samples are a mistake."""
    owners = (loader, loader.batch_sampler)
    samplers = {id(each): each for each in (getattr(owner, "sampler", None) for owner in owners)}
    for sampler in samplers.values():
        if isinstance(sampler, DistributedWeightedSampler):
            with suppress(TypeError, NotImplementedError):  # datasets need no length where samplers say what to read
                sampler.check_length(len(loader.dataset))  # type: ignore[arg-type]


def _check_choice(field: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(type(value) is type(each) and value == each for each in allowed):
        choices = " or ".join(map(repr, allowed))
        raise ConfigurationError(f"{field} must be {choices} (got {value!r}); leave it out for {allowed[0]!r}")
