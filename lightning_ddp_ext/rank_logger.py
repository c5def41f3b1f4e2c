"""Log on some ranks only."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, MutableMapping
from typing import Any, Literal

import torch.distributed as dist
from typing_extensions import override

from lightning_ddp_ext.arguments import integer
from lightning_ddp_ext.world import read_rank

RankSelection = Literal["all"] | int | Iterable[int]


def rank_logger(name: str, ranks: RankSelection = "all") -> RankLogger:
    """Return a logger whose lines appear on these ranks only.

    The rank is looked up for each line: in the default process group, otherwise in the
    launcher's variables. A process without either counts as rank 0. While the rank is
    unknown, as on a second node, only loggers for ``"all"`` log.

    Args:
        name: the name of the ``logging.Logger`` that logs the lines, with its level,
            handlers and filters.
        ranks: ``"all"``, one rank, or several ranks.

    Raises:
        ConfigurationError: ``ranks`` is something else, or contains a negative number.

    >>> log = rank_logger(__name__, ranks=0)
    >>> log.isEnabledFor(logging.WARNING)
    True
    >>> rank_logger(__name__, ranks=[1, 3]).isEnabledFor(logging.WARNING)
    False
    """
    return RankLogger(logging.getLogger(name), ranks)


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger for some ranks only; ``extra=`` and ``stacklevel=`` work as usual."""

    def __init__(self, logger: logging.Logger, ranks: RankSelection = "all") -> None:
        super().__init__(logger, {})
        self._ranks = _selected(ranks)

    @override
    def isEnabledFor(self, level: int) -> bool:
        return self.logger.isEnabledFor(level) and (
            self._ranks is None or _current_rank() in self._ranks
        )

    @override
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs  # the base class would replace the caller's ``extra``


def _current_rank() -> int | None:
    """Return the rank of this process; ``None`` while it is unknown."""
    if dist.is_initialized():
        return dist.get_rank()
    return read_rank(os.environ)


def _selected(ranks: Any) -> frozenset[int] | None:
    """Return the numbers of the selected ranks; ``None`` for all ranks."""
    if isinstance(ranks, str) and ranks == "all":  # an array compares item by item
        return None
    is_one = isinstance(ranks, str) or not isinstance(ranks, Iterable)
    several = [ranks] if is_one else ranks
    remedy = "pass 'all', a rank, or several ranks, counted from 0"
    return frozenset(integer(rank, "a rank in ranks", remedy=remedy) for rank in several)
