"""Run a real S3 server on this machine: moto's, behind a gateway that fails as machines
and networks do.

The objects stay in moto's process, so that a gateway that died can be started again.
"""

from __future__ import annotations

import contextlib
import http.client
import http.server
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.environment import MARK, free_port, wait_until

_ROOT = Path(__file__).resolve().parents[2]
_NEEDED = ("moto", "flask", "s3fs")
_SECONDS_TO_START = 60.0
_PIECE = 1 << 16  # bytes that a slow gateway passes on together
_REPLIES = {
    "busy": (
        503,
        b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>",
    ),
    "denies": (403, b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"),
}


def why_unavailable() -> str | None:
    """Return the reason why the store cannot run here, or ``None``."""
    missing = [each for each in _NEEDED if importlib.util.find_spec(each) is None]
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
        # It outlives a test.
        env = {name: value for name, value in os.environ.items() if name != MARK}
        words = ["moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._server = self._start(words, self._port, env)
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
        found = self.client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])
        return {each["Key"]: each["Size"] for each in found}

    def uploads(self, prefix: str) -> list[str]:
        """Return the keys of the uploads that were begun and neither completed nor
        aborted.
        """
        found = self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
        return [each["Key"] for each in found if each["Key"].startswith(prefix)]

    @contextlib.contextmanager
    def gateway(self, *fault: str) -> Iterator[subprocess.Popen[bytes]]:
        """Serve clients for the block, with a fault: see ``Fault``."""
        words = [__name__, str(self._gateway_port), str(self._port), *fault]
        gateway = self._start(words, self._gateway_port, dict(os.environ))
        try:
            yield gateway
        finally:
            _end(gateway)

    def _start(self, words: list[str], port: int, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with open(self._log, "ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=_ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

        def accepts() -> bool:
            assert started.poll() is None, self._log.read_text()
            return _accepts(port)

        wait_until(accepts, lambda: f"{words} does not listen", _SECONDS_TO_START)
        return started


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


class Fault:
    """What the gateway does to requests.

    Args:
        kind: ``dies``: the gateway exits in the middle of the first request;
            ``stalls``: it never replies; ``denies``, ``denies once``: it refuses them,
            or the first; ``busy``: it refuses every other one for the moment;
            ``resets``: it cuts every third connection in the middle of a request;
            ``slow``: it passes on a piece of data every hundredth of a second.
        method: the method of the requests concerned.
        text: a text that their URLs, followed by their ranges of bytes, contain.
    """

    def __init__(self, kind: str = "", method: str = "", text: str = "") -> None:
        self._kind = kind
        self._method = method
        self._text = text
        self._count = 0
        self._lock = threading.Lock()

    def on(self, method: str, url: str) -> str:
        """Return the kind for this request, or an empty text."""
        if not self._method or method != self._method or self._text not in url:
            return ""
        with self._lock:
            self._count += 1
            count = self._count
        is_hit = {"busy": count % 2 == 1, "resets": count % 3 == 1, "denies once": count == 1}.get(
            self._kind, True
        )
        return self._kind.partition(" ")[0] if is_hit else ""


class Handler(http.server.BaseHTTPRequestHandler):
    """Passes one connection's requests on to the server."""

    protocol_version = "HTTP/1.1"
    fault = Fault()
    server_port = 0

    def pass_on(self) -> None:
        fault = self.fault.on(self.command, f"{self.path} {self.headers.get('Range')}")
        body = self._body(fault)
        if fault == "stalls":
            threading.Event().wait()
        if fault in _REPLIES:
            status, content = _REPLIES[fault]
            self._reply(status, [("Content-Type", "application/xml")], content, "")
            return
        server = http.client.HTTPConnection("127.0.0.1", self.server_port)
        server.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "expect":
                server.putheader(name, value)
        server.endheaders(body)
        response = server.getresponse()
        self._reply(response.status, response.getheaders(), response.read(), fault)
        server.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on

    def _body(self, fault: str) -> bytes:
        size = int(self.headers.get("Content-Length") or 0)
        body = b""
        while len(body) < size:
            body += self.rfile.read(min(_PIECE, size - len(body)))
            self._interrupt(fault, len(body), size)
        return body

    def _reply(self, status: int, headers: list[tuple[str, str]], body: bytes, fault: str) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        for begin in range(0, len(body), _PIECE):
            self.wfile.write(body[begin : begin + _PIECE])
            self._interrupt(fault, begin, len(body))

    def _interrupt(self, fault: str, done: int, size: int) -> None:
        if fault == "slow":
            time.sleep(0.01)
        if done * 2 < size:
            return
        if fault == "dies":
            os._exit(1)
        if fault == "resets":
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: Any) -> None:
        """Write nothing for a request."""


def main() -> None:
    port, server_port, *fault = sys.argv[1:]
    Handler.server_port = int(server_port)
    Handler.fault = Fault(*fault)
    gateway = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    gateway.serve_forever()


if __name__ == "__main__":
    main()
