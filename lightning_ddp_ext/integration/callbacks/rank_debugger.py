"""A callback that has one rank wait for a debugger, with any strategy."""

from __future__ import annotations

import os
import sys
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.supervision.debugger import wait_for_debugger

from ..lightning_tree import pl


class RankDebugger(pl.Callback):
    """Has one rank wait for VS Code, PyCharm or another debugger that speaks the Debug Adapter Protocol to attach.

    The rank prints where it waits, before any hook of the module. It needs debugpy: ``pip install
    'lightning-ddp-ext[debug]'``. With ``DDPExtStrategy`` the variable ``DDPX_DEBUG_RANK=1``, set for every rank, does
    the same, and no time limit holds: ``timeout``, named barriers, ``heartbeat_timeout`` and ``HangWatchdog`` are off.
    If a rank exits, all ranks still stop. With another strategy the other ranks wait as long as its ``timeout``.

    Args:
        rank: the rank that waits, counted from 0.
        port: where it waits, reachable from its own host only; ``None``: the variable ``DDPX_DEBUG_PORT``, or 5678.

    Raises:
        ConfigurationError: an argument cannot work, the rank does not exist, debugpy is missing, or the port is taken.

    Example::

        trainer = L.Trainer(strategy="ddp_ext", devices=2, callbacks=[RankDebugger(rank=1)])
    """

    def __init__(self, rank: int, port: int | None = None) -> None:
        chosen = os.environ.get("DDPX_DEBUG_PORT", "5678") if port is None else port
        self.rank = _number(rank, "the debugged rank must be a whole number from 0 on", lowest=0)
        self.port = _number(chosen, "the debugger's port must be from 1 to 65535", lowest=1, highest=65535)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        debugged_rank(trainer)  # refuses a rank that does not exist
        if self.rank == trainer.global_rank:
            wait_for_debugger(self.rank, self.port)  # our strategy has waited already


def debugged_rank(trainer: Any) -> RankDebugger | None:
    """Return the callback that debugs a rank of a Trainer, or one for the rank that the environment names."""
    found = [callback for callback in getattr(trainer, "callbacks", ()) if isinstance(callback, RankDebugger)]
    if named := os.environ.get("DDPX_DEBUG_RANK"):
        found.append(RankDebugger(_number(named, "DDPX_DEBUG_RANK must be a whole number from 0 on", lowest=0)))
    ranks = {callback.rank for callback in found}
    if len(ranks) > 1 or any(rank >= trainer.world_size for rank in ranks):
        rule = f"RankDebugger and DDPX_DEBUG_RANK must name one rank below the world size {trainer.world_size}"
        raise ConfigurationError(f"{rule} (got {', '.join(map(str, sorted(ranks)))})")
    return found[0] if found else None


def _number(value: int | str, rule: str, *, lowest: int, highest: int = sys.maxsize) -> int:
    if not str(value).isdecimal() or not lowest <= int(value) <= highest:
        raise ConfigurationError(f"{rule} (got {value!r})")
    return int(value)
