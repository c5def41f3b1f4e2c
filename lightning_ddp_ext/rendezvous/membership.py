"""This process as one of the ranks: its group, its lifelines, and what it hears of the others."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from socket import socket
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lightning_ddp_ext.at_exit import end_at_once, is_end_delayed, wait_for_delays
from lightning_ddp_ext.errors import GroupInUseError, RendezvousError
from lightning_ddp_ext.rank_logger import rank_logger
from lightning_ddp_ext.rendezvous.claims import Table
from lightning_ddp_ext.rendezvous.deadline import Deadline, answer_within
from lightning_ddp_ext.rendezvous.file_store import remove_file, settle_in
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.lifelines import Lifelines
from lightning_ddp_ext.rendezvous.line import Message
from lightning_ddp_ext.rendezvous.mailbox import Listener, Mailbox
from lightning_ddp_ext.rendezvous.meetings import Meetings
from lightning_ddp_ext.rendezvous.news import News, reason_of
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.rendezvous.sockets import Sockets, interface_of, sockets_opened
from lightning_ddp_ext.rendezvous.store import wait_for

T = TypeVar("T")

_logger = rank_logger(__name__, ranks=0)  # for what is the same on all

# Seconds that the main thread has to raise on its own, before the process is ended from outside. After a failure it
# may be busy, will be told at its next collective, and can then save what it has; but in a group that the user has
# made it could wait for ever.
_EXIT_GRACE = {"died": 3.0, "failed": 30.0, "absent": 30.0, "mismatched": 30.0, "hung": 5.0}
_POST_WITHIN = 2.0
_DEFAULT_TIMEOUT = timedelta(minutes=30)
_DELETE_WITHIN = 2.0

_jobs = 0


@contextmanager
def at_work() -> Iterator[None]:
    """While the block runs this process works with the other ranks, and is ended if it cannot go on after a death.

    Outside, in the user's own code after ``fit``, say, a death is remembered, but nobody is ended because of it.
    """
    global _jobs
    _jobs += 1
    try:
        yield
    finally:
        _jobs -= 1


class Membership:
    """This process as one of the ranks: its store, its lifelines, its process group, and what it hears of the others.

    Args:
        request: what was asked for when the process joined.
        opened: the store, as opened.
        table: who the ranks are.
    """

    def __init__(self, request: Request, opened: OpenedStore, table: Table) -> None:
        self.world = request.world
        self.table = table
        self.opened_store = opened
        self.store: Store = PrefixStore(f"attempt/{table.attempt}", opened.store)
        self._request = request
        self._lifelines: Lifelines | None = None
        self._groups = 0
        self._group: object = None
        self._other_groups: dict[tuple[object, ...], dist.ProcessGroup] = {}
        self._kept: list[object] = []
        self._sockets: list[Sockets] = []
        self._is_forming = False
        self._news: News | None = None
        self._departed: News | None = None
        self.arrived = threading.Condition()
        """Notified whenever there is news; parts use it for what they wait for, too."""
        self._exit_timer: threading.Timer | None = None
        self._has_observed = False
        self._parts: dict[object, Any] = {}
        self._mailbox = Mailbox(self.arrived)
        self.failure: BaseException | None = None
        self.first_cause: News | None = None

    # Forming the group.

    def connect(self, deadline: Deadline, listener: socket | None) -> None:
        """Open the lifelines, then the group."""
        preferred = self._request.where.host if isinstance(self._request.where, Tcp) else None
        self._lifelines = Lifelines(
            self.table,
            self.world.rank,
            self._hear,
            deadline,
            on_message=self._mailbox.put,
            listener=listener,
            preferred=preferred,
        )
        self._lifelines.wait_until_connected(deadline)
        self._form_group(self._request, deadline)

    def accommodate(self, request: Request) -> None:
        """Serve another Trainer with the ranks that are there, or say why that cannot be."""
        self.check(request)
        if request.backend != self._request.backend:
            self._destroy_group()
            self._form_group(request, Deadline(request.init_timeout.total_seconds()))
        elif request.timeout != self._request.timeout:
            for group in (None, *self._other_groups.values()):
                _set_collective_timeout(request.timeout, group)
        self._request = self.as_met(request)

    def as_met(self, request: Request) -> Request:
        """The request of a later Trainer, which may leave open how and where the ranks meet: they have met."""
        return replace(request, init_method=self._request.init_method, where=self._request.where)

    def check(self, request: Request) -> None:
        """Refuse a Trainer that wants other ranks than the ones this process is among.

        Raises:
            GroupInUseError: world size, rank or init method differ.
        """
        mine = self._request
        if (request.world.rank, request.world.world_size) != (self.world.rank, self.world.world_size):
            raise GroupInUseError(
                f"this process is rank {self.world.rank} of {self.world.world_size} already, and this Trainer wants it "
                f"to be rank {request.world.rank} of {request.world.world_size}; give every Trainer of a script the "
                "same devices and num_nodes, or run the other one in a script of its own"
            )
        if request.is_explicit and request.init_method != mine.init_method:
            raise GroupInUseError(
                f"this process's group was formed with init_method {mine.init_method!r}, and this Trainer asks for "
                f"{request.init_method!r}; use one init method in a script"
            )

    @property
    def is_usable(self) -> bool:
        """Whether the group stands and every rank is still in it, as far as this rank knows."""
        return self._news is None and self.failure is None and dist.is_initialized()

    def _form_group(self, request: Request, deadline: Deadline) -> None:
        self._groups += 1
        self._sockets = []
        store = PrefixStore(f"group/{self._groups}", self.store)
        with self._forming(), self._noted_sockets(), self._interface_for_gloo(deadline):
            dist.init_process_group(
                request.backend,
                store=store,
                rank=self.world.rank,
                world_size=self.world.world_size,
                timeout=deadline.as_timedelta(),
                device_id=None if request.device.type == "cpu" else request.device,
            )
            # Whoever lets go of a group last waits for gloo's threads, and they may wait for the GIL. Python's own
            # reference alone gives the GIL up meanwhile, and DDP's does not, so this one must outlive the model's:
            # https://github.com/pytorch/pytorch/issues/56297. Without it 2 of 69 failing runs hung in teardown.
            self._group = dist.group.WORLD
            _check_group(request)
        _set_collective_timeout(request.timeout)

    def side_group(self) -> dist.ProcessGroup:
        """A gloo group of all ranks beside the default one; it ends with that one. Collective, the first time.

        For small collectives on CPU memory that are under way while others are.
        """
        return self.new_group(range(self.world.world_size), backend="gloo", purpose="small collectives")

    def new_group(self, ranks: Sequence[int], *, backend: str | None = None, purpose: str = "") -> dist.ProcessGroup:
        """A group of some ranks; it ends with the default one. Collective over all ranks, the first time.

        Args:
            ranks: those in it; what others get is no group that they could use.
            backend: as in ``torch.distributed.new_group``.
            purpose: the same ranks and purpose get the same group.
        """
        ranks = list(ranks)
        key = (*ranks, backend, purpose)
        if key not in self._other_groups:
            # In a store a rank would wait for one that has failed or is elsewhere, and not every store can be severed.
            self.meetings.meet(f"forming a group{' for ' if purpose else ''}{purpose}")
            deadline = Deadline(self._request.init_timeout.total_seconds())
            with self._forming(), self._noted_sockets(), self._interface_for_gloo(deadline):
                group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=deadline.as_timedelta())
            _set_collective_timeout(self._request.timeout, group)
            self._other_groups[key] = group
        return self._other_groups[key]

    @contextmanager
    def _noted_sockets(self) -> Iterator[None]:
        """The sockets of a group that is formed in the block: they can be severed from now on."""
        with sockets_opened() as sockets:
            self._sockets.append(sockets)
            yield

    def _sever_groups(self) -> None:
        for sockets in self._sockets:
            sockets.sever()

    @contextmanager
    def _forming(self) -> Iterator[None]:
        """While the block runs, news of a rank that is gone ends the waiting for it in the store, too."""
        self._is_forming = True
        try:
            if self._news is not None:
                raise self._news.to_error()
            yield
        finally:
            self._is_forming = False

    @contextmanager
    def _interface_for_gloo(self, deadline: Deadline) -> Iterator[None]:
        """Make gloo use the network that joins the hosts, where it would take the one the host's name stands for."""
        variable = "GLOO_SOCKET_IFNAME"
        interface = None if self.table.on_one_host or variable in os.environ else self._interface_to_others(deadline)
        if interface is None:
            yield
            return
        os.environ[variable] = interface
        try:
            yield
        finally:
            del os.environ[variable]

    def _interface_to_others(self, deadline: Deadline) -> str | None:
        assert self._lifelines is not None
        if self.table[self.world.rank].network != self.table[0].network:
            self.store.set("route", self._lifelines.remote_address or "")
            return interface_of(self._lifelines.local_address or "")
        route = wait_for(self.store, "route", deadline)
        return None if route is None else interface_of(route.decode())

    # What becomes of the ranks.

    @property
    def news(self) -> News | None:
        """The first death or failure that this rank has heard of."""
        return self._news

    @property
    def news_or_departure(self) -> News | None:
        """The same, or else the first rank that has left in good order."""
        return self._news or self._departed

    @property
    def unheard_news(self) -> News | None:
        """The same, if the main thread has not come to know of it."""
        return None if self._has_observed else self._news

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank is known to have ended."""
        return self._lifelines is not None and self.table[rank] in self._lifelines.ended

    def absence(self) -> str | None:
        """A sentence if a rank has ended and so cannot answer another roll call."""
        ended = [] if self._lifelines is None else self._lifelines.ended
        if not ended:
            return None
        return (
            f"{', '.join(map(str, ended))} ended after the ranks had met before, and cannot meet them again; "
            "look at its output, or catch the failure on every rank if all are to go on"
        )

    def await_news(self, seconds: float) -> News | None:
        """The first death or failure, or else a departure, waiting up to ``seconds`` for it to arrive."""
        with self.arrived:
            self.arrived.wait_for(lambda: self.news_or_departure, timeout=seconds)
            return self.news_or_departure

    def announce_failure(self, exception: BaseException, traceback_text: str) -> None:
        """Tell the other ranks why this one cannot go on, and release them. Never raises, never waits for long.

        The first cause that reaches the store is the one that all of them report.
        """
        mine = self.table[self.world.rank]
        news = News("failed", mine.rank, mine.host, mine.pid, reason_of(exception), traceback_text)
        self.failure = exception
        self.first_cause = self._post_cause(news)
        if self.first_cause == news and self._lifelines is not None:
            self._lifelines.tell(news)
        self.close_group()

    @property
    def meetings(self) -> Meetings:
        """Where ranks wait for each other."""
        return self.part(Meetings)

    @property
    def collective_timeout(self) -> timedelta:
        """How long a rank waits for the others."""
        return self._request.timeout or _DEFAULT_TIMEOUT

    def report(self, news: News) -> News:
        """Tell all ranks, this one included, why they cannot go on, unless there is an earlier cause; returns that."""
        first = self._post_cause(news)
        if self._lifelines is not None:
            self._lifelines.tell(first)
        self._hear(first)
        return first

    def part(self, kind: Callable[[Membership], T]) -> T:
        """The one object that ``kind`` makes for this membership; it is let go of when the rank retires."""
        with self.arrived:
            if kind not in self._parts:
                self._parts[kind] = kind(self)
            return cast(T, self._parts[kind])

    # Messages.

    def send(self, subject: str, message: Message) -> None:
        """Send a message to rank 0, or from rank 0 to all others; never blocks for long, never raises."""
        if self._lifelines is not None:
            self._lifelines.send(subject, message)

    def listen(self, subject: str, listener: Listener) -> None:
        """Have messages of a subject passed on by the lifelines' thread; those that came early come now."""
        self._mailbox.listen(subject, listener)

    def close_group(self) -> None:
        """End this rank's part of the group: whoever waits for it in a collective is released."""
        self.observe()
        # Frames of the traceback may keep the group's C++ side alive, so that destroying alone closes nothing.
        self._sever_groups()
        self._destroy_group()

    def observe(self) -> None:
        """The main thread has taken note of the news and raises; the process need not be ended from outside."""
        with self.arrived:
            self._has_observed = True
            self.arrived.notify_all()
            if self._exit_timer is not None:
                self._exit_timer.cancel()

    def _post_cause(self, news: News) -> News:
        """Whose cause was first: asked in a thread, as the store's host may be the one that is gone."""

        def post() -> News:
            first = self.store.compare_set("cause", "", json.dumps(asdict(news)))
            return News(**json.loads(bytes(first)))

        return answer_within(_POST_WITHIN, post) or news

    def _hear(self, news: News) -> None:
        """Called by the lifelines' thread."""
        with self.arrived:
            if news.kind == "left":
                self._departed = self._departed or news
            else:
                self._news = self._news or news
            self.arrived.notify_all()
        if news.kind != "left":
            self._release(news)

    def _release(self, news: News) -> None:
        """Wake the main thread where it waits for the rank that is gone."""
        with self.arrived:
            if self._exit_timer is None and not self._has_observed:
                self._exit_timer = threading.Timer(_EXIT_GRACE[news.kind], self._end_process, [news])
                self._exit_timer.name = "ddpx-exit"
                self._exit_timer.daemon = True
                self._exit_timer.start()
        self._sever_groups()
        if self._is_forming:
            self.opened_store.sockets.sever()
        if "nccl" in self._request.backend and dist.is_initialized():
            _abort_group()

    def _end_process(self, news: News) -> None:
        if _jobs == 0 and not self._is_forming:
            return
        if is_end_delayed():
            self._say(f"{news.to_error()}; this rank finishes the checkpoint that it is writing")
            wait_for_delays()
            with self.arrived:
                if self.arrived.wait_for(lambda: self._has_observed, _EXIT_GRACE[news.kind]):
                    return
        # The main thread is somewhere that nothing can wake it from. No cleaning up: it could block, too.
        self._say(f"{type(news.to_error()).__name__}: {news.to_error()}")
        end_at_once(1)

    def _say(self, sentence: str) -> None:
        sys.stderr.write(f"[rank {self.world.rank}] {sentence}\n")
        sys.stderr.flush()

    # The end.

    def retire(self) -> None:
        """Say goodbye and let go of the lifelines, once the group is closed; in the store the ranks may meet again."""
        self._group = None
        self._kept.clear()
        self._parts.clear()
        self._mailbox.close()
        if self._lifelines is not None:
            self._lifelines.close()
        self.observe()

    def close(self) -> None:
        """Let go of everything, and say goodbye."""
        try:
            self._destroy_group()
        finally:
            self.retire()
        # A process that was killed may have left half a record in a file, at which a store would read for ever.
        if self._news is None or self._news.kind != "died":
            self.opened_store.close(self.store, self.table)
        # With nothing that refers back to it, this object ends here, and its store with it. At the end of a FileStore
        # torch writes to the file: later on that could be another run's.
        self._lifelines = None

    def _destroy_group(self) -> None:
        if not dist.is_initialized():
            return
        # What still refers to the group must go before it and its leftovers with it, or gloo's threads outlive
        # their owner and abort the process at its end: 9 of 50 processes without these two lines.
        gc.collect()
        if self._news is not None and "nccl" in self._request.backend:
            _abort_group()
        else:
            dist.destroy_process_group()
        self._kept.extend(self._other_groups.values())  # as long as the default one, and for the same reason
        self._other_groups.clear()
        gc.collect()


@dataclass
class OpenedStore:
    """A store, and what is needed to end with it."""

    store: Store
    sockets: Sockets
    path: str | None

    @property
    def suspicion(self) -> str:
        """What is likely to be wrong if it stops working, and what to do."""
        if self.path is None:
            return "rank 0 or its host has gone away: look at its output"
        return "a rank was killed while it wrote to the file, or the file system hangs: start all ranks again"

    @property
    def for_roll_call(self) -> Store:
        """Where roll calls are held, one after another."""
        return PrefixStore("roll_call", self.store)

    def settle(self, table: Table) -> None:
        """The ranks are complete; whoever opens the store from now on belongs to another run."""
        if self.path is not None:
            settle_in(self.store, table.attempt)

    def close(self, shared: Store, table: Table) -> None:
        """The last rank to leave deletes the file; a run that was killed leaves it, which does no harm."""
        if self.path is not None:
            with suppress(Exception):
                if shared.add("left", 1) == len(table.claims):
                    remove_file(self.path, table.attempt, Deadline(_DELETE_WITHIN))


def _check_group(request: Request) -> None:
    """One small collective: a group that cannot do that is better found out now than in the first step."""
    ones = torch.ones(1, device=request.device)
    dist.all_reduce(ones)
    if int(ones.item()) != request.world.world_size:
        raise RendezvousError(
            f"the {request.backend} group adds {request.world.world_size} ones to {int(ones.item())}; "
            "check the network between the hosts and the backend's settings"
        )


def _set_collective_timeout(timeout: timedelta | None, group: dist.ProcessGroup | None = None) -> None:
    if not isinstance(group, dist.ProcessGroup | None):  # what stands for a group that this rank is not in
        return
    setter = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    default = getattr(dist.distributed_c10d, "_get_default_timeout", None)
    if setter is None or default is None:
        _logger.warning(
            "torch %s has no _set_pg_timeout: collectives use init_timeout as their timeout; tell us, please",
            torch.__version__,
        )
        return
    setter(timeout or default(dist.get_backend(group)), group)


def _abort_group() -> None:
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    with suppress(Exception):
        (abort or dist.destroy_process_group)()
