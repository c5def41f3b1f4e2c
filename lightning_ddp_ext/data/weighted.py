"""Draw samples by weight, in one sequence for all ranks."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from lightning_ddp_ext.data.checks import LARGEST, length_of, whole_number
from lightning_ddp_ext.data.generators import mix
from lightning_ddp_ext.data.global_order import GlobalOrderSampler, Order
from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.errors import ConfigurationError

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class DistributedWeightedSampler(GlobalOrderSampler):
    """torch's ``WeightedRandomSampler`` for several ranks, which share one sequence of draws.

    The sequence of an epoch depends on weights, ``seed`` and ``epoch``, not on the number of ranks, and can be started
    anywhere. With replacement, a rank computes its own draws only, each from a hash of its position in the sequence,
    and there may be more than 2**24 weights. Without, an epoch starts by sorting all samples (Efraimidis and Spirakis,
    "Weighted random sampling with a reservoir", 2006).

    Args:
        weights: one per sample of the dataset, in any scale: a tensor, array or sequence of one dimension.
        num_samples: draws of an epoch, over all ranks together.
        replacement: whether a sample can be drawn again within an epoch.
        num_replicas, rank, seed, uneven: as for ``ScalableDistributedSampler``.
        dataset: what the indices are for, if its length is to be compared with that of ``weights``.

    Raises:
        ConfigurationError: weights are empty, negative, not finite, all zero, not of one dimension or not as many as
            samples; ``num_samples`` is not positive or, without replacement, above the number of positive weights.

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
        self.weights = _validated(weights)
        self.replacement = bool(replacement)
        length = whole_number(
            num_samples, "num_samples", at_least=1, at_most=LARGEST, remedy="pass the draws of an epoch, of all ranks"
        )
        positive = np.count_nonzero(self.weights)
        if not replacement and length > positive:
            raise ConfigurationError(
                f"num_samples must be at most the number of positive weights, {positive}, without replacement"
                f" (got {length}); draw fewer, or pass replacement=True"
            )
        super().__init__(dataset, length, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, uneven=uneven)
        if dataset is not None:
            samples = length_of(dataset, "dataset", "weights belong to samples that have a number")
            if samples != len(self.weights):
                raise ConfigurationError(
                    f"weights must be as many as the dataset has samples, {samples} (got {len(self.weights)});"
                    " pass one weight for each sample"
                )

    @override
    def _order(self) -> Order:
        key = mix(self.seed, self.epoch)
        if not self.replacement:
            return _without_replacement(self.weights, self.length, key).__getitem__
        return partial(_draw, self._bounds, key)

    @cached_property
    def _bounds(self) -> NDArray[np.float64]:
        return np.cumsum(self.weights)

    @override
    def identity(self) -> dict[str, int | bool | str]:
        return {**super().identity(), "replacement": self.replacement, "weights": len(self.weights)}


def uniforms(key: int, positions: NDArray[Any]) -> NDArray[np.float64]:
    """Numbers of the sequence that belongs to ``key``: at least 0 and below 1, in steps of 2**-53.

    Steele, Lea and Flood's SplitMix64 (2014) at the given positions, with a second key in the middle.

    >>> some = uniforms(7, np.array([0, 1, 10**15]))
    >>> bool((uniforms(7, np.array([10**15])) == some[2]).all())
    True
    """
    words = positions.astype(np.uint64)
    words *= _STEP
    words += np.uint64(mix(key, 0))
    words ^= words >> np.uint64(30)
    words *= _FIRST
    words ^= np.uint64(mix(key, 1))
    words ^= words >> np.uint64(27)
    words *= _SECOND
    words ^= words >> np.uint64(31)
    numbers = (words >> np.uint64(11)).astype(np.float64)
    numbers *= 2.0**-53
    return numbers


def _draw(bounds: NDArray[np.float64], key: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Samples drawn with replacement, at these positions of the sequence."""
    values = uniforms(key, positions) * bounds[-1]
    # Searching ascending values is twice as quick: each finds its bound near the one before, in the cache.
    ascending = np.argsort(values)
    found = np.empty(len(values), dtype=np.int64)
    found[ascending] = np.searchsorted(bounds, values[ascending], side="right")
    return found


def _without_replacement(weights: NDArray[np.float64], count: int, key: int) -> NDArray[np.int64]:
    """Samples sorted by random arrival times, at rates that are the weights."""
    candidates = np.flatnonzero(weights)
    with np.errstate(divide="ignore"):  # a number of exactly 0 comes last
        times = np.log(-np.log(uniforms(key, candidates))) - np.log(weights[candidates])
    return candidates[np.argsort(times, kind="stable")[:count]]


def _validated(weights: Any) -> NDArray[np.float64]:
    """Weights as fractions of the largest one, so that their sum neither overflows nor vanishes."""
    if isinstance(weights, torch.Tensor):
        weights = weights.detach().to("cpu", torch.float64).numpy()
    try:
        found = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"weights must be numbers (got {weights!r}: {error}); pass one for each sample"
        ) from None
    if found.ndim != 1:
        raise ConfigurationError(
            f"weights must have one dimension (got shape {found.shape}); pass one weight for each sample"
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if wrong.size:
        raise ConfigurationError(
            f"weights must be finite and not negative (got {found[wrong[0]]} for sample {wrong[0]});"
            " give 0 to what is never drawn"
        )
    if not found.any():
        raise ConfigurationError(
            f"weights must have one above zero (got {found.size} of them, and no such one);"
            " give more to what is to be drawn"
        )
    fractions: NDArray[np.float64] = found / found.max()
    return fractions
