"""Check that the ranks' models, optimisers and options are the same, and raise, warn or repair if they are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_ddp_ext.errors import ConfigurationError, DivergenceError
from lightning_ddp_ext.ranks import Ranks
from lightning_ddp_ext.supervision.cross_rank_diff import DIGEST, Difference, describe, differences
from lightning_ddp_ext.supervision.replica_state import Entry, entry_texts, replica_entries, tensor_digests

T = TypeVar("T")
OnDivergence = Literal["raise", "warn", "broadcast"]

_IGNORE_REMEDY = "name in RankConsistency(ignore=[...]) what may differ"
_REMEDY = f"look for what was done on some ranks only, or from their own data or random numbers, and {_IGNORE_REMEDY}"
_SETUP_REMEDY = f"give all ranks the same code, arguments and environment, and {_IGNORE_REMEDY}"


class ReplicaCheck:
    """Finds ranks that have diverged; the options are those of ``RankConsistency``.

    Args:
        on_divergence: what to do about it.
        ignore: patterns of names that may differ.
        warn: called on every rank with the same text.
    """

    def __init__(
        self, *, on_divergence: OnDivergence = "raise", ignore: Sequence[str] = (), warn: Callable[[str], object]
    ) -> None:
        if on_divergence not in get_args(OnDivergence):
            choices = ", ".join(map(repr, get_args(OnDivergence)))
            raise ConfigurationError(f"on_divergence must be one of {choices} (got {on_divergence!r})")
        if isinstance(ignore, str) or not all(isinstance(pattern, str) for pattern in ignore):
            raise ConfigurationError(
                f"ignore must be a list of patterns such as ['data_dir', 'encoder.*'] (got {ignore!r})"
            )
        self._on_divergence = on_divergence
        self._ignore = tuple(ignore)
        self._warn = warn
        self._warned: set[tuple[str, tuple[int, ...]]] = set()
        self._last_equal: str | None = None
        self._first_digests: dict[str, int] = {}

    def compare_setup(self, texts: Mapping[str, str], ranks: Ranks) -> None:
        """Compare descriptions of models and options before training. Collective: every rank must call it.

        Raises:
            DivergenceError: they differ, and ``on_divergence`` is not ``"warn"``.
        """
        self._last_equal = None
        self._first_digests.clear()
        self._warned.clear()
        found = differences(self._not_ignored(texts), ranks)
        if found:
            self._report(found, f"the ranks are not set up alike: {describe(found)}; {_SETUP_REMEDY}")

    def remember_buffers(self, model: Module) -> None:
        """Note what the buffers are before the first step: from then on, those that do not change are compared, too."""
        self._first_digests = tensor_digests(dict(model.named_buffers()))

    def compare(
        self,
        model: Module,
        optimizers: Sequence[Optimizer],
        ranks: Ranks,
        *,
        when: str,
        others: Mapping[str, str],
    ) -> None:
        """Compare parameters, buffers and optimisers bit by bit. Collective: every rank must call it.

        Args:
            model: the model in training.
            optimizers: its optimisers.
            ranks: all ranks.
            when: ``"after step 100"``, for the message.
            others: further texts to compare, by name.

        Raises:
            DivergenceError: they differ, and this is to be raised or cannot be repaired.
        """
        entries = self._not_ignored(replica_entries(model, optimizers, self._first_digests))
        found = differences({**self._not_ignored(others), **entry_texts(entries)}, ranks)
        if not found:
            self._last_equal = when
            self._warned.clear()
            return
        since = f", and did not {self._last_equal}" if self._last_equal else ""
        text = f"the ranks differ {when}{since}: {describe(found)}"
        if self._on_divergence != "broadcast":
            self._report(found, f"{text}; {_REMEDY}")
            return
        _refuse_irreplaceable(found, entries, text)
        _replace(found, entries, ranks)
        if self._first_digests:
            self.remember_buffers(model)
        self._last_equal = when
        self._warn(f"{text}; what rank 0 has took its place on the other ranks, and training goes on")

    def _not_ignored(self, named: Mapping[str, T]) -> dict[str, T]:
        return {name: value for name, value in named.items() if not is_ignored(name, self._ignore)}

    def _report(self, found: Sequence[Difference], text: str) -> None:
        if self._on_divergence != "warn":
            raise _error(found, text)
        findings = {(each.name, each.outliers) for each in found}
        if not findings <= self._warned:
            self._warn(text)
        self._warned = findings


def is_ignored(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches the name, or its last word, which is the name in the user's code.

    >>> is_ignored("optimizer 0: exp_avg of encoder.0.weight", ["encoder.*"])
    True
    """
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in (name, name.rpartition(" ")[2]))


def _error(found: Sequence[Difference], text: str) -> DivergenceError:
    ranks = sorted({rank for each in found for rank in each.outliers})
    return DivergenceError(text, ranks=tuple(ranks), names=tuple(each.name for each in found))


def _refuse_irreplaceable(found: Sequence[Difference], entries: Mapping[str, Entry], text: str) -> None:
    names = [each.name for each in found if not _can_be_replaced(each, entries.get(each.name))]
    if names:
        raise _error(
            found,
            f"{text}; on_divergence='broadcast' replaces tensors that have one dtype and shape on all ranks, and "
            f"options of optimisers: it cannot make {' or '.join(names[:3])} the same",
        )


def _can_be_replaced(difference: Difference, entry: Entry | None) -> bool:
    if entry is None or None in difference.texts:
        return False
    kinds = {text.partition(DIGEST)[:2] for text in difference.texts if text is not None}
    has_no_tensor = all(not digest for _, digest in kinds)
    return len(kinds) == 1 or (has_no_tensor and isinstance(entry.holder, (dict, list)))


@torch.no_grad()
def _replace(found: Sequence[Difference], entries: Mapping[str, Entry], ranks: Ranks) -> None:
    """Replace what differs by rank 0's values. Collective: every rank must call it."""
    for each in found:
        entry = entries[each.name]
        if isinstance(entry.value, Tensor):
            entry.value.copy_(ranks.from_rank_zero(entry.value.detach().cpu().clone()))
        else:
            entry.holder[entry.key] = ranks.from_rank_zero(entry.value)
