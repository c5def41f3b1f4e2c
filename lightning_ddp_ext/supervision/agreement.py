"""On what do the ranks differ, and which of them from the others?"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lightning_ddp_ext.checkpoint.collectives import Ranks

DIGEST = " #"  # what comes after it in a text is for comparing, and tells a reader nothing
_NAMED = 8  # differences, ranks or values that a message names
_LONGEST = 80  # characters of a value in a message


@dataclass(frozen=True)
class Difference:
    """Something that is not the same on all ranks.

    Args:
        name: what it is.
        texts: what it is on each rank, by rank; ``None`` where it is not there.
    """

    name: str
    texts: tuple[str | None, ...]

    @property
    def usual(self) -> str | None:
        """What most ranks have; of several with equally many ranks, what the lowest rank has."""
        return max(self.texts, key=self.texts.count)

    @property
    def outliers(self) -> tuple[int, ...]:
        """The ranks that have something else, ascending."""
        return tuple(rank for rank, text in enumerate(self.texts) if text != self.usual)

    def __str__(self) -> str:
        shown = [_shown(text) for text in self.texts]
        if len(set(shown)) == 1:
            return self.name
        values = list(dict.fromkeys(shown))
        of_each = [f"{value} on {ranks_named(_places(value, shown))}" for value in values[:_NAMED]]
        return f"{self.name} ({', '.join(of_each)})"


def differences(texts: Mapping[str, str], ranks: Ranks) -> list[Difference]:
    """What the ranks do not agree on, in the order of names. Collective: every rank must call it.

    Where all are equal, that is one all_reduce of 64 bytes, however much is compared.

    Args:
        texts: by name, what this rank has.
        ranks: all ranks.
    """
    if _is_same_everywhere(_digest(texts), ranks):
        return []
    return differing(ranks.gather(dict(texts)))


def differing(by_rank: Sequence[Mapping[str, str]]) -> list[Difference]:
    """What is not in all of these, or not the same.

    >>> print(*differing([{"lr": "0.1", "width": "8"}, {"lr": "0.2", "width": "8"}, {"lr": "0.1", "width": "8"}]))
    lr (0.1 on ranks 0 and 2, 0.2 on rank 1)
    """
    names = dict.fromkeys(name for texts in by_rank for name in texts)
    compared = (Difference(name, tuple(texts.get(name) for texts in by_rank)) for name in names)
    return [each for each in compared if len(set(each.texts)) > 1]


def described(found: Sequence[Difference]) -> str:
    """Which ranks differ from most others, and in what.

    >>> found = [Difference(name, ("1", "1", "2")) for name in "abcdefghij"]
    >>> described([*found, Difference("k", ("2", "1", "1"))])[:44]
    'rank 0 in k (2 on rank 0, 1 on ranks 1 and 2'
    """
    by_ranks: dict[tuple[int, ...], list[Difference]] = {}
    for each in found:
        by_ranks.setdefault(each.outliers, []).append(each)
    return "; ".join(f"{ranks_named(ranks)} in {_listed(same)}" for ranks, same in sorted(by_ranks.items()))


def ranks_named(ranks: Sequence[int]) -> str:
    """How a sentence names these ranks.

    >>> ranks_named([1]), ranks_named([0, 2, 3]), ranks_named(range(100))
    ('rank 1', 'ranks 0, 2 and 3', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {_joined([str(rank) for rank in ranks])}"


def _listed(found: Sequence[Difference]) -> str:
    return _joined([str(each) for each in found])


def _joined(words: Sequence[str]) -> str:
    more = len(words) - _NAMED
    words = [*words[:_NAMED], f"{more} more"] if more > 0 else words
    return " and ".join([part for part in (", ".join(words[:-1]), words[-1]) if part])


def _shown(text: str | None) -> str:
    if text is None:
        return "nothing"
    value = text.partition(DIGEST)[0]
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."


def _places(value: str, values: Sequence[str]) -> list[int]:
    return [place for place, each in enumerate(values) if each == value]


def _digest(texts: Mapping[str, str]) -> list[int]:
    contents = hashlib.blake2b(digest_size=32)
    for name, text in sorted(texts.items()):
        for part in (name.encode(errors="surrogatepass"), text.encode(errors="surrogatepass")):
            contents.update(len(part).to_bytes(8, "little") + part)
    found = contents.digest()
    return [int.from_bytes(found[at : at + 8], "little", signed=True) for at in range(0, len(found), 8)]


def _is_same_everywhere(numbers: list[int], ranks: Ranks) -> bool:
    """Whether the largest of each is its smallest, which is the complement of the complements' largest."""
    both = torch.tensor([*numbers, *(~number for number in numbers)], device=_device_for_collectives(ranks))
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    largest, smallest = both.view(2, -1).tolist()
    return bool(largest == [~number for number in smallest])


def _device_for_collectives(ranks: Ranks) -> torch.device:
    return torch.device("cpu") if "gloo" in str(dist.get_backend()) else ranks.device
