"""A callback that has one rank wait for a debugger, with any strategy."""

from __future__ import annotations

import os
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.errors import OptionError
from lightning_ddp_ext.supervision.debugger import DEBUG_RANK, DebuggedRank, read_debugged_rank

from ..lightning_tree import Callback, LightningModule, Trainer


class RankDebugger(Callback):
    """Has one rank wait for VS Code, PyCharm or another debugger that speaks the Debug Adapter Protocol to attach.

    The rank prints where it waits, which is before any hook of the module. It needs debugpy: ``pip install
    'lightning-ddp-ext[debug]'``. The variable ``DDPX_DEBUG_RANK=1``, set for every rank, does the same without a
    change of the code, and ``DDPX_DEBUG_PORT`` names another port.

    With ``DDPExtStrategy`` no time limit holds while a rank is debugged: ``timeout`` of collectives, named barriers,
    ``heartbeat_timeout`` and ``HangWatchdog`` are off for the whole run. A rank that ends still ends all. With another
    strategy the others wait as long as its ``timeout``.

    Args:
        rank: the rank that waits, counted from 0.
        port: where it waits, on its own host and reachable from there alone.

    Raises:
        OptionError: an argument cannot work, debugpy is missing, or the port is taken.

    Example::

        trainer = L.Trainer(strategy="ddp_ext", devices=2, callbacks=[RankDebugger(rank=1)])
    """

    def __init__(self, rank: int, port: int = 5678) -> None:
        self.debugged = DebuggedRank(rank, port)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.debugged.wait_on(trainer.global_rank)  # our strategy has waited already


def debugged_rank(trainer: Any) -> DebuggedRank | None:
    """The rank of a Trainer that is debugged, by the environment or by a callback; ``None``: no rank is.

    Raises:
        OptionError: the two name different ranks, or one of them is no rank.
    """
    named = read_debugged_rank(os.environ)
    callbacks = [each for each in getattr(trainer, "callbacks", ()) if isinstance(each, RankDebugger)]
    for callback in callbacks:
        if named is not None and named.rank != callback.debugged.rank:
            raise OptionError(
                f"{DEBUG_RANK}={named.rank} contradicts RankDebugger(rank={callback.debugged.rank}); "
                "leave one of them out"
            )
    return callbacks[0].debugged if callbacks else named
