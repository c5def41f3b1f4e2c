"""By what means shall the ranks find each other?

======================================  ===============================================================================
URL                                     value
======================================  ===============================================================================
``env://``                              ``Env()``: the address that the launcher put into the environment
``tcp://10.0.0.1:29500``                ``Tcp("10.0.0.1", 29500)``: rank 0 listens there
``tcp://[::1]:29500``                   ``Tcp("::1", 29500)``
``file:///shared/run42``                ``File("/shared/run42")``: a file, or a directory if there is one of that name
``file:///shared/runs/``                ``File("/shared/runs/")``: a directory, in which the run id names a file
======================================  ===============================================================================

Paths stay as they are written: no percent decoding, as in torch.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lightning_ddp_ext.errors import InitMethodError
from lightning_ddp_ext.run_id import RUN_ID_VARIABLE, sanitise

VARIABLE = "DDPX_INIT_METHOD"
FORMS = "env://, tcp://host:29500 or file:///shared/run42"
NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")


@dataclass(frozen=True)
class Env:
    """The launcher's own address: ``MASTER_ADDR`` and ``MASTER_PORT``."""

    def __str__(self) -> str:
        return "env://"


@dataclass(frozen=True)
class Tcp:
    """Rank 0 listens at ``host:port``. An IPv6 address is kept without its brackets.

    Raises:
        InitMethodError: an empty or malformed host, or a port that is no integer in 1..65535.

    >>> str(Tcp("::1", 29500))
    'tcp://[::1]:29500'
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        subject = f"Tcp({self.host!r}, {self.port!r})"
        if isinstance(self.host, str):
            object.__setattr__(self, "host", _without_brackets(self.host))
        _check_host(self.host, subject, "write Tcp('10.0.0.1', 29500)")
        _check_port(self.port, subject, f"write Tcp({self.host!r}, 29500)")

    def __str__(self) -> str:
        return f"tcp://{_with_brackets(self.host)}:{self.port}"


@dataclass(frozen=True)
class File:
    """All ranks open one file, or one that ``run_id`` names in a directory.

    Attributes:
        path: absolute; a directory if it ends with a slash, if ``run_id`` is given, or if there is one.
        run_id: what names the file in the directory; by default the launcher's name for the run.

    Raises:
        InitMethodError: a path that is empty, relative, or carries a query; an empty run id.

    >>> File("/shared/runs/").file_for("slurm-77-0-0")
    '/shared/runs/ddpx-slurm-77-0-0.store'
    """

    path: str
    run_id: str | None = None

    def __post_init__(self) -> None:
        _check_path(self.path, f"File({self.path!r})")
        check_run_id(self.run_id)

    def __str__(self) -> str:
        return f"file://{self.path}"

    @property
    def is_directory(self) -> bool:
        """Whether a run id is to name a file in this directory."""
        return self.run_id is not None or self.path.endswith("/") or os.path.isdir(self.path)

    @property
    def directory(self) -> str:
        """The directory that holds the file."""
        return (self.path.rstrip("/") or "/") if self.is_directory else os.path.dirname(self.path)

    def file_for(self, run_id: str | None) -> str:
        """The path of the file itself.

        Args:
            run_id: names the file in a directory, where this value brings no ``run_id`` of its own.

        Raises:
            InitMethodError: this is a directory, and there is no run id.
        """
        if not self.is_directory:
            return self.path
        name = self.run_id or run_id
        if not name:
            raise InitMethodError(
                f"init_method '{self}' is a directory and needs a run id to name a file in it (got none);"
                f" give run_id= or set {RUN_ID_VARIABLE}, the same on every rank"
            )
        return os.path.join(self.directory, f"ddpx-{sanitise(name)}.store")


InitMethod: TypeAlias = Env | Tcp | File


def choose(argument: str | InitMethod | None, environ: Mapping[str, str]) -> InitMethod | None:
    """What the argument or ``DDPX_INIT_METHOD`` says; ``None`` where neither does.

    Raises:
        InitMethodError: one of them is malformed, or they differ.

    >>> choose(None, {"DDPX_INIT_METHOD": "tcp://10.0.0.1:29500"})
    Tcp(host='10.0.0.1', port=29500)
    """
    given = parse(argument)
    ordered = parse(environ.get(VARIABLE) or None, field=VARIABLE)
    if given is not None and ordered is not None and str(given) != str(ordered):
        raise InitMethodError(
            f"init_method must agree with {VARIABLE} (got '{given}' and '{ordered}'); drop one of the two"
        )
    return ordered if given is None else given


def parse(value: str | InitMethod | None, *, field: str = "init_method") -> InitMethod | None:
    """The init method that a URL stands for; ``None`` and init methods are returned as they are.

    Args:
        value: a URL, an init method, or ``None``.
        field: the argument's or variable's name, as the message shall show it.

    Raises:
        InitMethodError: ``value`` is none of these.

    >>> parse("file:///shared/run42")
    File(path='/shared/run42', run_id=None)
    """
    if value is None or isinstance(value, Env | Tcp | File):
        return value
    if not isinstance(value, str):
        raise InitMethodError(
            f"{field} must be a URL, Env(), Tcp(host, port) or File(path)"
            f" (got {value!r}, of type {type(value).__name__}); write {FORMS}"
        )
    scheme, rest = _split(value, field)
    return _PARSERS[scheme](rest, f"{field} {value!r}")


def check_run_id(run_id: object) -> None:
    """Refuse what cannot name a file.

    Raises:
        InitMethodError: it is neither ``None`` nor text.
    """
    if run_id is not None and (not isinstance(run_id, str) or not run_id):
        raise InitMethodError(f"run_id must be text, and not empty (got {run_id!r}); write run_id='run42'")


def check_file(method: File, *, num_nodes: int) -> None:
    """Refuse a file that cannot be made, or not be seen by all nodes; to be called before it is opened.

    Raises:
        InitMethodError: the directory is missing, is no directory, cannot be written, or is local to each of several
            nodes; or what is in the file's place is no plain file, or not ours to write.
    """
    if num_nodes > 1:
        _check_shared(method, num_nodes)
    _check_directory(method)
    _check_writable(method)
    _check_plain(method)


def _split(url: str, field: str) -> tuple[str, str]:
    """Scheme, and what follows ``://``."""
    scheme, separator, rest = url.partition("://")
    if not separator and url.lower().startswith("file:"):
        scheme, rest = url[:4], url[5:]
    elif not separator:
        raise InitMethodError(f"{field} {url!r} needs a scheme (got none); write {_with_scheme(url)}")
    scheme = scheme.lower()
    if scheme not in _PARSERS:
        near = difflib.get_close_matches(scheme, _PARSERS, n=1)
        remedy = f"{near[0]}://{rest}" if near else FORMS
        raise InitMethodError(f"{field} {url!r} has an unknown scheme (got '{scheme}://'); write {remedy}")
    return scheme, rest


def _with_scheme(url: str) -> str:
    """The nearest URL to one that lacks ``://``."""
    start, colon, rest = url.partition(":")
    if url.startswith("/"):
        return f"file://{url}"
    if start == "env":
        return "env://"
    if start == "tcp":
        return f"tcp://{rest.lstrip('/') or 'host:29500'}"
    return f"tcp://{url}" if colon and rest.isdecimal() else FORMS


def _parse_env(rest: str, subject: str) -> Env:
    if rest:
        raise InitMethodError(f"{subject} must end after env:// (got {rest!r} behind it); write env://{_hint(rest)}")
    return Env()


def _parse_tcp(rest: str, subject: str) -> Tcp:
    address, slash, path = rest.partition("/")
    address, question, query = address.partition("?")
    _check_no_query(query if question else path.partition("?")[2], subject, f"tcp://{address}")
    if path.partition("?")[0]:
        raise InitMethodError(
            f"{subject} must end after the port (got {slash + path!r} behind it); write tcp://{address}"
        )
    host, port = _split_address(address, subject)
    _check_host(host, subject, "write tcp://10.0.0.1:29500")
    remedy = f"write tcp://{_with_brackets(host)}:29500"
    if not port:
        raise InitMethodError(f"{subject} needs a port (got none); {remedy}")
    number = int(port) if port.isascii() and port.isdecimal() and len(port) < 10 else port
    return Tcp(host, _check_port(number, subject, remedy))


def _split_address(address: str, subject: str) -> tuple[str, str]:
    """Host without brackets, and port as text; either may be empty."""
    if address.startswith("["):
        host, bracket, port = address[1:].partition("]")
        if not bracket or not _is_ipv6(host) or port[:1] not in ("", ":"):
            raise InitMethodError(
                f"{subject} needs an IPv6 address between brackets (got {address!r}); write tcp://[::1]:29500"
            )
        return host, port[1:]
    if address.count(":") > 1:
        host, _, port = address.rpartition(":")
        if _is_ipv6(host) and port:
            remedy = f"tcp://[{host}]:{port}"
        else:
            remedy = f"tcp://[{address}]:29500" if _is_ipv6(address) else "tcp://host:29500, or tcp://[::1]:29500"
        raise InitMethodError(f"{subject} needs brackets around an IPv6 address (got {address!r}); write {remedy}")
    host, _, port = address.partition(":")
    return host, port


def _parse_file(rest: str, subject: str) -> File:
    path = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if "?" in path:
        bare, _, query = path.partition("?")
        _check_no_query(query, subject, f"file://{bare}")
    _check_path(path, subject)
    return File(path)


_PARSERS: dict[str, Callable[[str, str], InitMethod]] = {"env": _parse_env, "tcp": _parse_tcp, "file": _parse_file}


def _without_brackets(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _with_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _hint(rest: str) -> str:
    return ", and rank= and world_size= as arguments of DDPExtStrategy" if rest.startswith("?") else ""


def _check_no_query(query: str, subject: str, url: str) -> None:
    if query:
        raise InitMethodError(f"{subject} must carry no query (got '?{query}'); write {url}{_hint('?')}")


def _check_host(host: object, subject: str, remedy: str) -> None:
    if not isinstance(host, str):
        raise InitMethodError(f"{subject} needs a host name or address (got {host!r}); {remedy}")
    if not host:
        raise InitMethodError(f"{subject} needs a host (got none); {remedy}")
    if (":" in host and not _is_ipv6(host)) or any(sign in "/?#@[]" or sign.isspace() for sign in host):
        raise InitMethodError(f"{subject} needs a bare host name or address (got {host!r}); {remedy}")


def _check_port(port: object, subject: str, remedy: str) -> int:
    if isinstance(port, int) and not isinstance(port, bool) and 1 <= port <= 65535:
        return port
    raise InitMethodError(f"{subject} needs a port in 1..65535 (got {port!r}); {remedy}")


def _check_path(path: object, subject: str) -> None:
    if not isinstance(path, str):
        raise InitMethodError(f"{subject} needs a path as text (got {type(path).__name__}); write File(str(path))")
    if not path.strip("/"):
        raise InitMethodError(f"{subject} needs a path (got {path or 'none'}); write file:///shared/run42")
    if not path.startswith("/"):
        raise InitMethodError(f"{subject} needs an absolute path (got {path!r}); write file://{_absolute(path)}")
    for sign in ("?", "\0"):
        if sign in path:
            raise InitMethodError(f"{subject} needs a path without {sign!r} (got {path!r}); rename the file")


def _absolute(path: str) -> str:
    """What a relative path was probably meant to be: below here, or with its first slash forgotten."""
    return os.path.abspath(os.path.expanduser(path)) if path[0] in "~." or "/" not in path else f"/{path}"


def _check_shared(method: File, num_nodes: int) -> None:
    directory = os.path.realpath(method.directory)
    for local in (*NODE_LOCAL, tempfile.gettempdir()):
        root = os.path.realpath(local)
        if os.path.commonpath([root, directory]) == root:
            raise InitMethodError(
                f"init_method '{method}' needs a directory that all {num_nodes} nodes share (got {directory!r}, and"
                f" {local} is local to each node); write a path on a shared file system, or tcp://host:29500"
            )


def _check_directory(method: File) -> None:
    directory = method.directory
    if os.path.isdir(directory):
        return
    at = directory
    while not os.path.lexists(at):
        at = os.path.dirname(at)
    if os.path.isdir(at):
        found, remedy = "does not exist", f"make it (mkdir -p {directory})"
    else:
        found, remedy = f"{at!r} is not a directory", f"remove {at}"
    raise InitMethodError(
        f"init_method '{method}' needs an existing directory (got {directory!r}, but {found}); {remedy},"
        " or write another path"
    )


def _check_writable(method: File) -> None:
    directory = method.directory
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        reason = "on a read-only file system"
    elif not os.access(directory, os.W_OK | os.X_OK):
        reason = "not writable by this user"
    else:
        return
    raise InitMethodError(
        f"init_method '{method}' needs a directory that this user can write (got {directory!r}, {reason});"
        " allow it (chmod u+wx), or write another path"
    )


def _check_plain(method: File) -> None:
    """Only for a path that is the file itself; in a directory, the names are ours."""
    path = method.path
    if method.is_directory or not os.path.exists(path):
        return
    if not os.path.isfile(path):
        raise InitMethodError(
            f"init_method '{method}' needs a plain file or none (got {path!r}, a device, pipe or socket);"
            " write another path"
        )
    if not os.access(path, os.R_OK | os.W_OK):
        raise InitMethodError(
            f"init_method '{method}' needs a file that this user can read and write (got {path!r}, which is not);"
            " remove it, or write another path"
        )
