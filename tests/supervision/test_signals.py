"""Handlers for signals that pass on, and give back, what was there."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from lightning_ddp_ext.supervision.signals import StopSignals, status_of


@pytest.fixture
def heard() -> SimpleQueue[int]:
    return SimpleQueue()


@pytest.fixture
def signals(heard: SimpleQueue[int]) -> Iterator[StopSignals]:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    signals = StopSignals(heard.put)
    yield signals
    signals.restore()
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_signal_is_heard_of_and_noted(signals: StopSignals, heard: SimpleQueue[int]) -> None:
    """In a thread and in the main one; others are nobody's business."""
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signals.install(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.get(timeout=10) == signal.SIGTERM
    assert signals.noted == signal.SIGTERM
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_the_handler_that_was_there_is_called_and_put_back(signals: StopSignals) -> None:
    """Unless somebody has put another one there since."""
    called: list[Any] = []
    theirs, another = (lambda number, frame: called.append(number)), (lambda *_: None)
    signal.signal(signal.SIGTERM, theirs)
    signal.signal(signal.SIGUSR1, theirs)
    signals.install(signal.SIGTERM, signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == [signals.noted] == [signal.SIGTERM]
    signal.signal(signal.SIGUSR1, another)
    signals.restore()
    assert signal.getsignal(signal.SIGTERM) is theirs
    assert signal.getsignal(signal.SIGUSR1) is another


def test_whoever_was_woken_by_signals_still_is(signals: StopSignals, heard: SimpleQueue[int]) -> None:
    """An event loop of the user's, say; and afterwards as before."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        assert signal.set_wakeup_fd(writer.fileno()) == -1
        signals.install(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard.get(timeout=10) == signal.SIGTERM
        assert reader.recv(1) == bytes([signal.SIGTERM])
        signals.restore()
        assert signal.set_wakeup_fd(-1) == writer.fileno()


def test_a_second_interrupt_is_one(signals: StopSignals) -> None:
    """The first Ctrl-C asks; the second raises what Ctrl-C raises."""
    signals.install(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.noted == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_forked_child_has_none_of_it(signals: StopSignals, heard: SimpleQueue[int]) -> None:
    """A loader's worker ends by SIGTERM as ever, and its parent hears nothing of that."""
    signals.install(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard.get(timeout=10) == signal.SIGTERM
    assert heard.empty()
    assert signals.noted == signal.SIGTERM


def test_statuses_are_those_of_shells() -> None:
    """128 and the signal's number."""
    assert [status_of(each) for each in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)] == [130, 138, 143]
