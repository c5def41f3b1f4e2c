"""Random numbers that are looked up by their place in a sequence, rather than drawn one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ddp_ext.data.streams import mix

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def uniforms(key: int, places: NDArray[Any]) -> NDArray[np.float64]:
    """Numbers of the sequence that belongs to ``key``: from 0 up to 1, which is left out, in steps of 2**-53.

    Steele, Lea and Flood's SplitMix64 (2014) at the given places, with a second key in the middle.

    >>> some = uniforms(7, np.array([0, 1, 10**15]))
    >>> bool((uniforms(7, np.array([10**15])) == some[2]).all())
    True
    """
    words = places.astype(np.uint64)
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
