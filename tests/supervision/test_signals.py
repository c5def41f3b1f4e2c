"""Handlers for signals in a forked child; what they do in a run is in ``tests.integration``."""

from __future__ import annotations

import os
import signal
from queue import SimpleQueue

from lightning_ddp_ext.supervision.signals import StopSignals


def test_a_forked_child_has_none_of_it() -> None:
    """A loader's worker ends by SIGTERM as ever, and its parent hears nothing of that."""
    heard: SimpleQueue[int] = SimpleQueue()
    signals = StopSignals(heard.put)
    signals.install(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.get(timeout=10) == signal.SIGTERM
    assert heard.empty()
    signals.restore()
