"""Handlers for signals that give back what was there; what they do in a run is in ``tests.integration``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from lightning_ddp_ext.supervision.signals import StopSignals


@pytest.fixture
def heard() -> SimpleQueue[int]:
    return SimpleQueue()


@pytest.fixture
def signals(heard: SimpleQueue[int]) -> Iterator[StopSignals]:
    signals = StopSignals(heard.put)
    yield signals
    signals.restore()


def test_a_forked_child_has_none_of_it(signals: StopSignals, heard: SimpleQueue[int]) -> None:
    """A loader's worker ends by SIGTERM as ever, and its parent hears nothing of that."""
    signals.install(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.get(timeout=10) == signal.SIGTERM
    assert heard.empty()
