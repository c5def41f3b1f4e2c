"""Draws by weight, one sequence for all ranks."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_ddp_ext.data.checks import LARGEST, length_of, whole_number
from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.data.samplers import GlobalOrderSampler, Order
from lightning_ddp_ext.data.streams import mix
from lightning_ddp_ext.data.uniforms import uniforms
from lightning_ddp_ext.errors import SamplerError


class DistributedWeightedSampler(GlobalOrderSampler):
    """torch's ``WeightedRandomSampler`` for several ranks, which share out one sequence of draws.

    The sequence of an epoch depends on weights, ``seed`` and ``epoch``, not on the number of ranks, and can be entered
    anywhere. With replacement, a rank computes its own draws only, each from a hash of its place in the sequence, and
    there may be more than 2**24 weights. Without, an epoch starts by sorting all samples (Efraimidis and Spirakis,
    "Weighted random sampling with a reservoir", 2006).

    Args:
        weights: one per sample of the dataset, in any scale: a tensor, array or sequence of one dimension.
        num_samples: draws of an epoch, over all ranks together.
        replacement: whether a sample can be drawn again within an epoch.
        num_replicas: as for ``ScalableDistributedSampler``.
        rank: as for ``ScalableDistributedSampler``.
        seed: the same on every rank, not negative.
        uneven: as for ``ScalableDistributedSampler``.
        dataset: what the indices are for, if its length is to be compared with that of ``weights``.

    Raises:
        SamplerError: weights are empty, negative, not finite, all zero, not of one dimension or not as many as samples;
            ``num_samples`` is not positive or, without replacement, above the number of positive weights.

    >>> [list(DistributedWeightedSampler([0, 5, 0], 4, num_replicas=2, rank=rank)) for rank in range(2)]
    [[1, 1], [1, 1]]
    """

    kind: ClassVar[str] = "weighted"

    def __init__(
        self,
        weights: Any,
        num_samples: int,
        replacement: bool = True,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        uneven: Uneven = "pad",
        dataset: Any = None,
    ) -> None:
        self.weights = _checked(weights)
        self.replacement = bool(replacement)
        length = whole_number(
            num_samples, "num_samples", at_least=1, at_most=LARGEST, remedy="pass the draws of an epoch, of all ranks"
        )
        if not replacement:
            _check_enough(self.weights, length)
        super().__init__(dataset, length, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, uneven=uneven)
        if dataset is not None:
            self.check_length(length_of(dataset, "dataset", "weights belong to samples that have a number"))

    def check_length(self, length: int) -> None:
        """Refuse a dataset of another length than the weights.

        Raises:
            SamplerError: it has another one.
        """
        if length != len(self.weights):
            raise SamplerError(
                f"weights must be as many as the dataset has samples, {length} (got {len(self.weights)});"
                " pass one weight for each sample"
            )

    @override
    def _order(self) -> Order:
        key = mix(self.seed, self.epoch)
        if not self.replacement:
            return _without_replacement(self.weights, self.length, key).__getitem__
        bounds = self._bounds
        return lambda places: _find(bounds, uniforms(key, places) * bounds[-1])

    @cached_property
    def _bounds(self) -> NDArray[np.float64]:
        return np.cumsum(self.weights)

    @override
    def _identity(self) -> dict[str, int | bool | str]:
        return {**super()._identity(), "replacement": self.replacement, "weights": len(self.weights)}


def _find(bounds: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many bounds are not above each value. Ascending values find theirs near those before: twice as quick."""
    ascending = np.argsort(values)
    found = np.empty(len(values), dtype=np.int64)
    found[ascending] = np.searchsorted(bounds, values[ascending], side="right")
    return found


def _without_replacement(weights: NDArray[np.float64], count: int, key: int) -> NDArray[np.int64]:
    """Samples by the time at which each comes, if they come at random and as often as they weigh."""
    candidates = np.flatnonzero(weights)
    with np.errstate(divide="ignore"):  # a number of exactly 0 comes last
        times = np.log(-np.log(uniforms(key, candidates))) - np.log(weights[candidates])
    return candidates[np.argsort(times, kind="stable")[:count]]


def _checked(weights: Any) -> NDArray[np.float64]:
    """Weights as fractions of the largest one, so that their sum neither overflows nor vanishes."""
    found = _as_array(weights)
    if found.ndim != 1:
        raise SamplerError(
            f"weights must have one dimension (got shape {found.shape}); pass one weight for each sample"
        )
    if not found.size:
        raise SamplerError("weights must not be empty (got 0 of them); pass one for each sample")
    for wrong, what in ((np.isnan(found), "NaN"), (np.isinf(found), "infinite"), (found < 0, "negative")):
        if wrong.any():
            place = int(wrong.argmax())
            raise SamplerError(
                f"weights must not be {what} (got {found[place]} for sample {place}); give 0 to what is never drawn"
            )
    if not found.any():
        raise SamplerError(f"weights must not all be zero (got {found.size} zeros); give more to what is to be drawn")
    fractions: NDArray[np.float64] = found / found.max()
    return fractions


def _as_array(weights: Any) -> NDArray[np.float64]:
    if isinstance(weights, torch.Tensor):
        weights = weights.detach().to("cpu", torch.float64).numpy()
    try:
        return np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SamplerError(f"weights must be numbers (got {weights!r}: {error}); pass one for each sample") from None


def _check_enough(weights: NDArray[np.float64], count: int) -> None:
    positive = np.count_nonzero(weights)
    if count > positive:
        raise SamplerError(
            f"num_samples must be at most the number of positive weights, {positive}, without replacement"
            f" (got {count}); draw fewer, or pass replacement=True"
        )
