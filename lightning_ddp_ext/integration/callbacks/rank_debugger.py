"""A callback that makes one rank wait for a debugger, with any strategy."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.arguments import integer
from lightning_ddp_ext.errors import ConfigurationError

from ..private.lightning_tree import pl

_HOST = "127.0.0.1"  # local, since any client of the port can run code


class RankDebugger(pl.Callback):
    """Makes one rank wait until a debugger attaches.

    Any debugger that speaks the Debug Adapter Protocol works, such as those of VS Code
    and PyCharm. The rank prints the address at which a debugger can attach, and waits
    before the module's ``setup``, unless an editor is already connected. This needs
    debugpy: ``pip install debugpy``. With ``DDPExtStrategy``, ``timeout``, the limits
    of named barriers and ``heartbeat_timeout`` do not apply in practice, but
    ``save_deadline`` still applies. If a rank exits, all ranks still stop. With another
    strategy, the other ranks wait for at most its ``timeout``.

    Args:
        rank: the rank that waits, counted from 0.
        port: the port it listens on, reachable only from its own host.

    Raises:
        ConfigurationError: an argument is not an integer in its bounds; in a Trainer's
            run: the rank does not exist, debugpy is missing, or the port is taken.

    Example::

        trainer = L.Trainer(strategy="ddp_ext", devices=2, callbacks=[RankDebugger(rank=1)])
    """

    def __init__(self, rank: int, port: int = 5678) -> None:
        self.rank = integer(rank, "rank", remedy="pass rank=0 for the first rank")
        self.port = integer(
            port, "port", at_least=1, at_most=65535, remedy="leave it out to use 5678"
        )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        rank_debugger_of(trainer)  # raises if the rank does not exist
        if self.rank == trainer.global_rank:
            _wait_for_debugger(self.rank, self.port)


def rank_debugger_of(trainer: Any) -> RankDebugger | None:
    """Return the Trainer's first ``RankDebugger``, or ``None``.

    Raises:
        ConfigurationError: the rank of one does not exist.
    """
    callbacks = getattr(trainer, "callbacks", ())
    debuggers = [each for each in callbacks if isinstance(each, RankDebugger)]
    for debugger in debuggers:
        if not 0 <= debugger.rank < trainer.world_size:
            last = trainer.world_size - 1
            raise ConfigurationError(
                f"RankDebugger needs a rank from 0 to {last} (got {debugger.rank})"
            )
    return debuggers[0] if debuggers else None


@functools.cache
def _wait_for_debugger(rank: int, port: int) -> None:
    """Wait until a debugger has attached to this rank.

    Do nothing if one is connected, or in a second call.

    Raises:
        ConfigurationError: debugpy is not installed, or the port cannot be used.
    """
    # Prevents warnings about Python's own modules.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    try:
        import debugpy
    except ImportError:
        raise ConfigurationError(
            "RankDebugger needs debugpy (not installed); run pip install debugpy"
        ) from None
    if debugpy.is_client_connected():  # an editor started the script and is debugging its processes
        return
    debugpy.configure(subProcess=False)  # loader workers need no debugger
    try:
        debugpy.listen((_HOST, port))
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"rank {rank} cannot listen on port {port}: {error}; pass another port="
        ) from error
    print(
        f"[rank {rank}] waiting for a debugger at {_HOST}:{port}, without a time limit",
        file=sys.stderr,
        flush=True,
    )
    debugpy.wait_for_client()
