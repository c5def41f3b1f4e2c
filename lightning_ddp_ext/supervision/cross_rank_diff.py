"""Compare named texts across ranks, and say which ranks differ in what."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_ddp_ext.ranks import Ranks

DIGEST = " #"  # messages leave out what follows it in a text
_MOST_NAMED = 8  # differences, ranks or values in one list
_LONGEST_VALUE = 80  # characters


@dataclass(frozen=True)
class Difference:
    """A name, and its text on each rank, by rank; ``None`` where a rank lacks it.

    >>> print(Difference("lr", ("0.1", "0.2", "0.1")))
    lr (0.1 on ranks 0 and 2, 0.2 on rank 1)
    """

    name: str
    texts: tuple[str | None, ...]

    @property
    def outliers(self) -> tuple[int, ...]:
        """The ranks that differ from most others, ascending; on a tie, those that differ from the lowest rank."""
        [(usual, _)] = Counter(self.texts).most_common(1)
        return tuple(rank for rank, text in enumerate(self.texts) if text != usual)

    def __str__(self) -> str:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, text in enumerate(self.texts):
            ranks_by_value.setdefault(_shown(text), []).append(rank)
        if len(ranks_by_value) == 1:
            return self.name
        values = [f"{value} on {_named(ranks)}" for value, ranks in ranks_by_value.items()]
        return f"{self.name} ({', '.join(values[:_MOST_NAMED])})"


def differences(texts: Mapping[str, str], ranks: Ranks) -> list[Difference]:
    """Return what the ranks do not have in common. Collective: every rank must call it.

    The ranks exchange a digest of all texts, and the texts only if it differs.
    """
    digest = hashlib.blake2b(repr(sorted(texts.items())).encode(), digest_size=32).digest()
    if len(set(ranks.gather(digest))) == 1:
        return []
    by_rank = ranks.gather(dict(texts))
    names = dict.fromkeys(name for texts_of_rank in by_rank for name in texts_of_rank)
    compared = [Difference(name, tuple(texts_of_rank.get(name) for texts_of_rank in by_rank)) for name in names]
    return [each for each in compared if len(set(each.texts)) > 1]


def describe(found: Sequence[Difference]) -> str:
    """Say which ranks differ from most others, and in what."""
    names_by_ranks: dict[tuple[int, ...], list[str]] = {}
    for each in found:
        names_by_ranks.setdefault(each.outliers, []).append(str(each))
    return "; ".join(f"{_named(ranks)} in {_listed(names)}" for ranks, names in sorted(names_by_ranks.items()))


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {_listed([str(rank) for rank in ranks])}"


def _listed(words: Sequence[str]) -> str:
    if len(words) > _MOST_NAMED:
        words = [*words[:_MOST_NAMED], f"{len(words) - _MOST_NAMED} more"]
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _shown(text: str | None) -> str:
    if text is None:
        return "nothing"
    value = text.partition(DIGEST)[0]
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 3]}..."
