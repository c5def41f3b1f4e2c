"""A callback that has one rank wait for a debugger, with any strategy."""

from __future__ import annotations

import os
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.supervision.debugger import DEBUG_RANK, DebuggedRank, debug_port, read_debugged_rank

from ..lightning_tree import pl


class RankDebugger(pl.Callback):
    """Has one rank wait for VS Code, PyCharm or another debugger that speaks the Debug Adapter Protocol to attach.

    The rank prints where it waits, which is before any hook of the module. It needs debugpy: ``pip install
    'lightning-ddp-ext[debug]'``. With ``DDPExtStrategy`` the variable ``DDPX_DEBUG_RANK=1``, set for every rank, does
    the same without a change of the code, and no time limit holds while a rank is debugged: ``timeout`` of
    collectives, named barriers, ``heartbeat_timeout`` and ``HangWatchdog`` are off for the whole run. A rank that ends
    still ends all. With another strategy the others wait as long as its ``timeout``.

    Args:
        rank: the rank that waits, counted from 0.
        port: where it waits, on its own host and reachable from there alone; ``None``: the variable
            ``DDPX_DEBUG_PORT``, or 5678.

    Raises:
        ConfigurationError: an argument cannot work, there is no such rank, debugpy is missing, or the port is taken.

    Example::

        trainer = L.Trainer(strategy="ddp_ext", devices=2, callbacks=[RankDebugger(rank=1)])
    """

    def __init__(self, rank: int, port: int | None = None) -> None:
        self.debugged = DebuggedRank(rank, debug_port(os.environ) if port is None else port)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.debugged.check(trainer.world_size)
        self.debugged.wait_if_debugged(trainer.global_rank)  # our strategy has waited already


def debugged_rank(trainer: Any) -> DebuggedRank | None:
    """The rank of a Trainer that is debugged, by the environment or by a callback, which must name the same one."""
    named = read_debugged_rank(os.environ)
    callbacks = [each.debugged for each in getattr(trainer, "callbacks", ()) if isinstance(each, RankDebugger)]
    ranks = sorted({each.rank for each in (*callbacks, *([named] if named else []))})
    if len(ranks) > 1:
        raise ConfigurationError(
            f"RankDebugger and {DEBUG_RANK} must name one rank (got {', '.join(map(str, ranks))}); leave the others out"
        )
    return callbacks[0] if callbacks else named
