"""Compute fingerprints of drawn indices and batches.

They show whether a resumed run draws the same ones again.
"""

from __future__ import annotations

import marshal
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from lightning_ddp_ext.data.loader_properties import each_of
from lightning_ddp_ext.nested import values_of

T = TypeVar("T")

_VALUES = 32  # sampled in a batch
_ELEMENTS = 128  # about as many are sampled in a tensor, at most twice as many
_STABLE_FORMAT = 2  # of `marshal`; newer ones depend on which objects are identical


class Trace:
    """The fingerprints of the items that an iterator drew.

    A fingerprint covers all items up to one of them. Those up to each of the latest
    items are kept.

    Args:
        kept: the number of latest items for which a fingerprint is kept.
        number: the number of items that were drawn before.
        earlier: the fingerprint of these.

    >>> once, again = Trace(2), Trace(2)
    >>> for trace in (once, again):
    ...     batches = iter([[torch.zeros(3), "a"], [torch.ones(3), "b"]])
    ...     read = list(trace.follow(batches, checksum_of_batch))
    >>> once.fingerprint_after(2) == again.fingerprint_after(2) != once.fingerprint_after(1)
    True
    """

    def __init__(self, kept: int = 0, number: int = 0, earlier: int = 0) -> None:
        self._number = number
        self._latest = deque([earlier], maxlen=kept + 1)

    def follow(self, items: Iterator[T], checksum: Callable[[T, int], int]) -> Iterator[T]:
        """Yield items; the fingerprint includes an item before it is yielded.

        ``checksum(item, previous)`` continues the checksum of the previous items.
        """
        for item in each_of(items):
            self._number += 1
            self._latest.append(checksum(item, self._latest[-1]))
            yield item

    def fingerprint_after(self, number: int) -> int | None:
        """Return the fingerprint of the first ``number`` items, or of all if these are fewer.

        Return ``None`` if it was not kept.
        """
        later = max(0, self._number - number)
        return self._latest[-1 - later] if later < len(self._latest) else None


def checksum_of_indices(indices: Any, previous: int) -> int:
    """Return the checksum of what a sampler or batch sampler yielded."""
    try:
        return zlib.crc32(marshal.dumps(indices, _STABLE_FORMAT), previous)
    except ValueError:  # such as tensors
        return checksum_of_batch(indices, previous)


def checksum_of_batch(batch: Any, previous: int) -> int:
    """Return the checksum of a sample of a batch.

    The sample consists of up to 128 elements of each of the first 32 values, because a
    checksum of all elements would slow each step down.
    """
    for value in islice(values_of(batch), _VALUES):
        previous = zlib.crc32(_content_of(value), previous)
    return previous


def _content_of(value: Any) -> bytes:
    """Return bytes that stand for a value.

    Of a tensor on an accelerator, only the shape counts, because a copy would wait for
    the device. Of a value whose content cannot be read, only the class counts, because
    the text of an object may contain its address.
    """
    try:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            return marshal.dumps((*value.shape, *_elements_of(value)), _STABLE_FORMAT)
        return marshal.dumps(value, _STABLE_FORMAT)
    except Exception:  # of an unusual tensor, or of a class that someone else wrote
        return type(value).__name__.encode()


def _elements_of(array: Any) -> list[Any]:
    """Return a sample of the elements of a tensor or array."""
    if isinstance(array, torch.Tensor) and not array.is_cpu:
        return []
    number = math.prod(array.shape)
    # Odd, so that the sample does not stay in one column of a batch.
    step = (number // _ELEMENTS) | 1
    sample = (
        array.take(torch.arange(0, number, step))
        if isinstance(array, torch.Tensor)
        else array.flat[::step]
    )
    return list(sample.tolist())
