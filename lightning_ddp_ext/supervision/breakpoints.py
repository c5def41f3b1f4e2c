"""``breakpoint()`` on any rank: pdb in the terminal that the ranks share, one of them at a time."""

from __future__ import annotations

import fcntl
import os
import pdb
import sys
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.supervision.call_site import call_site
from lightning_ddp_ext.supervision.debugger import DEBUG_RANK


def install_breakpointhook(rank: int) -> None:
    """Have ``breakpoint()`` on this rank ask for commands in the terminal, unless somebody else has it do something."""
    if sys.breakpointhook is not sys.__breakpointhook__ or "PYTHONBREAKPOINT" in os.environ:
        return
    debugger: _RankPdb | None = None

    def stop(*args: Any, **kwargs: Any) -> None:
        nonlocal debugger
        terminal = _terminal()
        if terminal is None:
            sys.stderr.write(
                f"[rank {rank}] goes on from breakpoint() at {call_site()}, as it has no terminal; set "
                f"{DEBUG_RANK}={rank} for all ranks to attach a debugger to it\n"
            )
            sys.stderr.flush()
            return
        debugger = debugger or _RankPdb(rank, terminal)
        debugger.set_trace(sys._getframe(1))

    sys.breakpointhook = stop


def restore_breakpointhook() -> None:
    """Have ``breakpoint()`` do what it does in any process."""
    if getattr(sys.breakpointhook, "__module__", "") == __name__:
        sys.breakpointhook = sys.__breakpointhook__


class _RankPdb(pdb.Pdb):
    """Asks for commands in the terminal while no other rank does."""

    def __init__(self, rank: int, terminal: str) -> None:
        super().__init__(nosigint=True)  # Ctrl-C stays with the strategy, which stops all ranks
        self.use_rawinput = False  # but the streams below
        self.prompt = f"(Pdb of rank {rank}) "
        self._terminal = terminal

    @override
    def interaction(self, *args: Any, **kwargs: Any) -> None:
        with open(self._terminal) as self.stdin, open(self._terminal, "w") as self.stdout:
            fcntl.flock(self.stdin, fcntl.LOCK_EX)
            super().interaction(*args, **kwargs)


def _terminal() -> str | None:
    """The terminal of the script: children that multiprocessing has started have it, too, behind ``sys.stdin``."""
    for descriptor in (0, 1, 2):
        if os.isatty(descriptor):
            return os.ttyname(descriptor)
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return None
    return "/dev/tty"
