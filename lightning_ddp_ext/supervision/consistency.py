"""Are the ranks' models, optimisers and options the same, and what is done if they are not?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ddp_ext.checkpoint.collectives import Ranks
from lightning_ddp_ext.errors import DivergenceError, OptionError
from lightning_ddp_ext.supervision.agreement import DIGEST, Difference, described, differences
from lightning_ddp_ext.supervision.digest import bytes_of
from lightning_ddp_ext.supervision.replicas import BuffersCompared, Replicas, State, is_ignored, texts_of

OnDivergence = Literal["raise", "warn", "broadcast"]

_NAMED = 3  # things that cannot be made the same, in a message
_REMEDY = (
    "look for what was done on some ranks only, or from their own data or random numbers, and name in "
    "RankConsistency(ignore=[...]) what may differ"
)
_REMEDY_FOR_SETUP = (
    "give all ranks the same code, arguments and environment, and name in RankConsistency(ignore=[...]) what may differ"
)


class Consistency:
    """Finds ranks that have diverged.

    Args:
        on_divergence: ``"raise"`` an error on every rank, ``"warn"`` once of each finding, or ``"broadcast"`` what rank
            0 has.
        ignore: patterns of names that may differ, as for ``fnmatch``.
        buffers: which buffers count, see ``Replicas``.
        warn: called on every rank with a text that is the same on all.

    Raises:
        OptionError: an argument that cannot work.
    """

    def __init__(
        self,
        *,
        on_divergence: OnDivergence = "raise",
        ignore: Sequence[str] = (),
        buffers: BuffersCompared = "constant",
        warn: Callable[[str], object],
    ) -> None:
        self._on_divergence = _one_of(on_divergence, get_args(OnDivergence), "on_divergence")
        self.buffers: BuffersCompared = _one_of(buffers, get_args(BuffersCompared), "buffers")
        self.ignore = _patterns(ignore)
        self._warn = warn
        self._warned: set[tuple[str, tuple[int, ...]]] = set()
        self._last_equal: str | None = None

    def compare_setup(self, texts: Mapping[str, str], ranks: Ranks) -> None:
        """Compare what was there before training, by name. Collective: every rank must call it.

        Raises:
            DivergenceError: it differs, and ``on_divergence`` is not ``"warn"``.
        """
        self._last_equal = None
        self._warned.clear()
        found = differences({name: text for name, text in texts.items() if not is_ignored(name, self.ignore)}, ranks)
        if found:
            self._report(found, f"the ranks are not set up alike: {described(found)}; {_REMEDY_FOR_SETUP}")

    def compare(
        self,
        replicas: Replicas,
        optimizers: Sequence[Optimizer],
        others: Mapping[str, str],
        ranks: Ranks,
        *,
        when: str,
    ) -> None:
        """Compare what is being trained, and whatever else there is. Collective: every rank must call it.

        Args:
            replicas: the model.
            optimizers: its optimisers.
            others: texts by name, of which nothing can be replaced.
            ranks: all ranks.
            when: ``"after step 100"``, for the message.

        Raises:
            DivergenceError: it differs, and this is not to be warned of, or nothing can be done about it.
        """
        state = replicas.state(optimizers)
        more = {name: text for name, text in others.items() if not is_ignored(name, self.ignore)}
        found = differences({**more, **texts_of(state)}, ranks)
        if not found:
            self._last_equal = when
            self._warned.clear()
            return
        since = f", and did not {self._last_equal}" if self._last_equal else ""
        text = f"the ranks differ {when}{since}: {described(found)}"
        if self._on_divergence != "broadcast":
            self._report(found, f"{text}; {_REMEDY}")
            return
        _refuse_irreparable(found, state, text)
        _repair(found, state, ranks)
        replicas.remember_buffers()
        self._last_equal = when
        self._warn(f"{text}; what rank 0 has took its place on the other ranks, and training goes on")

    def _report(self, found: Sequence[Difference], text: str) -> None:
        if self._on_divergence != "warn":
            raise _error(found, text)
        finding = {(each.name, each.outliers) for each in found}
        if not finding <= self._warned:
            self._warn(text)
        self._warned = finding


def _error(found: Iterable[Difference], text: str) -> DivergenceError:
    ranks = sorted({rank for each in found for rank in each.outliers})
    return DivergenceError(text, ranks=tuple(ranks), names=tuple(each.name for each in found))


def _refuse_irreparable(found: Sequence[Difference], state: State, text: str) -> None:
    """Decided from what all ranks know, and so by all alike."""
    irreparable = [each.name for each in found if not _can_be_replaced(each, state)]
    if irreparable:
        raise _error(
            found,
            f"{text}; on_divergence='broadcast' replaces tensors that have one dtype and shape on all ranks, and "
            f"options of optimisers: it cannot make {' or '.join(irreparable[:_NAMED])} the same",
        )


def _can_be_replaced(difference: Difference, state: State) -> bool:
    if None in difference.texts or difference.name not in state:
        return False
    forms = {text.partition(DIGEST)[:2] for text in difference.texts if text is not None}
    return len(forms) == 1 or all(separator == "" for _, separator in forms)


@torch.no_grad()
def _repair(found: Sequence[Difference], state: State, ranks: Ranks) -> None:
    """Give every rank what rank 0 has. Collective: every rank must call it."""
    entries = [state[each.name] for each in found]
    tensors = [each.value for each in entries if isinstance(each.value, Tensor)]
    numbers = [each for each in entries if not isinstance(each.value, Tensor)]
    for entry, value in zip(numbers, ranks.from_rank_zero([each.value for each in numbers]), strict=True):
        entry.holder[entry.key] = value
    for tensor in tensors:
        own = bytes_of(tensor).cpu()
        data = own if ranks.rank == 0 else torch.empty_like(own)
        ranks.broadcast(data)
        if ranks.rank != 0:
            tensor.copy_(data.view(tensor.dtype).view(tensor.shape))


def _one_of(value: Any, choices: tuple[str, ...], name: str) -> Any:
    if value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))} (got {value!r})")
    return value


def _patterns(ignore: Any) -> tuple[str, ...]:
    if isinstance(ignore, str) or not all(isinstance(pattern, str) for pattern in ignore):
        raise OptionError(f"ignore must be a list of patterns such as ['data_dir', 'encoder.*'] (got {ignore!r})")
    return tuple(ignore)
