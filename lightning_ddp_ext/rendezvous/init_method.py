"""Parse the URLs of init methods, which define how the ranks find each other.

======================================  ==========================================================
URL                                     value
======================================  ==========================================================
``env://``                              ``Env()``: the launcher's address, from the environment
``tcp://10.0.0.1:29500``                ``Tcp("10.0.0.1", 29500)``: rank 0 listens there
``tcp://[::1]:29500``                   ``Tcp("::1", 29500)``
``file:///shared/run42``                ``File("/shared/run42")``: a file that rank 0 creates
======================================  ==========================================================

Paths are not percent-decoded, as in torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lightning_ddp_ext.errors import ConfigurationError

VARIABLE = "DDPX_INIT_METHOD"

_NAME = r"[^\s:/?#@\[\]]+"
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?"
_TCP = re.compile(rf"tcp://(?:\[({_IPV6})\]|({_NAME})):([0-9]{{1,5}})/?", re.IGNORECASE)
_TCP_WITHOUT_PORT = re.compile(rf"tcp://(\[{_IPV6}\]|{_NAME}):?/?", re.IGNORECASE)
_FILE = re.compile(r"file://(/[^?\0]*[^?\0/])", re.IGNORECASE)


@dataclass(frozen=True)
class Env:
    """The launcher's own address: ``MASTER_ADDR`` and ``MASTER_PORT``."""

    def __str__(self) -> str:
        return "env://"


@dataclass(frozen=True)
class Tcp:
    """Rank 0 listens at ``host:port``. An IPv6 address has no brackets here.

    Raises:
        ConfigurationError: the host is empty or malformed, or the port is not an
            integer in 1..65535.

    >>> str(Tcp("::1", 29500))
    'tcp://[::1]:29500'
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if _host_and_port(str(self)) != (self.host, self.port):
            raise _malformed("init_method", self)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in str(self.host) else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True)
class File:
    """All ranks open the file at an absolute ``path``.

    Raises:
        ConfigurationError: the path is empty or relative, contains a query, or ends
            with a slash.
    """

    path: str

    def __post_init__(self) -> None:
        if _FILE.fullmatch(str(self)) is None:
            raise _malformed("init_method", self)

    def __str__(self) -> str:
        return f"file://{self.path}"


InitMethod: TypeAlias = Env | Tcp | File


def choose(argument: str | InitMethod | None, environ: Mapping[str, str]) -> InitMethod | None:
    """Return the init method that the argument or ``DDPX_INIT_METHOD`` sets, if any.

    Raises:
        ConfigurationError: one of them is malformed, or they differ.

    >>> choose(None, {"DDPX_INIT_METHOD": "tcp://10.0.0.1:29500"})
    Tcp(host='10.0.0.1', port=29500)
    """
    method = parse(argument)
    exported = parse(environ.get(VARIABLE) or None, field=VARIABLE)
    if method is not None and exported is not None and str(method) != str(exported):
        raise ConfigurationError(
            f"init_method must agree with {VARIABLE} (got '{method}' and '{exported}'); remove one"
            " of them"
        )
    return exported if method is None else method


def parse(value: str | InitMethod | None, *, field: str = "init_method") -> InitMethod | None:
    """Parse the URL of an init method; return ``None`` and init methods unchanged.

    Raises:
        ConfigurationError: ``value`` is malformed or has another type; the message
            calls it ``field``.

    >>> parse("file:///shared/run42")
    File(path='/shared/run42')
    """
    if value is None or isinstance(value, Env | Tcp | File):
        return value
    url = str(value)
    if url.lower() == "env://":
        return Env()
    if address := _host_and_port(url):
        return Tcp(*address)
    if file := _FILE.fullmatch(url):
        return File(file[1])
    if portless := _TCP_WITHOUT_PORT.fullmatch(url):
        raise ConfigurationError(
            f"{field} {url!r} needs a port (got none); write tcp://{portless[1]}:29500"
        )
    raise _malformed(field, value)


def _host_and_port(url: str) -> tuple[str, int] | None:
    """Return the host and the port of a ``tcp://`` URL; ``None`` if it is malformed."""
    match = _TCP.fullmatch(url)
    if match is None or not 1 <= int(match[3]) <= 65535:
        return None
    return match[1] or match[2], int(match[3])


def _malformed(field: str, value: object) -> ConfigurationError:
    return ConfigurationError(
        f"{field} must be env://, tcp://HOST:PORT or file:///PATH (got {value!r}); write env://,"
        " tcp://10.0.0.1:29500, tcp://[::1]:29500 or file:///shared/run42, with a port in 1..65535"
        " and a path without '?'"
    )


def check_file(method: File) -> None:
    """Raise if the file cannot be made, or if something else has its path.

    Raises:
        ConfigurationError: the file cannot be created there.
    """
    directory = os.path.dirname(method.path)
    if not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"init_method '{method}' needs an existing directory that this user can write to (got"
            f" {directory!r}); create it (mkdir -p {directory}), make it writable (chmod u+wx"
            f" {directory}), or use another path"
        )
    if os.path.exists(method.path) and not os.path.isfile(method.path):
        raise ConfigurationError(
            f"init_method '{method}' must be a file (got a directory or a special file, such as a"
            " pipe); use another path, such as that of a new file in a directory"
        )
