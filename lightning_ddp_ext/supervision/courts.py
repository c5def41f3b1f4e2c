"""How the ranks report to the one that says which of them is stuck, while any of them may be unable to.

==================  ==================================================================================================
``LifelineCourt``   over the lifelines, with rank 0 as the judge; where rank 0 does not answer, the others go to the
                    store, and if that does not answer, either, each of them judges by itself
``StoreCourt``      over a store, for ranks without lifelines; who comes first is the judge
``LoneCourt``       for a process of which nothing is known but itself
==================  ==================================================================================================
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Protocol, TypeVar

import psutil
from torch.distributed import PrefixStore, Store
from typing_extensions import override

from lightning_ddp_ext.at_exit import end_at_once
from lightning_ddp_ext.rendezvous.deadline import answer_within
from lightning_ddp_ext.rendezvous.peer_event import PeerEvent
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.wire import Message
from lightning_ddp_ext.supervision.stopped import stopped_process
from lightning_ddp_ext.supervision.verdict import Case, Report, Silence, Verdict, Who

T = TypeVar("T")

# Seconds that a rank has to answer: its threads may have to wait for the GIL.
_ANSWERS_WITHIN = 5.0
# Seconds from one look into the store to the next, where nothing else tells that another rank is stuck.
_LOOKS_EVERY = 5.0
# Seconds that the store has: its host may be the one that is stopped.
_STORE_WITHIN = 2.0
_TICK = 0.05

Witness = Callable[[], Report]


class Court(Protocol):
    """Where a rank says that it is stuck, and hears that others are. All but ``wake`` is called by one thread."""

    def open(self, witness: Witness) -> None:
        """Be there for other ranks; ``witness`` says what this one has to report."""

    def sit(self, seconds: float) -> Case | Verdict | None:
        """Answer other ranks for ``seconds`` or less; a case, if this rank has to judge, or another one's verdict."""

    def call(self) -> Case | Verdict | None:
        """Say that this rank is stuck; the rest as in :meth:`sit`."""

    def conclude(self, verdict: Verdict | None) -> None:
        """As the judge, end all ranks, or have all go on."""

    def obey(self, verdict: Verdict) -> None:
        """End this rank, because of another one's verdict."""

    def wake(self) -> None:
        """Have :meth:`sit` return at once; for any thread."""

    def close(self, witness: Witness) -> None:
        """This rank has left what is watched; ``witness`` tells that to whoever asks from now on."""


class LifelineCourt(Court):
    """The court of ranks that have lifelines; one for the process.

    Args:
        context: this process among the ranks.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._rank = context.world.rank
        self._infos = context.table.ranks
        self._whos = [Who(info.rank, info.host, info.pid) for info in self._infos]
        self._store = StoreCourt(PrefixStore("watchdog", context.store), self._rank, self._whos)
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._witness: Witness | None = None
        self._is_open = False
        self._is_in_store = False
        context.listen("watchdog", self._hear)

    @override
    def open(self, witness: Witness) -> None:
        self._witness, self._is_open = witness, True

    @override
    def close(self, witness: Witness) -> None:
        self._witness, self._is_open = witness, False

    @override
    def wake(self) -> None:
        self._messages.put({})

    def _send(self, message: Message) -> None:
        self._context.send("watchdog", message)

    def _hear(self, message: Message) -> None:
        """Called by the lifelines' thread."""
        if self._is_open:
            self._messages.put(message)
        elif self._witness is not None and ("stuck" in message or "question" in message):
            threading.Thread(target=self._say_where, name="ddpx-watchdog-answer", daemon=True).start()

    def _say_where(self) -> None:
        """This rank judges nobody any more, and where it is may be all that the others need to know."""
        self._send({"report": asdict(self._testify())})

    @override
    def sit(self, seconds: float) -> Case | Verdict | None:
        message = self._next(seconds)
        return None if message is None else self._answer(message)

    @override
    def call(self) -> Case | Verdict | None:
        self._is_in_store = False
        if self._context.peers.cause is not None:
            return None  # the ranks are ending already
        if self._rank == 0:
            return self._hold()
        self._send({"stuck": self._rank})
        deadline = time.monotonic() + _ANSWERS_WITHIN
        while (message := self._next(deadline - time.monotonic())) is not None:
            if "question" in message:
                return self._answer(message)
            if "report" in message:  # rank 0's own, which has left
                return self._call_store(Case([self._testify(), Report.of(message["report"])]))
        return self._call_store(Case([self._testify()], [self._silence(0)]))

    def _call_store(self, case: Case) -> Case | Verdict | None:
        self._is_in_store = True
        return self._store.call_without_rank_zero(case)

    def _testify(self) -> Report:
        assert self._witness is not None
        return self._witness()

    def _answer(self, message: Message) -> Case | None:
        if "stuck" in message:
            return self._hold()
        if "question" in message:
            self._send({"report": asdict(self._testify())})
        return None

    def _hold(self) -> Case | None:
        """On rank 0: hear all ranks; no case if they have come to an end without it, while this process was stopped."""
        mine = self._testify()
        reports = {0: mine}
        missing = {who.rank for who in self._whos if not self._context.peers.has_ended(who.rank)} - {0}
        self._send({"question": "where are you?"})
        deadline = time.monotonic() + _ANSWERS_WITHIN
        while missing and (message := self._next(deadline - time.monotonic())) is not None:
            if "report" in message:
                report = Report.of(message["report"])
                reports[report.who.rank] = report
                missing.discard(report.who.rank)
        if self._context.peers.cause is not None:
            return None
        return Case(list(reports.values()), [self._silence(rank) for rank in sorted(missing)])

    def _next(self, seconds: float) -> Message | None:
        with suppress(queue.Empty):
            return self._messages.get(timeout=max(0.0, seconds))
        return None

    def _silence(self, rank: int) -> Silence:
        return Silence(self._whos[rank], _ANSWERS_WITHIN, self._stopped(rank) is not None)

    def _stopped(self, rank: int) -> psutil.Process | None:
        return stopped_process(self._infos[rank], seen_from=self._infos[self._rank])

    @override
    def conclude(self, verdict: Verdict | None) -> None:
        if self._is_in_store:
            self._store.publish(verdict)
        if verdict is not None:
            self.obey(verdict)
            for rank in range(len(self._whos)):
                process = self._stopped(rank)
                if process is not None:
                    with suppress(psutil.Error):
                        process.send_signal(signal.SIGCONT)  # it finds the news, and ends as the others do

    @override
    def obey(self, verdict: Verdict) -> None:
        who = verdict.who
        self._context.peers.report(PeerEvent("hung", who.rank, who.host, who.pid, verdict.sentence))


class LoneCourt(Court):
    """The court of a process that knows of no other."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._witness: Witness | None = None
        self._woken = threading.Event()

    @override
    def open(self, witness: Witness) -> None:
        self._witness = witness
        self._woken.clear()

    @override
    def close(self, witness: Witness) -> None:
        """Nobody asks."""

    @override
    def wake(self) -> None:
        self._woken.set()

    @override
    def sit(self, seconds: float) -> Case | Verdict | None:
        self._woken.wait(seconds)
        return None

    @override
    def call(self) -> Case | Verdict | None:
        return self._own_case()

    def _own_case(self) -> Case:
        assert self._witness is not None
        return Case([self._witness()])

    @override
    def conclude(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            self.obey(verdict)

    @override
    def obey(self, verdict: Verdict) -> None:
        _end_process(self._rank, verdict)


class StoreCourt(LoneCourt):
    """The court of ranks that have nothing but a store in common.

    A case is a *round*: whoever is stuck begins the next one, and all who hear of it leave their reports.

    Args:
        store: for this alone; each use of it may block, so each is made by a thread that nobody has to wait for.
        rank: of this process.
        whos: the ranks.
    """

    def __init__(self, store: Store, rank: int, whos: list[Who]) -> None:
        super().__init__(rank)
        self._shared = store
        self._whos = whos
        self._round = 0
        self._is_lost = False

    @override
    def open(self, witness: Witness) -> None:
        super().open(witness)
        self._round = _bounded(self._latest_round) or 0  # of an earlier Trainer's

    @override
    def sit(self, seconds: float) -> Case | Verdict | None:
        if not self._woken.wait(min(seconds, _LOOKS_EVERY)) and _bounded(self._is_called):
            return self.call()
        return None

    @override
    def call(self) -> Case | Verdict | None:
        return self._call(self._own_case(), {who.rank for who in self._whos}, _ANSWERS_WITHIN + _LOOKS_EVERY)

    def call_without_rank_zero(self, known: Case) -> Case | Verdict | None:
        """The same for ranks that rank 0 does not lead, and of which some may not be stuck yet."""
        others = {who.rank for who in self._whos} - {0}
        case = self._call(known, others, _ANSWERS_WITHIN)
        return Case(case.reports, known.silences) if isinstance(case, Case) else case

    def _call(self, known: Case, ranks: set[int], within: float) -> Case | Verdict | None:
        is_judge = _bounded(lambda: self._join_round(known.reports[0]))
        self._is_lost = is_judge is None
        if is_judge is None:
            return known
        if not is_judge:
            return _bounded(lambda: self._await_verdict(within + _ANSWERS_WITHIN), within + _ANSWERS_WITHIN)
        reports = {report.who.rank: report for report in known.reports}
        _bounded(lambda: self._collect(reports, ranks, within), within)
        missing = sorted(ranks - reports.keys())
        return Case(list(reports.values()), [Silence(self._whos[rank], within) for rank in missing])

    def _is_called(self) -> bool:
        return self._latest_round() > self._round

    def _latest_round(self) -> int:
        return int(self._shared.get("round")) if self._shared.check(["round"]) else 0

    def _join_round(self, mine: Report) -> bool:
        """Leave a report; whether this rank is the one to judge."""
        expected = str(self._round) if self._round else ""
        self._round = int(self._shared.compare_set("round", expected, str(self._round + 1)))
        self._shared.set(f"{self._round}/{self._rank}", json.dumps(asdict(mine)))
        judge = self._shared.compare_set(f"{self._round}/judge", "", str(self._rank))
        return int(judge) == self._rank

    def _collect(self, reports: dict[int, Report], ranks: Iterable[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for rank in sorted(set(ranks) - reports.keys()):
            key = f"{self._round}/{rank}"
            if _is_there(self._shared, key, deadline - time.monotonic()):
                reports[rank] = Report.of(json.loads(self._shared.get(key)))

    def _await_verdict(self, seconds: float) -> Verdict | None:
        key = f"{self._round}/verdict"
        if not _is_there(self._shared, key, seconds):
            return None
        found = json.loads(self._shared.get(key))
        return None if found is None else Verdict(Who(**found["who"]), found["sentence"])

    def publish(self, verdict: Verdict | None) -> None:
        """Tell those who wait for it."""
        text = json.dumps(verdict and asdict(verdict))
        if not self._is_lost:
            _bounded(lambda: self._shared.set(f"{self._round}/verdict", text))

    @override
    def conclude(self, verdict: Verdict | None) -> None:
        self.publish(verdict)
        if verdict is not None:
            _bounded(self._let_others_go, _ANSWERS_WITHIN)
            _end_process(self._rank, verdict)

    def _let_others_go(self) -> None:
        """The store may end with this process, and the verdict with it."""
        deadline = time.monotonic() + _ANSWERS_WITHIN
        while self._shared.add(f"{self._round}/obeyed", 0) < len(self._whos) - 1 and time.monotonic() < deadline:
            time.sleep(_TICK)

    @override
    def obey(self, verdict: Verdict) -> None:
        _bounded(lambda: self._shared.add(f"{self._round}/obeyed", 1))
        _end_process(self._rank, verdict)


def this_process(rank: int) -> Who:
    """This process, as a rank of that number."""
    return Who(rank, socket.gethostname(), os.getpid())


def _is_there(store: Store, key: str, seconds: float) -> bool:
    """Whether a key is there within ``seconds``, without the noise that ``Store.wait`` makes at its timeout."""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_TICK)
    return True


def _bounded(question: Callable[[], T], seconds: float = 0.0) -> T | None:
    """The answer to a question that takes ``seconds``; ``None`` if it fails, or the store holds it up."""
    return answer_within(seconds + _STORE_WITHIN, question)


def _end_process(rank: int, verdict: Verdict) -> None:
    """Nothing wakes the main thread, and there are no lifelines by which the others would be told."""
    sys.stderr.write(f"[rank {rank}] RankHungError: {verdict.sentence}; every rank stops\n")
    sys.stderr.flush()
    end_at_once(1)
