"""One rank in a debugger: which one it is, how it waits to be attached to, and that no time limit holds meanwhile."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rendezvous.request import Request

DEBUG_RANK = "DDPX_DEBUG_RANK"
DEBUG_PORT = "DDPX_DEBUG_PORT"

NO_LIMIT = timedelta(days=365)
_PORT = 5678  # that of debugpy's documentation
_HOST = "127.0.0.1"  # whoever reaches the port can run any code
_SILENCE = timedelta(hours=12)  # the kernel accepts hardly more


@dataclass(frozen=True)
class DebuggedRank:
    """The rank that is debugged. Every rank knows it before the ranks find each other.

    Args:
        rank: which one waits for a debugger.
        port: where, on its own host.

    Raises:
        ConfigurationError: one of them is no such number.
    """

    rank: int
    port: int = _PORT

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 0:
            raise ConfigurationError(
                f"the debugged rank must be a whole number from 0 on (got {self.rank!r}); write rank=1"
            )
        if type(self.port) is not int or not 0 < self.port < 1 << 16:
            raise ConfigurationError(
                f"the debugger's port must be from 1 to 65535 (got {self.port!r}); write port={_PORT}"
            )

    def check(self, world_size: int) -> None:
        """Refuse a rank that does not exist.

        Raises:
            ConfigurationError: there are not so many ranks.
        """
        if self.rank >= world_size:
            raise ConfigurationError(
                f"the debugged rank must be one of {world_size}, counted from 0 (got {self.rank}); "
                f"change {DEBUG_RANK} or RankDebugger(rank=)"
            )

    def without_limits(self, request: Request) -> Request:
        """The same request, without limits to the time that ranks wait for each other or that a host is silent.

        Raises:
            ConfigurationError: there is no such rank.
        """
        self.check(request.world.world_size)
        versions = {**request.versions, DEBUG_RANK: str(self.rank)}  # a rank that does not know is named at the start
        timeouts = replace(request.timeouts, heartbeat=_SILENCE.total_seconds())
        return replace(request, timeout=NO_LIMIT, timeouts=timeouts, versions=versions)

    def wait_if_debugged(self, rank: int) -> None:
        """On the debugged rank: wait until a debugger has attached, the first time that this process calls it.

        Raises:
            ConfigurationError: debugpy is not installed, or the port cannot be used.
        """
        if rank == self.rank:
            _wait_for_debugger(rank, self.port)


def read_debugged_rank(environ: Mapping[str, str]) -> DebuggedRank | None:
    """The rank that the environment names, if it does.

    Raises:
        ConfigurationError: a variable is no number.

    >>> read_debugged_rank({"DDPX_DEBUG_RANK": "1"})
    DebuggedRank(rank=1, port=5678)
    """
    if DEBUG_RANK not in environ:
        return None
    return DebuggedRank(_number(DEBUG_RANK, environ[DEBUG_RANK]), debug_port(environ))


def debug_port(environ: Mapping[str, str]) -> int:
    """The port that the environment names, or the usual one.

    Raises:
        ConfigurationError: the variable is no number.
    """
    return _number(DEBUG_PORT, environ.get(DEBUG_PORT, str(_PORT)))


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigurationError(f"{name} must be a whole number (got {text!r}); write {name}=1, say, or unset it")
    return int(text)


@functools.cache
def _wait_for_debugger(rank: int, port: int) -> None:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # else it warns of modules that nobody debugs
    try:
        import debugpy
    except ImportError:
        raise ConfigurationError(
            f"a rank in a debugger needs debugpy, which is not installed; run pip install 'lightning-ddp-ext[debug]', "
            f"or leave {DEBUG_RANK} and RankDebugger out"
        ) from None
    if debugpy.is_client_connected():  # an editor has started the script and follows its processes
        return
    debugpy.configure(subProcess=False)  # workers of loaders need no debugger
    try:
        debugpy.listen((_HOST, port))
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"port {port} cannot be used for the debugger of rank {rank} ({error}); choose another one with "
            f"{DEBUG_PORT} or RankDebugger(port=)"
        ) from error
    sys.stderr.write(
        f"[rank {rank}] waits for a debugger at {_HOST}:{port} (in VS Code: Run and Debug, Python Debugger, Remote "
        f"Attach); the other ranks wait for it without a time limit\n"
    )
    sys.stderr.flush()
    debugpy.wait_for_client()
