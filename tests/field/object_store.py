"""Run a real S3 server on this machine: moto's, behind a gateway that fails as machines
and networks do.

The objects stay in moto's process, so that a gateway that died can be started again.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import importlib.util
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.environment import free_port, wait_until

_ROOT = Path(__file__).resolve().parents[2]
_NEEDED = ("moto", "flask", "s3fs")
_SECONDS_TO_START = 60.0
_PIECE = 1 << 16  # bytes that a slow gateway passes on together
_BUSY = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Fault(NamedTuple):
    """A fault of the gateway, which concerns requests of a method whose URLs, followed
    by their ranges of bytes, contain a text.

    The kinds are:

    - ``dies``: the gateway exits in the middle of the first request
    - ``stalls``: the gateway never replies
    - ``denies``: every request is refused
    - ``denies once``: the first request is refused
    - ``busy``: every other request is refused, and the client is asked to try again
    - ``resets``: every third connection is cut in the middle of a request
    - ``slow``: a piece of data is passed on every hundredth of a second
    """

    kind: str
    method: str
    text: str = ""

    def concerns(self, method: str, url: str) -> bool:
        return method == self.method and self.text in url

    def strikes(self, number: int) -> bool:
        """Whether the fault happens to this request, counted among those concerned."""
        if self.kind == "busy":
            return number % 2 == 0
        if self.kind == "resets":
            return number % 3 == 0
        return self.kind != "denies once" or number == 0


NO_FAULT = Fault("", "no method")


def why_unavailable() -> str | None:
    """Return the reason why the store cannot run here, or ``None``."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed (the extra `field`)" if missing else None


class ObjectStore:
    """A server with one bucket, ``s3://bucket``; the context manager starts and ends it.

    Attributes:
        environment: the variables with which every S3 client finds the gateway.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._port = free_port()
        self._gateway_port = free_port()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._gateway_port}",
            "AWS_ACCESS_KEY_ID": "field",
            "AWS_SECRET_ACCESS_KEY": "field",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def __enter__(self) -> ObjectStore:
        words = ["moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._server = self._start(words, self._port)
        self.client.create_bucket(Bucket="bucket")
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._server)

    @property
    def client(self) -> Any:
        """A client of the server itself, which never fails."""
        import boto3

        address = f"http://127.0.0.1:{self._port}"
        names = {"aws_access_key_id": "field", "aws_secret_access_key": "field"}
        return boto3.client("s3", endpoint_url=address, region_name="us-east-1", **names)

    def objects(self, prefix: str) -> dict[str, int]:
        """Return the sizes of the objects whose keys begin with ``prefix``."""
        listed = self.client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
        return {listing["Key"]: listing["Size"] for listing in listed}

    def uploads(self, prefix: str) -> list[str]:
        """Return the keys of unfinished uploads, neither completed nor aborted."""
        uploads = self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
        return [upload["Key"] for upload in uploads if upload["Key"].startswith(prefix)]

    @contextlib.contextmanager
    def gateway(self, fault: Fault = NO_FAULT) -> Iterator[subprocess.Popen[bytes]]:
        """Serve clients for the block, with a fault."""
        words = [__name__, str(self._gateway_port), str(self._port), *fault]
        gateway = self._start(words, self._gateway_port)
        try:
            yield gateway
        finally:
            _end(gateway)

    def _start(self, words: list[str], port: int) -> subprocess.Popen[bytes]:
        """Start a module as a process, and wait until it listens."""
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        def accepts() -> bool:
            assert process.poll() is None, self._log.read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return True
            return False

        wait_until(accepts, lambda: f"{words} does not listen", _SECONDS_TO_START)
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class Handler(http.server.BaseHTTPRequestHandler):
    """The gateway: passes one connection's requests on to the server, with the fault."""

    protocol_version = "HTTP/1.1"
    fault = NO_FAULT
    concerned = itertools.count()  # numbers of the requests that the fault concerns
    server_port = 0

    def pass_on(self) -> None:
        kind = self._kind_of_fault()
        body = self._body(kind)
        if kind == "stalls":
            threading.Event().wait()
        elif kind == "busy":
            self._refuse(503, _BUSY)
        elif kind in ("denies", "denies once"):
            self._refuse(403, _DENIED)
        else:
            self._forward(body, kind)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on

    def _kind_of_fault(self) -> str:
        """Return the kind of fault that happens to this request; empty if none."""
        url = f"{self.path} {self.headers.get('Range')}"
        if not self.fault.concerns(self.command, url):
            return ""
        return self.fault.kind if self.fault.strikes(next(self.concerned)) else ""

    def _refuse(self, status: int, content: bytes) -> None:
        self._reply(status, [("Content-Type", "application/xml")], content, "")

    def _forward(self, body: bytes, kind: str) -> None:
        server = http.client.HTTPConnection("127.0.0.1", self.server_port)
        server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "expect":
                server.putheader(name, value)
        server.endheaders(body)
        response = server.getresponse()
        self._reply(response.status, response.getheaders(), response.read(), kind)
        server.close()

    def _body(self, kind: str) -> bytes:
        size = int(self.headers.get("Content-Length") or 0)
        body = b""
        while len(body) < size:
            body += self.rfile.read(min(_PIECE, size - len(body)))
            self._interrupt(kind, len(body), size)
        return body

    def _reply(self, status: int, headers: list[tuple[str, str]], body: bytes, kind: str) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        for begin in range(0, len(body), _PIECE):
            self.wfile.write(body[begin : begin + _PIECE])
            self._interrupt(kind, begin, len(body))

    def _interrupt(self, kind: str, done: int, size: int) -> None:
        """Act on a fault that happens while data pass, in the middle of them or slowly."""
        if kind == "slow":
            time.sleep(0.01)
        if done * 2 < size:
            return
        if kind == "dies":
            os._exit(1)
        if kind == "resets":
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        """Write nothing for a request."""


def main(port: str, server_port: str, *fault: str) -> None:
    Handler.server_port = int(server_port)
    Handler.fault = Fault(*fault)
    gateway = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    gateway.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
