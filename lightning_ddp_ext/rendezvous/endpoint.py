"""Find the address of rank 0's control listener, in one of three ways.

===================  ==============================================================
``TcpEndpoint``      rank 0 listens at a host and port that every rank is given
``FileEndpoint``     rank 0 writes its address, with a free port, into a file
``StoreEndpoint``    as above, but to the store of a launcher such as torchrun
===================  ==============================================================

A rank 0 that is killed leaves its address in the file, which is harmless: rank 0 of
another run does not know the nonce in it. ``connect_store`` opens a launcher's store,
and later rank 0's own.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore
from typing_extensions import override

from lightning_ddp_ext.errors import DDPExtError, RendezvousError
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.network import listen, network_identity, own_addresses

_LONGEST_ADDRESS = 1 << 16  # bytes of a file that may contain an address
# The limit of one operation on an existing key of a store.
STORE_OPERATION = timedelta(seconds=10)


@dataclass(frozen=True)
class Address:
    """The address of rank 0's listener: ``port`` at any of ``hosts``.

    A published address also has a nonce and the network of its publisher. An address
    that is not published yet has no hosts.
    """

    hosts: tuple[str, ...] = ()
    port: int = 0
    nonce: str = ""
    network: str = ""

    def candidates(self) -> list[str]:
        """Return the hosts in the order in which this process tries them."""
        hosts = ["127.0.0.1", *self.hosts] if self.network == network_identity() else self.hosts
        return list(dict.fromkeys(hosts))


class Endpoint:
    """The base class of the ways to find rank 0.

    By default, rank 0 listens on a port that the kernel chooses, and publishes its
    address as text.
    """

    is_local = False
    """Whether all ranks are on this host, so rank 0 need not listen beyond loopback."""

    def listen(self) -> tuple[socket.socket, Address]:
        """Return a listening socket and its address; called on rank 0.

        Raises:
            RendezvousError: the given port cannot be bound.
            OSError: no port can be bound.
        """
        listener = listen("127.0.0.1" if self.is_local else "", 0)
        hosts = ["127.0.0.1"] if self.is_local else own_addresses()
        port = listener.getsockname()[1]
        return listener, Address(tuple(hosts), port, secrets.token_hex(16), network_identity())

    def publish(self, address: Address) -> None:
        """Publish the address; called on rank 0."""
        self.write(json.dumps({"lightning_ddp_ext": asdict(address)}))

    def look_up(self) -> Address:
        """Return rank 0's address, without hosts while it is unknown.

        Raises:
            RendezvousError: the place of the address cannot be read, or has other
                content.
        """
        content = self.read()
        if not content:
            return Address()
        try:
            values = json.loads(content)["lightning_ddp_ext"]
            return Address(**{**values, "hosts": tuple(values["hosts"])})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RendezvousError(
                f"init_method '{self}': the file does not contain the address of a rank 0 (it"
                f" begins with {content[:13]!r}); choose a file that does not exist yet"
            ) from None

    def read(self) -> bytes:
        """Return the published text, which is empty at first."""
        return b""

    def write(self, text: str) -> None:
        """Publish a text, which the other ranks then read."""

    def withdraw(self) -> None:
        """Remove the published address; called on rank 0."""


@dataclass(frozen=True)
class TcpEndpoint(Endpoint):
    """Rank 0 listens at the host and port ``where``.

    It listens on all interfaces, unless ``is_local`` is set and ``where`` is a loopback
    address.
    """

    where: Tcp
    is_local: bool = True

    @override
    def listen(self) -> tuple[socket.socket, Address]:
        try:
            # With several hosts, on all interfaces: on rank 0, some Kubernetes operators
            # resolve its name to a loopback address.
            listener = listen(self.where.host if self.is_local else "", self.where.port)
        except OSError as error:
            raise RendezvousError(
                f"init_method '{self.where}': rank 0 on {socket.gethostname()} (pid {os.getpid()})"
                f" cannot bind port {self.where.port}: {os.strerror(error.errno or 0)}; stop the"
                " program that uses the port, or choose another port"
            ) from None
        return listener, self.look_up()

    @override
    def look_up(self) -> Address:
        return Address((self.where.host,), self.where.port)


@dataclass(frozen=True)
class FileEndpoint(Endpoint):
    """Rank 0 writes its address to the file at the absolute ``path``."""

    path: str
    is_local: bool = False

    def __str__(self) -> str:
        return f"file://{self.path}"

    @override
    def read(self) -> bytes:
        try:
            with open(self.path, "rb") as file:
                return file.read(_LONGEST_ADDRESS)
        except OSError as error:
            # ESTALE: on NFS, a file replaced while being read.
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return b""
            raise RendezvousError(
                f"init_method '{self}': {error.strerror}; use another file"
            ) from None

    @override
    def write(self, text: str) -> None:
        """Write the file atomically, readable by this user only.

        Raises:
            RendezvousError: the file cannot be written, for example because the disk is
                full.
        """
        temporary = f"{self.path}.{secrets.token_hex(4)}"
        try:
            with open(temporary, "x", opener=partial(os.open, mode=0o600)) as file:
                file.write(text)
            os.replace(temporary, self.path)
        except OSError as error:
            raise RendezvousError(
                f"init_method '{self}': rank 0 on {socket.gethostname()} (pid {os.getpid()}) cannot"
                f" write its address there: {error.strerror}; create the directory, free disk"
                " space, or choose another file"
            ) from None
        finally:
            with suppress(OSError):
                os.unlink(temporary)

    @override
    def withdraw(self) -> None:
        with suppress(OSError):
            os.unlink(self.path)


@dataclass(frozen=True)
class StoreEndpoint(Endpoint):
    """Rank 0 writes its address to a launcher's store, under ``key``."""

    store: TCPStore
    key: str

    @override
    def read(self) -> bytes:
        return self.store.get(self.key) if self.store.check([self.key]) else b""

    @override
    def write(self, text: str) -> None:
        self.store.set(self.key, text)


def connect_store(
    host: str, port: int, deadline: Deadline, check: Callable[[], None] = lambda: None
) -> TCPStore:
    """Open a client of the store at ``host`` and ``port``.

    The constructor of a client may ignore its timeout, for example if the server does
    not reply. It therefore runs in a thread, and ``check`` may raise in the meantime.

    Raises:
        RendezvousError: the store could not be opened before the deadline.
    """
    timeout = timedelta(seconds=max(1.0, deadline.remaining))  # a store counts whole seconds
    client = partial(TCPStore, host, port, wait_for_workers=False, timeout=timeout)
    try:
        store = deadline.bound(client, check=check)
    except DDPExtError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise RendezvousError(
            f"the store at {host}:{port} cannot be used ({reason}); allow connections between all"
            " hosts on every port, and look at the output of the process that hosts it"
        ) from None
    store.set_timeout(STORE_OPERATION)
    return store
