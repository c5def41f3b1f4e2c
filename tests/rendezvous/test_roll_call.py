"""The roll call ends with one table for all ranks, or with one reason for all of them.

Threads stand for processes here, and a dictionary for the store, so that every order of events can be had.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest

from lightning_ddp_ext.errors import (
    DDPExtError,
    DisagreementError,
    DuplicateRankError,
    MissingRanksError,
    RendezvousError,
)
from lightning_ddp_ext.rendezvous import roll_call
from lightning_ddp_ext.rendezvous.claims import Claim, Table
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.roll_call import call_roll

LIFELINE = (("10.0.0.1",), 4711)
LONG = 20.0


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beat faster than in life, so that less time passes until somebody is known to be dead."""
    for name, seconds in {"_BEAT_EVERY": 0.1, "_STALE_AFTER": 1.0, "_OBSERVE_FOR": 0.3}.items():
        monkeypatch.setattr(roll_call, name, seconds)


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


class Memory:
    """A store in memory. ``before`` is called with each operation's name and key, and may raise."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._lock:
            return self.values[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        with self._lock:
            if self.values.get(key, b"").decode() == expected:
                self.values[key] = wanted.encode()
            return self.values[key]


class Seen:
    """A process's own way to the store: ``before`` hears of each operation, and may raise, or do something itself."""

    def __init__(self, store: Memory, before: Callable[[str, str], None]) -> None:
        self._store = store
        self._before = before

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        method = getattr(self._store, operation)

        def call(key: Any, *args: Any) -> Any:
            self._before(operation, key if isinstance(key, str) else key[0])
            return method(key, *args)

        return call


class Process(threading.Thread):
    """A process that answers the roll call; ``table`` or ``error`` is what it ends with, neither if it was killed."""

    def __init__(self, store: Any, claim: Claim, seconds: float = LONG, **options: Any) -> None:
        super().__init__(daemon=True, name=str(claim))
        self.claim = claim
        self.table: Table | None = None
        self.error: DDPExtError | None = None
        self._ask = lambda: call_roll(store, claim, Deadline(seconds), **{"lifeline": LIFELINE, **options})
        self.start()

    def run(self) -> None:
        try:
            self.table = self._ask()
        except DDPExtError as error:
            self.error = error
        except Killed:
            pass

    @property
    def sentence(self) -> str:
        assert self.error is not None
        return str(self.error)


def claim(rank: int, world_size: int, pid: int | None = None, **changes: Any) -> Claim:
    """A claim of a process on a host of its own."""
    defaults: dict[str, Any] = {"device": "cpu", "init_method": "file:///shared/run", "versions": {"torch": "2.13.0"}}
    pid = 1000 + rank if pid is None else pid
    return Claim(rank, world_size, **{**defaults, **changes}, host=f"node{rank}", pid=pid, network=f"net{rank}")


def finish(processes: Sequence[Process], seconds: float = LONG) -> Sequence[Process]:
    """Wait for the end of all of them."""
    deadline = Deadline(seconds)
    for process in processes:
        process.join(deadline.remaining)
    assert not [process.name for process in processes if process.is_alive()]
    return processes


def answer_all(claims: Iterable[Claim], store: Memory | None = None, **options: Any) -> Sequence[Process]:
    """Let processes with these claims answer at once, and wait for their ends."""
    shared = store or Memory()
    return finish([Process(shared, one, **options) for one in claims])


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    for _ in Deadline(LONG).ticks():
        if condition():
            return
    raise AssertionError("waited in vain")


def only(values: Iterable[Any]) -> Any:
    """The one value that all of them are."""
    first, *others = values
    assert all(other == first for other in others), [first, *others]
    return first


# Everyone comes.


@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_everyone_gets_the_same_table(world_size: int) -> None:
    """The table holds every rank's claim in their order, with where rank 0 listens, and is one for all."""
    claims = [claim(rank, world_size) for rank in range(world_size)]
    processes = answer_all(claims)
    table = only(process.table for process in processes)
    assert [held.nonce for held in table.claims] == [one.nonce for one in claims]
    assert table.lifeline == LIFELINE


@pytest.mark.parametrize("last", [0, 1, 3])
def test_the_order_of_arrival_does_not_matter(last: int) -> None:
    """Whoever comes last, be it rank 0, completes the table."""
    store = Memory()
    early = [Process(store, claim(rank, 4)) for rank in range(4) if rank != last]
    wait_until(lambda: all(store.check([f"claim/{rank}"]) for rank in range(4) if rank != last))
    late = Process(store, claim(last, 4))
    assert isinstance(only(process.table for process in finish([*early, late])), Table)


def test_ranks_with_one_network_are_on_one_host() -> None:
    """A loopback connection joins all ranks only if each of them names the same network."""
    claims = [claim(rank, 2) for rank in range(2)]
    assert not Table("attempt", tuple(claims), LIFELINE).on_one_host
    assert Table("attempt", tuple(replace(one, network="net") for one in claims), LIFELINE).on_one_host


def test_a_second_roll_call_in_the_same_store_makes_a_new_table() -> None:
    """Processes that form a new group answer again, and are not taken for latecomers to their own first one."""
    store = Memory()
    first = only(process.table for process in answer_all([claim(rank, 2) for rank in range(2)], store))
    alive = {"is_alive": lambda table: True}
    second = only(process.table for process in answer_all([claim(rank, 2) for rank in range(2)], store, **alive))
    assert first.attempt != second.attempt


# What earlier runs left.


def killed_run(store: Memory, world_size: int, at: int) -> None:
    """Leave in the store what a run leaves whose processes are all killed at their ``at``-th operation."""

    def dies() -> Callable[[str, str], None]:
        count = Counter[str]()

        def before(operation: str, key: str) -> None:
            count["operations"] += 1
            if count["operations"] > at:
                raise Killed

        return before

    finish([Process(Seen(store, dies()), claim(rank, world_size, pid=2000 + rank)) for rank in range(world_size)])


@pytest.mark.parametrize("left_by", [2, 3])
def test_what_a_killed_run_left_does_not_break_the_next_one(left_by: int) -> None:
    """A run starts in a store that a killed one has left at any point, also one with another number of ranks."""
    stores = [Memory() for _ in range(30)]
    for at, store in enumerate(stores):
        killed_run(store, left_by, at)
    claims = [claim(rank, 2) for rank in range(2)]
    processes = [Process(store, one) for store in stores for one in claims]
    held = {process.table.claims[1].nonce for process in finish(processes) if process.table}
    assert held == {claims[1].nonce}
    assert all(process.table for process in processes)


def test_a_claim_of_another_version_of_this_package_is_readable() -> None:
    """Fields that this version does not know are passed over, and what is no claim at all is no claim."""
    store = Memory()
    store.set("claim/0", json.dumps({"rank": 0, "elsewhere": True}))
    newer = {**asdict(claim(1, 2)), "colour": "blue"}
    store.set("claim/1", json.dumps(newer))
    store.set("table", json.dumps({"attempt": "old", "claims": [newer, {"rank": 1}], "lifeline": [["h"], 1]}))
    assert isinstance(only(process.table for process in answer_all([claim(0, 2), claim(1, 2)], store)), Table)


# Somebody is missing.


@pytest.mark.parametrize("missing", [(0,), (1,), (3,), (1, 2), (0, 3)])
def test_missing_ranks_are_named_with_those_who_are_present(missing: tuple[int, ...]) -> None:
    """Each present rank names the same missing ones, the present ones with host and pid, and the remedy."""
    present = [rank for rank in range(4) if rank not in missing]
    processes = answer_all([claim(rank, 4) for rank in present], seconds=0.5)
    sentence = only(process.sentence for process in processes)
    named = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    here = ", ".join(f"rank {rank} (host node{rank}, pid {1000 + rank})" for rank in present)
    assert sentence.startswith(f"{named} of 4 did not come within init_timeout 0.5 s to file:///shared/run; present: ")
    assert f"present: {here}; check that every rank is started" in sentence
    for process in processes:
        assert isinstance(process.error, MissingRanksError)
        assert process.error.missing == missing


def test_a_rank_with_more_patience_hears_of_those_who_gave_up() -> None:
    """The first rank whose time is over ends the start for all, and each says the same."""
    store = Memory()
    patient = Process(store, claim(0, 3))
    hasty = Process(store, claim(1, 3), 0.5)
    assert "rank 2 of 3 did not come" in only(process.sentence for process in finish([patient, hasty]))


def test_a_rank_that_comes_just_too_late_is_not_called_missing() -> None:
    """Where all are here at the end, the message says that some came too late, and names nobody as missing."""
    store = Memory()

    def arrives(operation: str, key: str) -> None:
        if key == "claim/1" and deadline_is_over():
            late.append(Process(store, claim(1, 2), 3.0)) if not late else None

    late: list[Process] = []
    moment = time.monotonic() + 0.3

    def deadline_is_over() -> bool:
        return time.monotonic() > moment

    first = Process(Seen(store, arrives), claim(0, 2), 0.3)
    finish([first])
    finish(late)
    assert first.sentence.startswith("not all of 2 ranks came within init_timeout 0.3 s")
    assert "some came too late: raise init_timeout" in first.sentence
    assert only(process.sentence for process in late) == first.sentence


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_the_middle_is_missing_whenever_it_happens(rank: int) -> None:
    """Killed before any of its operations, a rank is named by the other one, unless both had a table already."""

    def killer(at: int) -> Callable[[str, str], None]:
        count = Counter[str]()

        def before(operation: str, key: str) -> None:
            count["operations"] += 1
            if count["operations"] >= at:
                raise Killed

        return before

    survivors = []
    for at in range(1, 25):
        store = Memory()
        Process(Seen(store, killer(at)), claim(rank, 2), 1.0)
        survivors.append(Process(store, claim(1 - rank, 2), 1.0))
    finish(survivors)
    named = [process for process in survivors if process.error is not None]
    assert len(named) > 5
    for process in named:
        assert process.sentence.startswith(f"rank {rank} of 2 did not come")
    assert all(process.table for process in survivors if process not in named)


def test_the_launcher_knows_sooner_that_a_rank_cannot_come() -> None:
    """Bad news from the launching process ends the roll call at once, for every rank."""
    store = Memory()
    news: list[str] = []
    first = Process(store, claim(0, 3), bad_news=lambda: news[0] if news else None)
    second = Process(store, claim(1, 3))
    wait_until(lambda: store.check(["claim/0", "claim/1"]))
    news.append("local rank 2 (host node2, pid 77) ended with status 1")
    assert only(process.sentence for process in finish([first, second])) == news[0]


def test_a_store_that_ends_with_rank_0_does_not_hide_the_reason() -> None:
    """A rank that has found out why the start fails says so, although the store is gone before it has told all."""

    def gone(operation: str, key: str) -> None:
        if time.monotonic() > moment:
            raise RuntimeError("Connection reset by peer")

    moment = time.monotonic() + 0.8
    (process,) = finish([Process(Seen(Memory(), gone), claim(1, 3), 0.5)])
    assert process.sentence.startswith("ranks 0, 2 of 3 did not come")


def test_rank_0_stays_until_a_verdict_has_reached_everybody() -> None:
    """The store may end with rank 0, so it does not leave before the rank that found the reason has told all others."""
    store = Memory()
    may_read = threading.Event()

    def is_slow(operation: str, key: str) -> None:
        if key.startswith("verdict/") and store.check([key]):
            may_read.wait(LONG)

    first = Process(store, claim(0, 4))
    third = Process(Seen(store, is_slow), claim(2, 4))
    wait_until(lambda: store.check(["claim/2"]))
    second = Process(store, claim(1, 4), bad_news=lambda: "rank 3 has ended" if store.check(["claim/0"]) else None)
    wait_until(lambda: store.check([f"read/{first.claim.nonce}"]))
    first.join(0.2)
    assert first.is_alive()
    may_read.set()
    assert only(process.sentence for process in finish([first, second, third])) == "rank 3 has ended"


# Somebody is there twice.


def spread(count: int, claims: Sequence[Claim], **options: Any) -> list[list[Process]]:
    """Many roll calls at once, in each of which these processes come with small delays, another order each time."""
    calls = []
    for number in range(count):
        store = Memory()
        ordered = sorted(claims, key=lambda one: hash((number, one.nonce)))
        calls.append([Process(store, one, **options) for one in ordered])
    for processes in calls:
        finish(processes)
    return calls


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_that_claim_one_rank_never_divide_the_others(rank: int) -> None:
    """Either one of the two is in the table of all the others, and the other is refused, or nobody gets a table."""
    claims = [claim(0, 2), claim(1, 2), claim(rank, 2, pid=99)]
    for processes in spread(25, claims, is_alive=lambda table: True):
        tables = [process.table for process in processes if process.table]
        refused = [process for process in processes if process.error]
        assert len(refused) == (1 if tables else 3)
        assert len({table.attempt for table in tables}) <= 1
        for process in refused:
            assert isinstance(process.error, DuplicateRankError)
            assert f"pid {1000 + rank} on host node{rank}" in process.sentence
            assert f"pid 99 on host node{rank}" in process.sentence


@pytest.mark.parametrize("rank", [0, 1])
def test_both_processes_that_claim_one_rank_are_named_on_every_rank(rank: int) -> None:
    """While the run is still incomplete, every rank learns which two processes claim the same rank."""
    claims = [claim(0, 3), claim(1, 3), claim(rank, 3, pid=99)]
    processes = answer_all(claims)
    assert only(process.sentence for process in processes) == (
        f"two processes claim rank {rank}: pid 99 on host node{rank} and pid {1000 + rank} on host node{rank}; "
        "give each process its own RANK, or rank="
    )


def test_a_rank_that_has_withdrawn_is_in_no_table() -> None:
    """Rank 0 cannot declare a table final that a rank has acknowledged and then given up."""
    store = Memory()

    def rival_appears(operation: str, key: str) -> None:
        if operation == "compare_set" and not rivals:
            rivals.append(Process(store, claim(1, 2, pid=99)))
            wait_until(lambda: b"void" in store.values.values())

    rivals: list[Process] = []
    first = Process(Seen(store, rival_appears), claim(0, 2), 1.0)
    second = Process(store, claim(1, 2))
    finish([first, second])
    finish(rivals)
    assert isinstance(second.error, DuplicateRankError)
    assert first.table is None or (first.table, first.table[1].pid) == (rivals[0].table, 99)


def test_a_second_rank_0_cannot_take_over_a_rank_that_is_settled() -> None:
    """A rank whose table is final stays with it when another rank 0 publishes its own, and puts it back in place."""
    store = Memory()

    def usurped(operation: str, key: str) -> None:
        if key == "table" and "usurped" not in store.values and any("ack/" in key for key in store.values):
            wait_until(lambda: b"final" in store.values.values())
            claims = (claim(0, 2, pid=99), second.claim)
            store.set("usurped", json.dumps(asdict(Table("other attempt", claims, LIFELINE))))
            store.set("table", store.get("usurped").decode())

    first = Process(store, claim(0, 2))
    second = Process(Seen(store, usurped), claim(1, 2))
    table = only(process.table for process in finish([first, second]))
    assert table[0].pid == 1000
    assert json.loads(store.get("table"))["attempt"] == table.attempt


# Somebody wants something else.


@pytest.mark.parametrize(
    ("field", "mine", "theirs", "shown"),
    [
        ("world_size", 3, 2, "world_size must be the same on all ranks: rank 0 (host node0, pid 1000) has 3, rank 1"),
        (
            "init_method",
            "env://",
            "tcp://h:1",
            "init_method must be the same on all ranks: rank 0 (host node0, pid 1000)",
        ),
        ("versions", {"torch": "2.13.0"}, {"torch": "2.12.1"}, "the version of torch must be the same on all ranks"),
        ("versions", {"lightning": "2.6"}, {}, "the version of lightning must be the same on all ranks"),
    ],
)
def test_ranks_that_disagree_are_told_who_wants_what(field: str, mine: Any, theirs: Any, shown: str) -> None:
    """World size, init method and versions must agree; every rank names two that do not, their values, the remedy."""
    claims = [replace(claim(rank, 3), **{field: mine}) for rank in (0, 2)]
    odd = replace(claim(1, 3), **{field: theirs})
    processes = answer_all([*claims, odd])
    sentence = only(process.sentence for process in processes)
    assert sentence.startswith(shown)
    values = [mine, theirs] if field != "versions" else [next(iter(mine.values())), next(iter(theirs.values()), "none")]
    assert f"has {values[0]}, rank 1 (host node1, pid 1001) has {values[1]}; start every rank with" in sentence
    assert all(isinstance(process.error, DisagreementError) for process in processes)


def beat_until_told(store: Memory, one: Claim) -> None:
    """A process that shows that it lives, and does nothing else, until it hears a verdict."""
    while not store.check([f"verdict/{one.nonce}"]):
        one = replace(one, beat=one.beat + 1)
        store.set(f"claim/{one.rank}", json.dumps(asdict(one)))
        time.sleep(0.01)
    store.set(f"read/{one.nonce}", "1")


def test_a_rank_beyond_ones_own_world_is_told_as_well() -> None:
    """A rank that believes in a smaller world than others tells all of them, not only those that it counts."""
    store = Memory()
    others = [threading.Thread(target=beat_until_told, args=[store, claim(rank, 3)]) for rank in (0, 2)]
    for thread in others:
        thread.start()
    (odd,) = answer_all([claim(1, 2)], store)
    assert isinstance(odd.error, DisagreementError)
    for thread in others:
        thread.join()


def test_ranks_may_know_the_host_of_rank_0_by_different_names() -> None:
    """They have met at one port, so ``tcp://`` with another name for the host is the same place."""
    claims = [claim(0, 2, init_method="tcp://localhost:29500"), claim(1, 2, init_method="tcp://10.0.0.1:29500")]
    assert isinstance(only(process.table for process in answer_all(claims)), Table)


# Somebody comes late.


@pytest.mark.parametrize("rank", [0, 1])
def test_a_latecomer_is_told_who_holds_its_rank(rank: int) -> None:
    """A process that claims a rank of a run that is complete reads who holds it, and what to do."""
    store = Memory()
    table = only(process.table for process in answer_all([claim(0, 2), claim(1, 2)], store))
    (late,) = answer_all([claim(rank, 2, pid=99)], store, is_alive=lambda seen: seen.attempt == table.attempt)
    assert isinstance(late.error, DuplicateRankError)
    assert late.sentence == (
        f"rank {rank} is held by pid {1000 + rank} on host node{rank}, in a run that is going on at "
        f"file:///shared/run; this process (pid 99 on host node{rank}) came late: end that run, or choose another "
        "init_method or rank for this one"
    )


def test_a_latecomer_beyond_the_world_is_told_of_the_run_that_is_going_on() -> None:
    """A rank that the complete run does not have reads how many it has, and where its rank 0 is."""
    store = Memory()
    answer_all([claim(0, 2), claim(1, 2)], store)
    (late,) = answer_all([claim(2, 3)], store, is_alive=lambda table: True)
    assert isinstance(late.error, DisagreementError)
    assert "wants to be rank 2 of 3, but a run of 2 ranks is going on" in late.sentence
    assert "rank 0 (host node0, pid 1000)" in late.sentence


def test_a_complete_run_that_is_over_holds_no_ranks() -> None:
    """Where nobody answers for the final table, its leftovers are passed over."""
    store = Memory()
    answer_all([claim(0, 2), claim(1, 2)], store)
    processes = answer_all([claim(0, 2, pid=5), claim(1, 2, pid=6)], store, is_alive=lambda table: False)
    assert [held.pid for held in only(process.table for process in processes).claims] == [5, 6]


def test_an_unknown_kind_of_verdict_is_still_an_error_of_the_rendezvous() -> None:
    """A verdict whose name this version does not know is raised with its message."""
    store = Memory()
    mine = claim(1, 2)
    store.set(f"verdict/{mine.nonce}", json.dumps(["NewerError", "the moon is in the wrong house", [], "its judge"]))
    (process,) = answer_all([mine], store)
    assert type(process.error) is RendezvousError
    assert process.sentence == "the moon is in the wrong house"
