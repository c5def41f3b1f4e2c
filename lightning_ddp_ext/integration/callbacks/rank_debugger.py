"""A callback that makes one rank wait for a debugger, with any strategy."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.supervision.debugger import wait_for_debugger

from ..lightning_tree import pl


class RankDebugger(pl.Callback):
    """Makes one rank wait until VS Code, PyCharm or another debugger that speaks the Debug Adapter Protocol attaches.

    The rank prints the address at which a debugger can attach, and waits before the module's ``setup``, unless an
    editor is already connected. This needs debugpy: ``pip install debugpy``. With ``DDPExtStrategy``, ``timeout``, the
    limits of named barriers and ``heartbeat_timeout`` do not apply in practice, and ``HangWatchdog`` is off, but
    ``save_deadline`` still applies. If a rank exits, all ranks still stop. With another strategy, the other ranks wait
    for at most its ``timeout``.

    Args:
        rank: the rank that waits, counted from 0.
        port: the port it listens on, reachable only from its own host.

    Raises:
        ConfigurationError: in a Trainer's run: the rank does not exist, debugpy is missing, or the port is taken.

    Example::

        trainer = L.Trainer(strategy="ddp_ext", devices=2, callbacks=[RankDebugger(rank=1)])
    """

    def __init__(self, rank: int, port: int = 5678) -> None:
        self.rank = rank
        self.port = port

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rank_debugger_of(trainer)  # raises if the rank does not exist
        if self.rank == trainer.global_rank:
            wait_for_debugger(self.rank, self.port)  # returns immediately if our strategy has already waited


def rank_debugger_of(trainer: Any) -> RankDebugger | None:
    """Return the Trainer's ``RankDebugger``, or ``None``; raise if its rank does not exist."""
    for callback in getattr(trainer, "callbacks", ()):
        if isinstance(callback, RankDebugger):
            if not 0 <= callback.rank < trainer.world_size:
                highest = trainer.world_size - 1
                raise ConfigurationError(f"RankDebugger needs a rank from 0 to {highest} (got {callback.rank})")
            return callback
    return None
