"""Connect two hosts by a wire that delays each packet and loses some: a process carries frames from port to port.

``tc netem`` does the same, but the kernels of many containers lack it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection

from tests.harness.network import Network

_EVERY_PROTOCOL, _PACKET_VNET_HDR, _SOL_PACKET = 0x0003, 15, 263  # of linux/if_ether.h and linux/if_packet.h
_LARGEST = 1 << 17  # segments are joined into frames of 64 KiB


@contextlib.contextmanager
def bad_wire(hosts: Network, *, delay: float, loss: float) -> Iterator[Callable[[], None]]:
    """Delay packets between the hosts by ``delay`` seconds, lose a share of ``loss``; yield a function that cuts it."""
    enter = ("nsenter", f"--net=/proc/{hosts.switch.pid}/ns/net", sys.executable, "-m", __name__)
    hosts.switch.ip("link set port0 nomaster", "link set port1 nomaster")
    with subprocess.Popen([*enter, str(delay), str(loss)], stdout=subprocess.PIPE) as carrier:
        assert carrier.stdout is not None
        assert carrier.stdout.readline() == b"ready\n"
        yield carrier.kill
        carrier.kill()


def carry(delay: float, loss: float) -> None:
    ports = [_open(name) for name in ("port0", "port1")]
    other = dict(zip(ports, reversed(ports), strict=True))
    numbers = itertools.count()
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    print("ready", flush=True)
    while True:
        ready = connection.wait(ports, max(0.0, waiting[0][0] - time.monotonic()) if waiting else None)
        for port in (port for port in ports if port in ready):
            frame, (*_, kind, _, _) = port.recvfrom(_LARGEST)
            if kind != socket.PACKET_OUTGOING and random.random() >= loss:
                heapq.heappush(waiting, (time.monotonic() + delay, next(numbers), other[port], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, port, frame = heapq.heappop(waiting)
            port.send(frame)


def _open(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)  # frames with unfinished checksums and many segments pass as is
    port.bind((name, 0))
    return port


if __name__ == "__main__":
    carry(float(sys.argv[1]), float(sys.argv[2]))
