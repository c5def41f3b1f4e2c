"""Who is here: every rank answers before the first collective, and what does not fit is named on all of them.

Each process posts a *claim* on its rank, with a fresh nonce, and beats: it rewrites the claim with a counter. Rank 0
publishes a *table* of claims, a rank acknowledges only a table that holds its own nonce, and rank 0 declares the
table final when all have. What an earlier run left in the store carries other nonces and does not beat, so it can be
neither acknowledged nor taken for a live process. A *verdict* is addressed to a nonce, so a stale one reaches nobody.

A table is decided once, by ``compare_set``: it becomes final, or void because one who had acknowledged it withdraws, to
give up or for the sake of a newer table. So either all ranks go on with one table, or none does.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from torch.distributed import Store

from lightning_ddp_ext.errors import (
    DisagreementError,
    DuplicateRankError,
    MissingRanksError,
    RendezvousError,
)
from lightning_ddp_ext.rendezvous.claims import (
    Claim,
    Table,
    claim_key,
    claim_of,
    difference_between,
    held_this_process,
    holds,
    table_of,
)
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.news import reason_of

_BEAT_EVERY = 0.25
# A beat is due every 0.25 s, but a process may wait for a core: only what has not beaten for so long is stale.
_STALE_AFTER = 1.5
_OBSERVE_FOR = 3 * _BEAT_EVERY
_READ_THE_VERDICT_WITHIN = 2.0
# Seconds after its deadline when a roll call has ended, whatever it found, unless the store is stuck.
ENDS_WITHIN = _OBSERVE_FOR + _READ_THE_VERDICT_WITHIN + 1.0

_FINAL, _VOID = "final", "void"

_ERRORS: dict[str, type[RendezvousError]] = {
    error.__name__: error for error in (MissingRanksError, DuplicateRankError, DisagreementError, RendezvousError)
}


def call_roll(
    store: Store,
    claim: Claim,
    deadline: Deadline,
    *,
    lifeline: tuple[tuple[str, ...], int] = ((), 0),
    is_alive: Callable[[Table], bool] = lambda table: False,
    bad_news: Callable[[], str | None] = lambda: None,
) -> Table:
    """Wait until every rank is here. Collective: every rank must call it.

    Args:
        store: where the ranks meet.
        claim: what this process says of itself.
        deadline: when to give up.
        lifeline: on rank 0, where the others reach it afterwards.
        is_alive: tells whether the run of a final table that this process is not part of still goes on.
        bad_news: asked again and again; a sentence if the launching process knows that a rank cannot come any more.

    Returns:
        The table, the same on all ranks.

    Raises:
        MissingRanksError: some ranks did not come; names them, and the hosts of those that did.
        DuplicateRankError: two processes claim one rank.
        DisagreementError: world sizes, init methods or versions differ.
    """
    caller = _RankZero if claim.rank == 0 else _Answer
    return caller(store, claim, deadline, lifeline, is_alive, bad_news).run()


class _Observed:
    """A claim in the store, and whether its process has been seen to live."""

    def __init__(self, claim: Claim, *, is_new: bool) -> None:
        self.claim = claim
        self._changed = time.monotonic() if is_new else float("-inf")

    def update(self, claim: Claim) -> None:
        if claim != self.claim:
            self.claim = claim
            self._changed = time.monotonic()

    @property
    def is_live(self) -> bool:
        return time.monotonic() - self._changed < _STALE_AFTER


class _Finding(Exception):
    """Why this start cannot succeed.

    Args:
        error: what to raise; ``None`` if ranks are missing.
        tell: nonces of processes that must hear of it, besides all live ones.
        is_known: whether nobody has to be told.
        judge: the nonce of the process from which this one knows.
    """

    def __init__(
        self,
        error: RendezvousError | None,
        *,
        tell: Iterable[str] = (),
        is_known: bool = False,
        judge: str | None = None,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.tell = set(tell)
        self.is_known = is_known
        self.judge = judge


class _Answer:
    """One process's part in the roll call; rank 0's is the subclass below."""

    def __init__(
        self,
        store: Store,
        claim: Claim,
        deadline: Deadline,
        lifeline: tuple[tuple[str, ...], int],
        is_alive: Callable[[Table], bool],
        bad_news: Callable[[], str | None],
    ) -> None:
        self.store = store
        self.claim = claim
        self.deadline = deadline
        self.lifeline = lifeline
        self.is_alive = is_alive
        self.bad_news = bad_news
        self.observed: dict[int, _Observed] = {}
        # Everybody compares itself with rank 0, and rank 0 with everybody.
        self._watched = range(1, claim.world_size) if claim.rank == 0 else range(1)
        self._next_beat = 0.0
        self._looked_at: set[int] = set()
        self._acknowledged: Table | None = None
        self._not_mine: set[str] = set()

    def run(self) -> Table:
        try:
            return self._answer()
        except _Finding as finding:
            if self._withdraw() == _FINAL:
                assert self._acknowledged is not None
                return self._acknowledged
            raise self._condemn(finding) from None
        except RuntimeError:  # the store's: nobody can be told
            raise
        except BaseException as cause:
            self._withdraw()
            self._condemn(_Finding(RendezvousError(f"{self.claim} has given up the roll call: {reason_of(cause)}")))
            raise

    def _answer(self) -> Table:
        self._post_claim()
        for _ in self.deadline.ticks():
            self._obey_verdict()
            self._heed_bad_news()
            self._refuse_rival()
            table = self._progress()
            if table is not None:
                return table
            if self._beat():
                self._observe(self._watched)
                self._compare(self._watched)
        raise _Finding(None)

    # What this process does once a tick.

    def _progress(self) -> Table | None:
        """Acknowledge a table that holds this process; the table once it is final."""
        table = self._published_table()
        if table is None:
            return None
        if not holds(table, self.claim):
            self._check_whether_late(table)
            return None
        if table != self._acknowledged:
            if self._withdraw() == _FINAL:
                self._restore(self._acknowledged)
                return self._acknowledged
            self._acknowledged = table
            self.store.set(f"ack/{table.attempt}/{self.claim.rank}", "1")
        return table if self._read(f"decision/{table.attempt}") == _FINAL else None

    def _beat(self) -> bool:
        """Show that this process lives, if a beat is due."""
        now = time.monotonic()
        if now < self._next_beat:
            return False
        self._next_beat = now + _BEAT_EVERY
        self.claim = replace(self.claim, beat=self.claim.beat + 1)
        self._post_claim()
        return True

    def _obey_verdict(self) -> None:
        verdict = self._read_verdict()
        if verdict is not None:
            raise _Finding(_error_of(verdict), is_known=True, judge=_judge_of(verdict))

    def _heed_bad_news(self) -> None:
        sentence = self.bad_news()
        if sentence is not None:
            raise _Finding(RendezvousError(sentence))

    def _refuse_rival(self) -> None:
        """Whoever stands where this process has written its claim has written later, so it is alive."""
        standing = self._read_claim(self.claim.rank)
        if standing is not None and standing.nonce != self.claim.nonce:
            raise _Finding(_doubled(self.claim, standing), tell=[standing.nonce])

    def _check_whether_late(self, table: Table) -> None:
        if table.attempt in self._not_mine or self._read(f"decision/{table.attempt}") != _FINAL:
            return
        self._not_mine.add(table.attempt)
        if not held_this_process(table, self.claim) and self.is_alive(table):
            raise _Finding(_too_late(self.claim, table), is_known=True)

    def _withdraw(self) -> str | None:
        """What has become of the table that this process has acknowledged; void, unless it is final already."""
        return None if self._acknowledged is None else self._decide(self._acknowledged, _VOID)

    def _decide(self, table: Table, wanted: str) -> str:
        return bytes(self.store.compare_set(f"decision/{table.attempt}", "", wanted)).decode()

    def _restore(self, table: Table | None) -> None:
        # Another process took itself for rank 0 and put its own table there; so it sees that it came late.
        assert table is not None
        self._publish(table)

    # What it knows of the others.

    def _observe(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            claim = self._read_claim(rank)
            if claim is not None and rank in self.observed:
                self.observed[rank].update(claim)
            elif claim is not None:
                # What stands there at the very first look may be left from a killed run.
                self.observed[rank] = _Observed(claim, is_new=rank in self._looked_at)
            self._looked_at.add(rank)

    def _observe_everyone(self) -> None:
        """Look at all claims often enough to see which of them beat; they may be doing the same, so beat meanwhile."""
        for _ in Deadline(_OBSERVE_FOR).ticks(longest=_BEAT_EVERY / 4):
            self._beat()
            sizes = [seen.claim.world_size for seen in self.observed.values() if seen.is_live]
            self._observe(range(max([self.claim.world_size, *sizes])))

    def _compare(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            other = self.observed.get(rank)
            if other is not None and other.is_live:
                difference = difference_between(self.claim, other.claim)
                if difference is not None:
                    raise _Finding(DisagreementError(difference))

    def _live_claims(self) -> list[Claim]:
        others = [seen.claim for seen in self.observed.values() if seen.is_live]
        return sorted(
            [self.claim, *(claim for claim in others if claim.rank != self.claim.rank)], key=lambda claim: claim.rank
        )

    def _missing(self) -> MissingRanksError:
        present = self._live_claims()
        missing = sorted(set(range(self.claim.world_size)) - {claim.rank for claim in present})
        what = f"{_ranks(missing)} of {self.claim.world_size} did not come"
        remedy = "check that every rank is started and can reach it, or raise init_timeout"
        if not missing:
            what, remedy = f"not all of {self.claim.world_size} ranks came", "some came too late: raise init_timeout"
        return MissingRanksError(
            f"{what} within init_timeout {self.deadline.seconds:g} s to {self.claim.init_method}; "
            f"present: {', '.join(map(str, present))}; {remedy}",
            tuple(missing),
        )

    # How all of them learn of an end.

    def _condemn(self, finding: _Finding) -> RendezvousError:
        """Tell every live process why the start fails, unless it is known, and stay until they have read it."""
        error = finding.error
        if error is not None and finding.is_known:
            self._stay_for(finding.judge)
            return error
        try:
            self._observe_everyone()
            error = error or self._missing()
            self._tell(error, {claim.nonce for claim in self._live_claims()} | finding.tell)
        except RuntimeError:  # rank 0 has ended, and its store with it; all there was to say has been said
            error = error or self._missing()
        return error

    def _stay_for(self, judge: str | None) -> None:
        """Nothing: only the rank that may host the store has to stay until a verdict has reached everybody."""

    def _tell(self, error: RendezvousError, nonces: set[str]) -> None:
        unread = nonces - {self.claim.nonce}
        verdict = json.dumps([type(error).__name__, str(error), list(getattr(error, "missing", ())), self.claim.nonce])
        for nonce in unread:
            self.store.set(f"verdict/{nonce}", verdict)
        for _ in Deadline(_READ_THE_VERDICT_WITHIN).ticks():
            self._read_verdict()  # who has found out the same waits for this process as well
            unread = {nonce for nonce in unread if not self._has(f"read/{nonce}")}
            if not unread:
                break
        self.store.set(f"told/{self.claim.nonce}", "1")
        mine = self._read_verdict()
        self._stay_for(None if mine is None else _judge_of(mine))

    # The store.

    def _post_claim(self) -> None:
        self.store.set(claim_key(self.claim.rank), json.dumps(asdict(self.claim)))

    def _read_claim(self, rank: int) -> Claim | None:
        value = self._read(claim_key(rank))
        return None if value is None else claim_of(json.loads(value))

    def _publish(self, table: Table) -> None:
        self.store.set("table", json.dumps(asdict(table)))

    def _published_table(self) -> Table | None:
        value = self._read("table")
        return None if value is None else table_of(json.loads(value))

    def _read_verdict(self) -> str | None:
        verdict = self._read(f"verdict/{self.claim.nonce}")
        if verdict is not None:
            self.store.set(f"read/{self.claim.nonce}", "1")
        return verdict

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def _read(self, key: str) -> str | None:
        return bytes(self.store.get(key)).decode() if self._has(key) else None


class _RankZero(_Answer):
    """Rank 0's part: it publishes tables and declares one final."""

    _proposal: Table | None = None

    def _progress(self) -> Table | None:
        self._look_for_other_run()
        if self._proposal is None:
            self._propose()
        if self._proposal is None or not self._all_acknowledged(self._proposal):
            return None
        if self._decide(self._proposal, _FINAL) == _FINAL:
            return self._proposal
        self._proposal = None  # somebody has withdrawn, and will say why
        return None

    def _stay_for(self, judge: str | None) -> None:
        for _ in Deadline(_READ_THE_VERDICT_WITHIN).ticks():
            if judge is None or self._has(f"told/{judge}"):
                return

    def _look_for_other_run(self) -> None:
        table = self._published_table()
        if table is not None and table != self._proposal:
            self._check_whether_late(table)

    def _propose(self) -> None:
        self._observe(rank for rank in range(self.claim.world_size) if rank not in self.observed)
        if len(self.observed) < self.claim.world_size:
            return
        claims = tuple(
            self.claim if rank == self.claim.rank else self.observed[rank].claim
            for rank in range(self.claim.world_size)
        )
        if any(difference_between(self.claim, claim) for claim in claims):
            return  # the next beat tells whether that process lives and so is to be refused
        self._proposal = Table(secrets.token_hex(8), claims, self.lifeline)
        self._publish(self._proposal)

    def _all_acknowledged(self, table: Table) -> bool:
        keys = [f"ack/{table.attempt}/{rank}" for rank in self._watched]
        return not keys or bool(self.store.check(keys))

    def _observe(self, ranks: Iterable[int]) -> None:
        super()._observe(ranks)
        if self._proposal is not None and any(
            self.observed[rank].claim.nonce != self._proposal[rank].nonce for rank in self._watched
        ):
            self._proposal = None  # it held a claim of an earlier run; the live process has come since


def _error_of(verdict: str) -> RendezvousError:
    name, message, missing, _ = json.loads(verdict)
    error = _ERRORS.get(name, RendezvousError)
    return MissingRanksError(message, tuple(missing)) if error is MissingRanksError else error(message)


def _judge_of(verdict: str) -> str:
    return str(json.loads(verdict)[3])


def _doubled(mine: Claim, standing: Claim) -> DuplicateRankError:
    first, second = sorted([mine, standing], key=lambda claim: (claim.host, claim.pid))
    return DuplicateRankError(
        f"two processes claim rank {mine.rank}: pid {first.pid} on host {first.host} and pid {second.pid} on host "
        f"{second.host}; give each process its own RANK, or rank="
    )


def _too_late(claim: Claim, table: Table) -> RendezvousError:
    size = len(table.claims)
    if claim.rank >= size:
        return DisagreementError(
            f"this process wants to be rank {claim.rank} of {claim.world_size}, but a run of {size} ranks is going on "
            f"at {claim.init_method} (rank 0: {table[0]}); end that run, or choose another init_method for this one"
        )
    return DuplicateRankError(
        f"rank {claim.rank} is held by pid {table[claim.rank].pid} on host {table[claim.rank].host}, in a run that is "
        f"going on at {claim.init_method}; this process (pid {claim.pid} on host {claim.host}) came late: end that "
        "run, or choose another init_method or rank for this one"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
