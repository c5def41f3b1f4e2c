"""Make a rank wait for a debugger, and extend the time limits of the other ranks."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from datetime import timedelta

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rendezvous.request import Request

NO_LIMIT = timedelta(days=365)
_HOST = "127.0.0.1"  # local, since any client of the port can run code


def without_limits(request: Request) -> Request:
    """Return the request with time limits too long to apply in practice, for a run in which a rank is debugged."""
    heartbeat = 12 * 3600.0  # close to the kernel's maximum
    timeouts = replace(request.timeouts, heartbeat=heartbeat, deadlock=NO_LIMIT.total_seconds())
    return replace(request, timeout=NO_LIMIT, timeouts=timeouts)


@functools.cache
def wait_for_debugger(rank: int, port: int) -> None:
    """Wait until a debugger has attached to this rank, unless one is connected; a second call does nothing.

    Raises:
        ConfigurationError: debugpy is not installed, or the port cannot be used.
    """
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # prevents warnings about Python's own modules
    try:
        import debugpy
    except ImportError:
        raise ConfigurationError("RankDebugger needs debugpy (not installed); run pip install debugpy") from None
    if debugpy.is_client_connected():  # an editor started the script and is debugging its processes
        return
    debugpy.configure(subProcess=False)  # loader workers need no debugger
    try:
        debugpy.listen((_HOST, port))
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(f"rank {rank} cannot listen on port {port}: {error}; pass another port=") from error
    print(f"[rank {rank}] waiting for a debugger at {_HOST}:{port}, without a time limit", file=sys.stderr, flush=True)
    debugpy.wait_for_client()
