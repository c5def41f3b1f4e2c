"""Call functions of other ranks over the control channel.

Rank 0 calls them on any rank, every other rank only on rank 0. Barriers, stops and
surveys use these calls. A call never waits; the caller may wait for replies.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection
from typing import Any

from lightning_ddp_ext.rendezvous.peers import Peers
from lightning_ddp_ext.rendezvous.wire import Message


class Replies(dict[int, Any]):
    """The results of a call that have arrived so far, by rank.

    A result of ``None`` is not sent. This is a class because a plain ``dict`` cannot be
    referenced weakly.
    """


class RemoteCalls:
    """The functions of one topic that ranks call on each other.

    They run one at a time, on the channel's thread, or on the caller's thread if a rank
    calls itself. They hold ``peers.arrived``, which is notified afterwards, and must
    not wait. Arguments and results are JSON.

    Args:
        peers: the other ranks.
        topic: the topic of the messages, the same on all ranks.
        functions: the functions, by name.
    """

    def __init__(self, peers: Peers, topic: str, **functions: Callable[..., Any]) -> None:
        self._peers = peers
        self._topic = topic
        self._functions = functions
        self._numbers = itertools.count(1)
        # Replies are dropped once the caller has dropped the object that collects them.
        self._awaited: weakref.WeakValueDictionary[int, Replies] = weakref.WeakValueDictionary()
        peers.channel.on_message(topic, self._handle_message)

    def call(self, ranks: Collection[int], function: str, *arguments: Any) -> Replies:
        """Call a function on ``ranks``, and return the replies, which arrive later.

        On ranks other than 0, ``ranks`` must be ``[0]``.
        """
        replies = Replies()
        number = next(self._numbers)
        self._awaited[number] = replies
        message = {"call": function, "arguments": arguments, "number": number}
        self._peers.channel.send(self._topic, message, ranks)
        if self._peers.rank in ranks:
            self._add_reply(replies, self._peers.rank, self._call(function, arguments))
        return replies

    def _handle_message(self, message: Message) -> None:
        sender = message["from"]
        number = message["number"]
        if "call" not in message:
            self._add_reply(self._awaited.get(number), sender, message["result"])
            return
        result = self._call(message["call"], message["arguments"])
        if result is not None:
            self._peers.channel.send(self._topic, {"result": result, "number": number}, [sender])

    def _call(self, function: str, arguments: Collection[Any]) -> Any:
        with self._peers.arrived:
            result = self._functions[function](*arguments)
            self._peers.arrived.notify_all()
        return result

    def _add_reply(self, replies: Replies | None, rank: int, result: Any) -> None:
        with self._peers.arrived:
            if replies is not None and result is not None:
                replies[rank] = result
            self._peers.arrived.notify_all()
