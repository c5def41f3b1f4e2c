"""Stop this rank with the process that started it, or report that process's exit.

=============================  =========================================================
A rank                         stops with that process, because it calls
=============================  =========================================================
that a script started          :func:`stop_with_script` at the import
that runs a function           :func:`stop_with_multiprocessing` before the function
of torchrun or Open MPI        :func:`stop_with_parent` when it connects
=============================  =========================================================

Other launchers stop their ranks themselves.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from lightning_ddp_ext.threads import start_thread

# The variable with the process id of the script that started this rank.
LAUNCHER_PID = "DDPX_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # from prctl.h


def stop_with_script() -> None:
    """Stop with the script that started this one; do nothing in other processes."""
    if os.environ.get(LAUNCHER_PID) == str(os.getppid()):
        stop_with_parent()


def stop_with_multiprocessing() -> None:
    """Stop with the process that started this one with ``multiprocessing``."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None  # multiprocessing has started this process
    stop_with_parent()
    if launcher.pid != os.getppid():  # a fork server is the parent, or the launcher has exited
        start_thread("ddpx-launcher", _stop_after, launcher)


def stop_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent exits.

    The kernel does so when one thread of the parent exits: the thread that started this
    process. So do nothing unless that is the parent's main thread. Kernels that do not
    list a thread's children cannot show this, so there, too, this does nothing.
    """
    parent = os.getppid()
    with suppress(OSError):  # the parent may be outside of this container, or hidden
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if str(os.getpid()) in children:
            # This fails for an invalid signal only.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has exited meanwhile
        os.kill(os.getpid(), signal.SIGTERM)


def _stop_after(launcher: BaseProcess) -> None:
    """Wait until the launcher exits, then stop this process as the kernel would."""
    launcher.join()
    os.kill(os.getpid(), signal.SIGTERM)


def launcher_exit() -> str | None:
    """Describe the exit of the script that started this rank, if it has exited."""
    pid = os.environ.get(LAUNCHER_PID)
    if pid is None or Path(f"/proc/{pid}").exists():
        return None
    return f"the process that started this rank (pid {pid}) exited before all ranks had connected"
