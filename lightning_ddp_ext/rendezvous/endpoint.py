"""Where rank 0's control listener is.

===================  ==================================================================================================
``TcpEndpoint``      at a known host and port, on which rank 0 listens
``FileEndpoint``     rank 0 listens on a port that the kernel chooses, and writes its address into a file
``StoreEndpoint``    the same with a key of a store that a launcher hosts, such as torchrun's agent
===================  ==================================================================================================

What an earlier run has left in a file is harmless: each address carries a nonce, and an answer counts only with it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from torch.distributed import TCPStore
from typing_extensions import override

from lightning_ddp_ext.errors import StoreError
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.rank_table import RankInfo
from lightning_ddp_ext.rendezvous.sockets import listen, own_addresses
from lightning_ddp_ext.rendezvous.store import connect_store

_LONGEST_ADDRESS = 1 << 16


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens: on ``port`` at any of ``hosts``. ``nonce`` and ``info`` are known if it was published."""

    hosts: tuple[str, ...]
    port: int
    nonce: str = ""
    info: RankInfo | None = None

    def candidates(self, network: str) -> list[str]:
        """The hosts in the order in which a process of ``network`` tries them."""
        is_here = self.info is not None and self.info.network == network
        return list(dict.fromkeys(["127.0.0.1", *self.hosts] if is_here else self.hosts))

    def __str__(self) -> str:
        return f"{', '.join(self.hosts)} port {self.port}"


class Endpoint(Protocol):
    """How ranks find rank 0."""

    def listen(self, info: RankInfo) -> tuple[socket.socket, Address]:
        """On rank 0: a listening socket and its address. Raises ``StoreError`` or, for a taken port, ``PortInUse``."""

    def publish(self, address: Address) -> None:
        """On rank 0: let the others find the address."""

    def look_up(self, deadline: Deadline) -> Address | None:
        """Where rank 0 listens, as far as is known now."""

    def withdraw(self, address: Address) -> None:
        """On rank 0: remove what was published, unless it is another process's."""

    def not_found(self) -> str:
        """What is there instead of an address, in words."""


class PortInUse(Exception):
    """Another process listens on rank 0's port. The argument is the error to raise if it is not a rank 0."""


@dataclass(frozen=True)
class TcpEndpoint(Endpoint):
    """Rank 0 listens at ``where``."""

    where: Tcp

    @override
    def listen(self, info: RankInfo) -> tuple[socket.socket, Address]:
        try:
            return listen(self.where.host, self.where.port), self._address
        except socket.gaierror as error:
            raise unresolvable(self.where, error) from None
        except OSError as error:
            refusal = StoreError(
                f"init_method '{self.where}': rank 0 on {info.host} (pid {info.pid}) cannot bind port "
                f"{self.where.port}: {error.strerror or error}; stop the program that holds it or choose another port"
            )
            raise (PortInUse(refusal) if error.errno == errno.EADDRINUSE else refusal) from None

    @property
    def _address(self) -> Address:
        return Address((self.where.host,), self.where.port)

    @override
    def publish(self, address: Address) -> None:
        """Nothing: the address is known."""

    @override
    def look_up(self, deadline: Deadline) -> Address | None:
        return self._address

    @override
    def withdraw(self, address: Address) -> None:
        """Nothing."""

    @override
    def not_found(self) -> str:
        return ""


class _Published(Endpoint):
    """An endpoint whose address rank 0 publishes.

    Args:
        is_local: whether all ranks are on this host, so that rank 0 listens on loopback only.
    """

    def __init__(self, *, is_local: bool = False) -> None:
        self.is_local = is_local

    @override
    def listen(self, info: RankInfo) -> tuple[socket.socket, Address]:
        listener = listen("127.0.0.1" if self.is_local else "", 0)
        hosts = ("127.0.0.1",) if self.is_local else tuple(own_addresses())
        return listener, Address(hosts, listener.getsockname()[1], secrets.token_hex(16), info)

    @override
    def publish(self, address: Address) -> None:
        self._write(json.dumps({"lightning_ddp_ext": asdict(address)}).encode())

    @override
    def look_up(self, deadline: Deadline) -> Address | None:
        content = self._read(deadline)
        return None if content is None else address_in(content)

    def _write(self, content: bytes) -> None:
        raise NotImplementedError

    def _read(self, deadline: Deadline) -> bytes | None:
        raise NotImplementedError


class FileEndpoint(_Published):
    """Rank 0 writes its address into the file at ``path``.

    Args:
        path: absolute.
        is_local: whether all ranks are on this host, so that rank 0 listens on loopback only.
    """

    def __init__(self, path: str, *, is_local: bool = False) -> None:
        super().__init__(is_local=is_local)
        self.path = path

    @override
    def look_up(self, deadline: Deadline) -> Address | None:
        content = self._read(deadline)
        address = address_in(content) if content else None
        if content and address is None:
            raise StoreError(
                f"init_method 'file://{self.path}': the file holds something else than the address of a rank 0 (it "
                f"begins with {content[:13]!r}); name a file that does not exist yet"
            )
        return address

    @override
    def withdraw(self, address: Address) -> None:
        with suppress(OSError):
            if self.look_up(Deadline(0.0)) == address:
                os.unlink(self.path)

    @override
    def not_found(self) -> str:
        found = self.look_up(Deadline(0.0))
        if found is None or found.info is None:
            return "no rank 0 has published its address there"
        return f"the address there is of {found.info}, which does not answer at {found}"

    def _write(self, content: bytes) -> None:
        """The whole file or nothing: readers never see half an address. For this user's eyes only."""
        temporary = f"{self.path}.{secrets.token_hex(4)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _read(self, deadline: Deadline) -> bytes | None:
        try:
            with open(self.path, "rb") as file:
                return file.read(_LONGEST_ADDRESS)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # replaced while it was read, on a network file system
                return None
            raise StoreError(f"init_method 'file://{self.path}': {error.strerror}; choose another file") from None


class StoreEndpoint(_Published):
    """Rank 0 writes its address into a store that a launcher hosts.

    Args:
        where: the store's host and port.
        key: what no other run of this launcher uses.
    """

    def __init__(self, where: Tcp, key: str) -> None:
        super().__init__()
        self.where = where
        self.key = f"lightning_ddp_ext/{key}"
        self._store: TCPStore | None = None

    @override
    def withdraw(self, address: Address) -> None:
        """Nothing: the store ends with its launcher."""

    @override
    def not_found(self) -> str:
        return "no rank 0 has published its address in the launcher's store"

    def _write(self, content: bytes) -> None:
        self._open(Deadline(10.0)).set(self.key, content.decode())

    def _read(self, deadline: Deadline) -> bytes | None:
        store = self._open(deadline)
        return bytes(store.get(self.key)) if store.check([self.key]) else None

    def _open(self, deadline: Deadline) -> TCPStore:
        if self._store is None:
            self._store = connect_store(self.where.host, self.where.port, deadline)
        return self._store


def address_in(content: bytes) -> Address | None:
    """The address that somebody has published; ``None`` if it is something else."""
    try:
        values: dict[str, Any] = json.loads(content)["lightning_ddp_ext"]
        info = RankInfo(**values["info"])
        return replace(Address(**values), hosts=tuple(values["hosts"]), info=info)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def unresolvable(where: Tcp, error: socket.gaierror) -> StoreError:
    """The name of rank 0's host is not known here."""
    return StoreError(
        f"init_method '{where}': host {where.host!r} does not resolve on {socket.gethostname()} ({error.strerror}); "
        "give the address of rank 0's host, or a name that every host knows"
    )
