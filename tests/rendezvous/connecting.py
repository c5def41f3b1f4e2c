"""Connect ranks without Lightning, also to servers of other programs."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ddp_ext.rendezvous import contact
from lightning_ddp_ext.rendezvous.endpoint import Endpoint, FileEndpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.init_method import File, Tcp
from lightning_ddp_ext.rendezvous.process_context import join
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.world import World
from tests.harness.ranks import Outcome, RankProcesses, announce, free_port, hold, message_of

# Where ranks on one host find each other.
Place = Tcp | File
Answer = Callable[[socket.socket], None]
LONG = 60.0  # an init_timeout that cannot be what ends a test
# What one process passes to ``request``. An entry ``hold_before`` is instead the name of
# a function of ``torch.distributed``: the process holds at "in front" before each call.
Settings = Mapping[str, Any]


def place(kind: str, directory: Path) -> Place:
    """Return an unused place of a kind, ``tcp`` or ``file``; the file is empty."""
    if kind == "tcp":
        return Tcp("127.0.0.1", free_port())
    path = directory / "store"
    path.touch()  # as ``tempfile.mkstemp`` makes it
    return File(str(path))


def request(
    rank: int,
    world_size: int,
    where: Place,
    *,
    init_timeout: float = 20.0,
    init_method: str | None = None,
    **fields: Any,
) -> Request:
    """Return the request of a Trainer on CPU; ``fields`` are those of ``Request``."""
    world = World(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node_rank=0,
        source="tests",
    )
    return Request(
        world=world,
        make_endpoint=lambda deadline: endpoint_at(where),
        init_method=init_method or str(where),
        timeout=None,
        init_timeout=timedelta(seconds=init_timeout),
        **{"backend": "gloo", "device": torch.device("cpu"), **fields},
    )


def endpoint_at(where: Place) -> Endpoint:
    return TcpEndpoint(where) if isinstance(where, Tcp) else FileEndpoint(where.path)


@contextlib.contextmanager
def server(answer: Answer) -> Iterator[Tcp]:
    """Run another program's server; ``answer`` is called with each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                answer(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield Tcp(*listener.getsockname())
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in (*connections, listener):
            connection.close()


def silent(connection: socket.socket) -> None:
    """Accept, and never send anything."""


def web(connection: socket.socket) -> None:
    """Answer as a web server does."""
    with contextlib.suppress(OSError):
        connection.recv(1 << 16)
        connection.sendall(
            b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        connection.shutdown(socket.SHUT_WR)


def connect(seat: int, seats: int, where: Place, settings: Sequence[Settings]) -> float:
    """Hold at "ready", join, and return the number of ranks in the group.

    By default, a seat is the rank of this number; its settings may name another rank.
    """
    fields = {"rank": seat, "world_size": seats, "where": where, **settings[seat]}
    announce_handshake()
    if "hold_before" in fields:
        hold_before(fields.pop("hold_before"))
    hold("ready")
    join(request(**fields))
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return float(ones)


def announce_handshake() -> None:
    """Announce "listens" on rank 0, and "connected" on a rank that rank 0 has accepted."""
    reach = contact.reach

    def reach_and_announce(*args: Any, **options: Any) -> contact.Contact:
        reached = reach(*args, **options)
        announce("connected")
        return reached

    contact.reach = reach_and_announce
    TcpEndpoint.publish = lambda self, address: announce("listens")


def hold_before(name: str) -> None:
    """Hold at "in front" before each call of this function of ``torch.distributed``."""
    function = getattr(dist, name)

    def hold_and_call(*args: Any, **kwargs: Any) -> Any:
        hold("in front")
        return function(*args, **kwargs)

    setattr(dist, name, hold_and_call)


@contextlib.contextmanager
def started(where: Place, settings: Sequence[Settings], **options: Any) -> Iterator[RankProcesses]:
    """Start a process for each entry of ``settings``; they join at the same time."""
    with RankProcesses(connect, len(settings), where, settings, **options) as ranks:
        ranks.wait_for_all("ready")
        ranks.release(*ranks.pids)
        yield ranks


def outcomes_at(
    where: Place, settings: Sequence[Settings], *, init_timeout: float = 4.0
) -> list[Outcome]:
    """Return the outcomes of processes that join at the same time."""
    with started(where, [{"init_timeout": init_timeout, **fields} for fields in settings]) as ranks:
        return ranks.wait()


def common_message(outcomes: Sequence[Outcome], kind: type[BaseException]) -> str:
    """Return the message of all these ranks, which must be the same."""
    (message,) = {message_of(outcome, kind) for outcome in outcomes}
    return message
