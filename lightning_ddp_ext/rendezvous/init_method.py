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
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lightning_ddp_ext.errors import ConfigurationError

VARIABLE = "DDPX_INIT_METHOD"
FORMS = "env://, tcp://host:29500 or file:///shared/run42"
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")

_NAME = r"[^\s:/?#@\[\]]+"
_IPV6 = r"[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%[\w.-]+)?"


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
        subject = f"Tcp({self.host!r}, {self.port!r})"
        if not isinstance(self.host, str) or not re.fullmatch(f"{_NAME}|{_IPV6}", self.host):
            raise ConfigurationError(
                f"{subject} needs a bare host name or address (got {self.host!r}); write"
                " Tcp('10.0.0.1', 29500)"
            )
        _check_port(self.port, subject, f"write Tcp({self.host!r}, 29500)")

    def __str__(self) -> str:
        return (
            f"tcp://[{self.host}]:{self.port}"
            if ":" in self.host
            else f"tcp://{self.host}:{self.port}"
        )


@dataclass(frozen=True)
class File:
    """All ranks open the file at an absolute ``path``.

    Raises:
        ConfigurationError: the path is empty or relative, contains a query, or ends
            with a slash.
    """

    path: str

    def __post_init__(self) -> None:
        _check_path(self.path, f"File({self.path!r})")

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
    given = parse(argument)
    ordered = parse(environ.get(VARIABLE) or None, field=VARIABLE)
    if given is not None and ordered is not None and str(given) != str(ordered):
        raise ConfigurationError(
            f"init_method must agree with {VARIABLE} (got '{given}' and '{ordered}'); remove one of"
            " them"
        )
    return ordered if given is None else given


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
    if not isinstance(value, str):
        raise ConfigurationError(
            f"{field} must be a URL, Env(), Tcp(host, port) or File(path)"
            f" (got {value!r}, of type {type(value).__name__}); write {FORMS}"
        )
    subject = f"{field} {value!r}"
    scheme, separator, rest = value.partition("://")
    scheme = scheme.lower()
    if not separator:
        remedy = f"file://{value}" if value.startswith("/") else FORMS
        raise ConfigurationError(f"{subject} needs a scheme (got none); write {remedy}")
    if scheme not in ("env", "tcp", "file"):
        raise ConfigurationError(
            f"{subject} has an unknown scheme (got '{scheme}://'); write {FORMS}"
        )
    if scheme == "tcp":
        return _parse_tcp(rest, subject)
    if scheme == "file":
        _check_path(rest, subject)
        return File(rest)
    if rest:
        raise ConfigurationError(
            f"{subject} takes nothing after env:// (got {rest!r}); write env://"
        )
    return Env()


def check_file(method: File, *, num_nodes: int) -> None:
    """Raise if the file cannot be created, or is not visible to all nodes.

    Must be called before the file is opened.

    Raises:
        ConfigurationError: the directory is missing, not writable, or local to each of
            several nodes, or the path is not a regular file that this user can read and
            write.
    """
    path = method.path
    directory = os.path.dirname(path)
    if num_nodes > 1:
        _check_shared(method, os.path.realpath(directory), num_nodes)
    if not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"init_method '{method}' needs an existing directory that this user can write to (got"
            f" {directory!r}); create it (mkdir -p {directory}), make it writable (chmod u+wx"
            f" {directory}), or use another path"
        )
    is_there = os.path.exists(path)  # checked first, since rank 0 may publish its address meanwhile
    is_usable = os.path.isfile(path) and os.access(path, os.R_OK | os.W_OK)
    if is_there and not is_usable:
        raise ConfigurationError(
            f"init_method '{method}' needs a new file, or a regular file that this user can read"
            f" and write (got {path!r}); remove it, or use another path"
        )


def _parse_tcp(rest: str, subject: str) -> Tcp:
    address = re.fullmatch(rf"(?:\[({_IPV6})\]|({_NAME}))(?::([^:/]*))?/?", rest)
    if address is None:
        raise ConfigurationError(
            f"{subject} must be tcp://HOST:PORT, with brackets around an IPv6 address (got {rest!r}"
            " after tcp://); write tcp://10.0.0.1:29500 or tcp://[::1]:29500"
        )
    host = address[1] or address[2]
    port = address[3]
    remedy = f"write {Tcp(host, 29500)}"
    if not port:
        raise ConfigurationError(f"{subject} needs a port (got none); {remedy}")
    return Tcp(
        host, _check_port(int(port) if re.fullmatch("[0-9]{1,9}", port) else port, subject, remedy)
    )


def _check_port(port: object, subject: str, remedy: str) -> int:
    if isinstance(port, int) and not isinstance(port, bool) and 1 <= port <= 65535:
        return port
    raise ConfigurationError(f"{subject} needs a port in 1..65535 (got {port!r}); {remedy}")


def _check_path(path: object, subject: str) -> None:
    if isinstance(path, str) and re.fullmatch(r"/[^?\0]*[^?\0/]", path):
        return
    raise ConfigurationError(
        f"{subject} needs the absolute path of a file, without '?' or NUL (got {path!r}); write"
        " file:///shared/run42"
    )


def _check_shared(method: File, directory: str, num_nodes: int) -> None:
    for local in (*NODE_LOCAL, tempfile.gettempdir()):
        root = os.path.realpath(local)
        if os.path.commonpath([root, directory]) == root:
            raise ConfigurationError(
                f"init_method '{method}' needs a directory that all {num_nodes} nodes share (got"
                f" {directory!r}, and {local} is local to each node); use a path on a shared file"
                " system, or tcp://host:29500"
            )
