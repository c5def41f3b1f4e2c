"""List ranks in messages, briefly even if there are hundreds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

_MOST = 8


def listed(items: Iterable[object], separator: str = ", ") -> str:
    """Return the first items as text, and the number of those left out.

    >>> listed(["rank 0 (host a, pid 7)", "rank 1 (host b, pid 8)"])
    'rank 0 (host a, pid 7), rank 1 (host b, pid 8)'
    >>> listed("abcdefghij")
    'a, b, c, d, e, f, g, h and 2 more'
    """
    texts = [str(item) for item in items]
    left_out = len(texts) - _MOST
    return separator.join(texts[:_MOST]) + (f" and {left_out} more" if left_out > 0 else "")


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks in words, with ranges for consecutive ranks.

    >>> ranks_in_words([2]), ranks_in_words([2, 1])
    ('rank 2', 'ranks 1, 2')
    >>> ranks_in_words([*range(8), 9, *range(20, 320, 2)])
    'ranks 0-7, 9, 20, 22, 24, 26, 28, 30 and 144 more'
    """
    numbers = sorted(set(ranks))
    # In a run of consecutive ranks, each rank has the same distance to its position.
    runs = groupby(enumerate(numbers), key=lambda numbered: numbered[1] - numbered[0])
    ranges = [[rank for _, rank in run] for _, run in runs]
    shown = ranges[:_MOST]
    left_out = len(numbers) - sum(map(len, shown))
    more = f" and {left_out} more" if left_out else ""
    plural = "s" if len(numbers) != 1 else ""
    return f"rank{plural} {', '.join(map(_range_in_words, shown))}{more}"


def _range_in_words(ranks: list[int]) -> str:
    if len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def grouped(values_by_rank: Mapping[Any, Any]) -> list[tuple[Any, list[Any]]]:
    """Return each value with its ranks, the rarest value first.

    >>> grouped({0: "save", 1: "load", 2: "save"})
    [('load', [1]), ('save', [0, 2])]
    """
    ranks: dict[Any, list[Any]] = {}
    for rank, value in values_by_rank.items():
        ranks.setdefault(value, []).append(rank)
    return sorted(ranks.items(), key=lambda entry: len(entry[1]))


def activities_in_words(activities: Mapping[Any, str], verb: str) -> str:
    """Return a list of activities in words, each after its ranks.

    >>> activities_in_words({"rank 0": "save", "rank 1": "load", "rank 2": "save"}, "began")
    'rank 1 began load; rank 0, rank 2 began save'
    """
    return listed(
        (f"{listed(who)} {verb} {activity}" for activity, who in grouped(activities)),
        separator="; ",
    )
