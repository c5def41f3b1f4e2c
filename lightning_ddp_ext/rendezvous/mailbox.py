"""Messages of other ranks, for whoever listens to their subject."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_ddp_ext.rendezvous.line import Message

Listener = Callable[[Message], None]


class Mailbox:
    """Passes messages on by subject, in their order; those that come before anybody listens are kept.

    Args:
        lock: is not held while a listener is called, unless for what has been kept.

    >>> mailbox = Mailbox(threading.Condition())
    >>> mailbox.put("weather", {"sun": True})
    >>> mailbox.listen("weather", print)
    {'sun': True}
    """

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._listeners: dict[str, Listener] = {}
        self._kept: dict[str, list[Message]] = {}

    def put(self, subject: str, message: Message) -> None:
        """A message has arrived."""
        with self._lock:
            listener = self._listeners.get(subject)
            if listener is None:
                self._kept.setdefault(subject, []).append(message)
        if listener is not None:
            listener(message)

    def listen(self, subject: str, listener: Listener) -> None:
        """From now on the listener gets what comes, and at once what has been kept."""
        with self._lock:
            self._listeners[subject] = listener
            for message in self._kept.pop(subject, []):
                listener(message)

    def close(self) -> None:
        """Nobody listens any more."""
        self._listeners.clear()
