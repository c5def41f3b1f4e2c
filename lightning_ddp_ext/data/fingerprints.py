"""Compute fingerprints of drawn indices and batches.

They show whether a resumed run draws the same ones again.
"""

from __future__ import annotations

import marshal
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

from lightning_ddp_ext.data.epochs import all_below

T = TypeVar("T")

_SAMPLED = 128  # elements of a tensor
_LISTED = 32  # elements of a collection
_DEEPEST = 6  # nested collections
_SCALARS = (str, bytes, int, float, complex, type(None), np.generic)
# By element size in bytes, for floating-point numbers that NumPy lacks.
_WORDS = {
    1: torch.uint8,
    2: torch.int16,
}
_STABLE_FORMAT = 2  # of `marshal`; newer ones depend on which objects are identical


class Trace:
    """Fingerprints of the items that an iterator drew, or their sums of sizes.

    After each of the latest items, the value of all items up to it is kept. The
    fingerprint of indices is that of all indices. A batch is sampled: up to 128
    elements of each tensor and 32 of each collection, because a checksum of all
    elements would slow each step down.

    Args:
        kept: the number of latest items whose values are kept.
        number: the number of earlier items.
        earlier: the value after them.

    >>> once, again = Trace(2), Trace(2)
    >>> for batch in ([torch.zeros(3), "a"], [torch.ones(3), "b"]):
    ...     once.add_batch(batch)
    ...     again.add_batch(batch)
    >>> once.fingerprint_after(2) == again.fingerprint_after(2) != once.fingerprint_after(1)
    True
    """

    def __init__(self, kept: int = 0, number: int = 0, earlier: int = 0) -> None:
        self._number = number
        self._running = earlier
        self._latest: deque[tuple[int, list[torch.Tensor]]] = deque(
            [(earlier, [])], maxlen=kept + 1
        )

    def add_indices(self, item: Any) -> None:
        """Add what a sampler or batch sampler yielded."""
        try:
            self._add(zlib.crc32(marshal.dumps(item, _STABLE_FORMAT), self._running))
        except ValueError:  # such as tensors
            self.add_batch(item)

    def add_batch(self, batch: Any) -> None:
        """Add a batch, whose tensors may be changed afterwards."""
        on_device: list[torch.Tensor] = []
        self._add(_checksum(batch, self._running, on_device), on_device)

    def _add(self, running: int, on_device: list[torch.Tensor] | None = None) -> None:
        self._number += 1
        self._running = running
        self._latest.append((running, on_device or []))

    def follow_indices(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items of a sampler, and add each one before."""
        for item in items:
            self.add_indices(item)
            yield item

    def follow_batches(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield batches, and add each one before."""
        for batch in batches:
            self.add_batch(batch)
            yield batch

    def add_size(self, size: int) -> int:
        """Add the size of a batch, and return it."""
        self._add(self._running + size)
        return size

    def fingerprint_after(self, number: int) -> int | None:
        """Return the fingerprint of the first ``number`` items, or ``None``.

        The result is ``None`` if it is not kept.
        """
        place = len(self._latest) - 1 - (self._number - number)
        if not 0 <= place < len(self._latest):
            return None
        running, on_device = self._latest[place]
        for sample in on_device:
            running = _checksum(sample.cpu(), running, [])
        return running

    # The same for a trace of sizes: the sum of the first sizes.
    size_after = fingerprint_after


def fingerprint_of_list(items: list[Any]) -> int:
    """Return the fingerprint of a list of indices."""
    found = Trace()
    for first in range(0, len(items), 1 << 14):
        found.add_indices(items[first : first + (1 << 14)])
    return found._running


def fingerprint_of_data(dataset: object) -> int:
    """Return a fingerprint of a dataset and the datasets below it.

    It is made from a sample of their tensors, arrays and lists. Other attributes, such
    as a rank, may differ between ranks that have the same data.

    >>> from torch.utils.data import Subset
    >>> fingerprint_of_data(Subset("abcd", [0, 2])) == fingerprint_of_data(Subset("abcd", [1, 3]))
    False
    """
    running = 0
    for owner in all_below(dataset):
        attributes = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
        for value in list(attributes.values())[:_LISTED]:
            if isinstance(value, (torch.Tensor, np.ndarray)):
                running = _checksum(value, running, [])
            elif isinstance(value, (list, tuple, range)):
                sample = [
                    each
                    for each in value[:: max(1, len(value) // _SAMPLED)]
                    if isinstance(each, (int, str))
                ]
                running = zlib.crc32(marshal.dumps((len(value), *sample), _STABLE_FORMAT), running)
    return running


def _checksum(value: Any, running: int, on_device: list[torch.Tensor], depth: int = 0) -> int:
    """Return a checksum of a sample of a batch.

    Samples on an accelerator are appended to ``on_device``, without waiting for it.
    Only the class of a value counts whose content cannot be read, such as a nested
    tensor.
    """
    try:
        return _checksum_of_content(value, running, on_device, depth)
    except Exception:  # of an unusual tensor, or of a class that someone else wrote
        return zlib.crc32(type(value).__name__.encode(), running)


def _checksum_of_content(
    value: Any, running: int, on_device: list[torch.Tensor], depth: int
) -> int:
    if isinstance(value, torch.Tensor):
        return _checksum_of_tensor(value, running, on_device)
    if isinstance(value, np.ndarray):
        return _checksum_of_array(value, running)
    if isinstance(value, _SCALARS):
        return zlib.crc32(repr(value).encode(), running)
    running = zlib.crc32(type(value).__name__.encode(), running)
    if depth < _DEEPEST:
        for each in _elements(value):
            running = _checksum(each, running, on_device, depth + 1)
    return running


def _checksum_of_tensor(tensor: torch.Tensor, running: int, on_device: list[torch.Tensor]) -> int:
    tensor = tensor.detach()
    if not tensor.is_cpu:
        places = torch.arange(0, tensor.numel(), _step(tensor.numel()), device=tensor.device)
        on_device.append(tensor.take(places))
        return running
    if tensor.is_floating_point() and tensor.element_size() in _WORDS:
        tensor = tensor.view(_WORDS[tensor.element_size()])
    return _checksum_of_array(tensor.numpy(force=True), running)


def _checksum_of_array(array: Any, running: int) -> int:
    running = zlib.crc32(marshal.dumps(array.shape, _STABLE_FORMAT), running)
    if array.dtype.hasobject:
        return running
    return zlib.crc32(array.flat[:: _step(array.size)].tobytes(), running)


def _step(elements: int) -> int:
    """Return a step that samples a tensor.

    It is odd, so that it does not stay in one column of a batch.
    """
    return max(1, elements // _SAMPLED) | 1


def _elements(value: Any) -> Iterator[Any]:
    """Return a sample of a collection's elements, or another object's attributes."""
    if isinstance(value, Mapping):
        value = [value[key] for key in islice(value, _LISTED)]
    if isinstance(value, (list, tuple)):
        return iter(value[:: max(1, len(value) // _LISTED)])
    return iter(list(getattr(value, "__dict__", {}).values())[:_LISTED])
