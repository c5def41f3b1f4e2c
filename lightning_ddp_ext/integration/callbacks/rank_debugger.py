"""A callback that makes one rank wait for a debugger, with any strategy."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.supervision.debugger import wait_for_debugger

from ..lightning_tree import pl


class RankDebugger(pl.Callback):
    """Has one rank wait for VS Code, PyCharm or another debugger that speaks the Debug Adapter Protocol to attach.

    The rank prints where it waits, before any hook of the module. It needs debugpy: ``pip
    install debugpy``. With ``DDPExtStrategy`` no time limit applies: ``timeout``, named barriers,
    ``heartbeat_timeout`` and ``HangWatchdog`` are off. If a rank exits, all ranks still stop. With another strategy the
    other ranks wait as long as its ``timeout``.

    Args:
        rank: the rank that waits, counted from 0.
        port: where it waits, reachable from its own host only.

    Raises:
        ConfigurationError: in ``fit`` and the like: the rank does not exist, debugpy is missing, or the port is taken.

    Example::

        trainer = L.Trainer(strategy="ddp_ext", devices=2, callbacks=[RankDebugger(rank=1)])
    """

    def __init__(self, rank: int, port: int = 5678) -> None:
        self.rank = rank
        self.port = port

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        debugged_rank(trainer)  # raises if the rank does not exist
        if self.rank == trainer.global_rank:
            wait_for_debugger(self.rank, self.port)  # our strategy has waited already


def debugged_rank(trainer: Any) -> RankDebugger | None:
    """Return the callback that debugs a rank of a Trainer, if it has one; refuse a rank that does not exist."""
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, RankDebugger):
            if not 0 <= callback.rank < trainer.world_size:
                highest = trainer.world_size - 1
                raise ConfigurationError(f"RankDebugger needs a rank from 0 to {highest} (got {callback.rank})")
            return callback
    return None
