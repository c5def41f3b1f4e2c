"""Where the ranks of a run will meet: known before the first of them is started."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_ddp_ext.errors import StoreError
from lightning_ddp_ext.integration.environment import WorldEnvironment
from lightning_ddp_ext.integration.lightning_tree import ClusterEnvironment, LightningEnvironment
from lightning_ddp_ext.rendezvous.init_method import File, InitMethod, Tcp, check_file
from lightning_ddp_ext.rendezvous.sockets import listen
from lightning_ddp_ext.run_id import RUN_ID_VARIABLE


@dataclass(frozen=True)
class Meeting:
    """Where the ranks that this process starts will meet; made before any of them is started.

    Attributes:
        where: address of the TCP store, or path of the store's file.
        variables: what the started processes need in their environment to find it.
        listener: the bound socket of a TCP store that this node hosts.
        own_file: the store's file, if this process has made up its name, so that no other run will use it.
    """

    where: Tcp | str
    variables: dict[str, str]
    listener: socket.socket | None = None
    own_file: str | None = None

    def remove_leftovers(self) -> None:
        """When all has ended: remove the file that ranks leave which were killed, or did not find each other."""
        if self.own_file is not None:
            Path(self.own_file).unlink(missing_ok=True)


def arrange_meeting(
    method: InitMethod | None, environment: ClusterEnvironment, *, run_id: str | None, num_nodes: int, node_rank: int
) -> Meeting:
    """Bind the port, or name the file, before the processes are started that are to meet there.

    On one node without an address of its own the kernel chooses the port, so it is never guessed, nor lost to
    another job between a probe and its use. A cluster environment that the user wrote has an address of its own.

    Raises:
        InitMethodError: the file cannot be made or seen by all nodes.
        StoreError: the port cannot be bound.
    """
    if isinstance(method, File):
        known = method.run_id or run_id or os.environ.get(RUN_ID_VARIABLE)
        run_id = known or (secrets.token_hex(8) if num_nodes == 1 else None)
        check_file(method, num_nodes=num_nodes)
        path = method.file_for(run_id)
        own_file = path if method.is_directory and not known else None
        return Meeting(path, {RUN_ID_VARIABLE: run_id} if run_id else {}, own_file=own_file)
    if isinstance(method, Tcp):
        where = method
    elif num_nodes > 1 or _says_by_itself("main_address", environment) or _says_by_itself("main_port", environment):
        where = address_from_environment(environment)
    else:
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        return Meeting(Tcp("127.0.0.1", port), {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}, listener)
    variables = {"MASTER_ADDR": where.host, "MASTER_PORT": str(where.port)}
    return Meeting(where, variables, _bind(where) if node_rank == 0 else None)


def address_from_environment(environment: ClusterEnvironment) -> Tcp:
    """The address that ``env://`` stands for.

    Raises:
        StoreError: nobody has said which port; every process would choose another one.
    """
    if "MASTER_PORT" not in os.environ and not _says_by_itself("main_port", environment):
        raise StoreError(
            "init_method 'env://' needs MASTER_ADDR and MASTER_PORT in the environment of processes that are started "
            f"one by one (got MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT=None); export both, the same on "
            "every rank, or choose init_method='tcp://HOST:PORT' or 'file:///PATH'"
        )
    return Tcp(environment.main_address, int(environment.main_port))


def _says_by_itself(name: str, environment: ClusterEnvironment) -> bool:
    """Whether ``main_address`` or ``main_port`` is more than what the variables ``MASTER_...`` say."""
    from_variables = (getattr(LightningEnvironment, name), getattr(WorldEnvironment, name))
    return getattr(type(environment), name) not in from_variables


def _bind(where: Tcp) -> socket.socket:
    try:
        return listen(where.host, where.port)
    except OSError as cause:
        raise StoreError(
            f"init_method '{where}': the launching process on {socket.gethostname()} (pid {os.getpid()}) cannot bind "
            f"port {where.port}: {cause.strerror or cause}; stop the program that holds it or choose another port"
        ) from None


@contextmanager
def environment_of_started_ranks(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment in which ranks are started; afterwards it is what it was, whatever the block did to it."""
    before = dict(os.environ)
    # A RANK that somebody exported would make every started process believe that it is that one.
    os.environ.pop("RANK", None)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
