"""Which rank the others wait for in vain: torch says no more than that a collective has timed out.

A rank that has waited for too long asks rank 0, and rank 0 asks all. One that does not answer is to blame, or else, if
it was a collective, one that is in code of its own. As that may be on its way here from the same collective, rank 0
asks it once more before it says so. Threads ask and answer, whatever the main threads do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from lightning_ddp_ext.rendezvous.peer_event import PeerEvent
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.wire import Message
from lightning_ddp_ext.supervision.places import place_of
from lightning_ddp_ext.supervision.stacks import main_frame, may_be_waiting_for_ranks
from lightning_ddp_ext.supervision.stopped import stopped_process

# Seconds that a rank has to answer: its threads may have to wait for the GIL.
_ANSWERS_WITHIN = 5.0
# Seconds from the end of a collective on one rank to its end on another, and from there to the question.
_FOLLOWS_WITHIN = 1.0

_REMEDY = "let every rank make the same calls, or give the strategy a longer timeout if one of them takes so long"


@dataclass(frozen=True)
class Answer:
    """Where a rank is."""

    rank: int
    waits: bool
    """Whether its main thread waits for other ranks, as far as can be told."""
    place: str
    """File and line of the user's."""


class Inquiry:
    """This rank's part in finding out. All ranks must have made theirs before one of them asks.

    Args:
        context: this process among the ranks.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._table = context.table
        self._rank = context.world.rank
        self._changed = context.peers.arrived
        self._has_come_out = False  # of its collective, which was in vain
        self._state: Literal["not begun", "under way", "over"] = "over"
        self._only_silence = True
        self._answers: dict[int, Answer] = {}
        context.listen("inquiry", self._hear)

    # In the main thread; takes some seconds.

    def why_in_vain(self) -> PeerEvent | None:
        """Why a collective has timed out here, as all ranks are told; ``None`` if nobody seems to be to blame."""
        self._has_come_out = True
        return self._ask(f"rank {self._rank} has waited in a collective for its timeout of {self._timeout}")

    def why_closed(self, news_within: float) -> PeerEvent | None:
        """The same where another rank has closed its connection: it may have done so because it has timed out.

        Args:
            news_within: seconds in which other reasons become known.
        """
        self._has_come_out = True
        event = self._context.peers.wait(news_within)
        return event or self._ask(f"the connections of rank {self._rank} were closed in a collective")

    def check_that_all_answer(self) -> None:
        """Be patient with a rank that takes long over something, but not with one of which nothing is heard.

        Raises:
            RankHungError: a rank does not answer.
            RankFailedError: another of its kinds; there is other news of a rank.
        """
        event = self._ask(f"rank {self._rank} has waited for {self._timeout}", only_silence=True)
        if event is not None:
            raise event.to_error()

    def _ask(self, wait: str, *, only_silence: bool = False) -> PeerEvent | None:
        if self._rank == 0:
            self._begin(wait, only_silence)
        else:
            with self._changed:
                self._state = "not begun" if self._state == "over" else self._state
            self._context.send("inquiry", {"wait": wait, "only_silence": only_silence})
        self._await(lambda: self._state != "not begun", _ANSWERS_WITHIN)
        self._await(lambda: self._state == "over", 3 * _ANSWERS_WITHIN)
        if self._state != "over" and self._context.peers.cause_or_departure is None:
            self._context.peers.report(self._silence([0], wait))
        return self._context.peers.cause_or_departure

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for so long until it is so, or there is news, which says more."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._context.peers.cause_or_departure, seconds)

    def _hear(self, message: Message) -> None:
        """Called by the lifelines' thread."""
        if "wait" in message:
            self._begin(message["wait"], message["only_silence"])
        elif "question" in message:
            self._set_state("under way")
            self._context.send("inquiry", {"answer": asdict(self._testify())})
        elif "answer" in message:
            self._take(Answer(**message["answer"]))
        elif "over" in message:
            self._set_state("over")

    def _set_state(self, state: Literal["under way", "over"]) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _testify(self) -> Answer:
        frame = main_frame()
        return Answer(self._rank, self._has_come_out or may_be_waiting_for_ranks(frame), place_of(frame))

    # On rank 0.

    def _begin(self, wait: str, only_silence: bool) -> None:
        with self._changed:
            is_first = self._state == "over"
            self._only_silence = only_silence and (is_first or self._only_silence)
            self._set_state("under way")
        if is_first:
            threading.Thread(target=self._hold, args=[wait], name="ddpx-inquiry", daemon=True).start()

    def _hold(self, wait: str) -> None:
        """Ask all, tell all."""
        silent, elsewhere = self._ask_all()
        if elsewhere and not silent and not self._only_silence:
            self._context.peers.wait(_FOLLOWS_WITHIN)
            silent, elsewhere = self._ask_all()
        if self._context.peers.cause_or_departure is None:  # else that is why
            if silent:
                self._context.peers.report(self._silence(silent, wait))
            elif elsewhere and not self._only_silence:
                self._context.peers.report(self._absence(elsewhere, wait))
        self._set_state("over")  # before the others, who may ask again
        self._context.send("inquiry", {"over": True})

    def _ask_all(self) -> tuple[list[int], list[Answer]]:
        """The ranks that do not answer, and those that wait for nobody."""
        everyone = [info.rank for info in self._table.ranks if not self._context.peers.has_ended(info.rank)]
        with self._changed:
            self._answers = {0: self._testify()}
            self._context.send("inquiry", {"question": "where are you?"})
            self._await(lambda: self._answers.keys() >= set(everyone), _ANSWERS_WITHIN)
            answers = self._answers.copy()
        silent = [rank for rank in everyone if rank not in answers]
        return silent, [answers[rank] for rank in everyone if rank in answers and not answers[rank].waits]

    def _take(self, answer: Answer) -> None:
        with self._changed:
            self._answers[answer.rank] = answer
            self._changed.notify_all()

    # What is said.

    def _silence(self, silent: list[int], wait: str) -> PeerEvent:
        who, mine = self._table[silent[0]], self._table[self._rank]
        others = "".join(f", {self._table[rank]}" for rank in silent[1:])
        is_stopped = stopped_process(who, seen_from=mine) is not None
        stopped = " and its process is stopped (SIGSTOP)" if is_stopped else ""
        sentence = f"{who}{others} has not answered for {_ANSWERS_WITHIN:g} s{stopped}; {wait}"
        return PeerEvent("hung", who.rank, who.host, who.pid, sentence)

    def _absence(self, elsewhere: list[Answer], wait: str) -> PeerEvent:
        who = self._table[elsewhere[0].rank]
        where = " and ".join(f"{self._table[each.rank]} is in {each.place or 'no call of yours'}" for each in elsewhere)
        return PeerEvent("absent", who.rank, who.host, who.pid, f"{wait}, and {where}; {_REMEDY}")

    @property
    def _timeout(self) -> str:
        return f"{self._context.collective_timeout.total_seconds():g} s"
