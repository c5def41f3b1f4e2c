"""Exit soon after the process that started this rank exits."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from contextlib import suppress
from functools import partial

from lightning_ddp_ext.forced_exit import count_down
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.rank_variables import (
    LAUNCHER_PID,
    PRIVATE_FILE,
    drop_inherited_variables,
    set_rank_variables,
)
from lightning_ddp_ext.threads import start_thread

# Seconds until the exit, also after a save; longer than after a rank's death, since the
# launcher may be a rank.
GRACE = 3.2
_LOOK_EVERY = 0.25  # seconds
_PR_SET_PDEATHSIG = 1  # from prctl.h

_watched: set[int] = set()


def watch_own_launcher() -> None:
    """Exit soon after the process that started this rank exits; called at the import.

    In a program that a rank has started, remove the rank's variables instead. Do
    nothing in other processes.
    """
    launcher = os.environ.pop(LAUNCHER_PID, None)  # meant for this process, not for its children
    if launcher is not None:
        set_rank_variables(os.environ["LOCAL_RANK"])
        watch_launcher(int(launcher))
    else:
        drop_inherited_variables()


def watch_launcher(pid: int) -> None:
    """Exit some seconds after process ``pid`` exits.

    If it is not running, the time counts from this call. A second call for the same
    process does nothing, nor does a call for process 0, which is a parent outside of
    this container, or for process 1, which has adopted this orphan or is the first
    process of a container.
    """
    if pid > 1 and pid not in _watched:
        _watched.add(pid)
        # Undo torch's request for SIGINT at the parent's death: one signal may arrive
        # for each thread, and two prevent a save.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        start_thread("ddpx-launcher", _exit_after, pid)


def _exit_after(pid: int) -> None:
    _wait_for_exit(pid)
    with suppress(KeyError, OSError):  # a killed rank 0 leaves the file behind
        os.unlink(os.environ[PRIVATE_FILE])
    reason = partial(_reason_to_exit, pid)
    # In this thread, since no other may start at interpreter shutdown.
    count_down(GRACE, 1, reason, cancelled=threading.Event(), seconds_after_saves=GRACE)


def _wait_for_exit(pid: int) -> None:
    """Wait until a process exits, even if its parent does not read its exit status."""
    if pid == os.getppid():
        # The kernel gives an orphan another parent. /proc may hide this process's own
        # parent (hidepid), if that belongs to another user.
        while pid == os.getppid():
            time.sleep(_LOOK_EVERY)
        return

    # A fork server is this rank's parent, or the launcher exited before this call.
    import psutil  # importing it takes 6 ms, and few ranks need it

    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        while launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_LOOK_EVERY)


def _reason_to_exit(pid: int) -> str:
    sentence = f"the launcher of this process (pid {pid}) exited, so this process exits"
    context = current()
    if context is None:
        return sentence
    event = context.peers.cause_or_departure
    if event is not None:  # a rank that failed or died, before the launcher did
        error = event.to_error()
        sentence = f"{type(error).__name__}: {error}"
    return f"[rank {context.world.rank}] {sentence}"
