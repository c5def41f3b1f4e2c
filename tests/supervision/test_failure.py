"""What an exception means for the other ranks, told from real errors of broken groups and stores."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import RankDiedError
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.sockets import OpenedSockets
from lightning_ddp_ext.supervision.failure import echoes_another_rank
from tests.harness.ranks import RankProcesses, free_port, hold
from tests.supervision.model import throw


def finding(work: Callable[[], object]) -> tuple[str, bool]:
    """Return type and text of the exception, and whether it counts as an echo of another rank's exit."""
    try:
        work()
    except Exception as error:
        return reason_of(error), echoes_another_rank(error)
    raise AssertionError("this was to fail")


def call_collectives(rank: int, world_size: int, port: int, end: str) -> dict[str, tuple[str, bool]] | None:
    """Rank 1, which hosts the store, brings the group to that end, then rank 0 makes one call after another."""
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 1, timeout=timedelta(seconds=60))
    with OpenedSockets() as sockets:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    hold("in the group")
    if end == "times out":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))  # type: ignore[attr-defined]
    if rank == 1:
        if end == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        hold("at the end")
        return None
    if end == "is severed":
        sockets.abort()
    if end == "is missing":
        dist.destroy_process_group()
    tensor = torch.ones(8)
    found = {
        "all_reduce": finding(lambda: dist.all_reduce(tensor)),
        "asynchronous": finding(lambda: dist.all_reduce(tensor, async_op=True).wait()),
        "barrier": finding(dist.barrier),
        "broadcast": finding(lambda: dist.broadcast_object_list([None], src=1)),
        "receive": finding(lambda: dist.recv(tensor, src=1)),
        "wrap": finding(lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))),
    }
    if end == "dies":
        found |= {"get": finding(lambda: store.get("missing")), "set": finding(lambda: store.set("key", "value"))}
    return found


@pytest.mark.parametrize("end", ["dies", "is severed", "is missing", "times out"])
def test_errors_of_collectives_are_echoes(end: str) -> None:
    """Whatever brings a group to its end, and in whichever call: the error is not taken for this rank's own."""
    with RankProcesses(call_collectives, 2, free_port(), end) as ranks:
        for rank in (0, 1):
            ranks.wait_for("in the group", rank)
        ranks.release(1)
        ranks.wait(1) if end == "dies" else ranks.wait_for("at the end", 1)
        ranks.release(0)
        (outcome,) = ranks.wait(0)
    assert outcome.result is not None, outcome.story()
    assert [name for name, (_, is_echo) in outcome.result.items() if not is_echo] == [], outcome.result


class Fatal(torch.utils.data.Dataset[int]):
    """Kills the worker that reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


OWN: dict[str, Callable[[], object]] = {
    "a lost worker": lambda: list(torch.utils.data.DataLoader(Fatal(), num_workers=1)),
    "other weights": lambda: torch.nn.Linear(2, 2).load_state_dict({"wight": torch.ones(2, 2)}),
    "other shapes": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "a user's connection": lambda: throw(ConnectionRefusedError(111, "Connection refused by peer")),
    "a store": lambda: throw(RuntimeError("cannot store the index: its store is read-only")),
    "a value": lambda: throw(ValueError("cannot store sockets of gloo's")),
    "what names a rank": lambda: throw(RankDiedError("gloo: rank 1 died", rank=1, host="here", pid=4242)),
}


@pytest.mark.parametrize("name", OWN)
def test_other_errors_are_the_ranks_own(name: str) -> None:
    """Errors of models, data and a user's connections are not echoes, nor is one that already names the culprit."""
    reason, is_echo = finding(OWN[name])
    assert not is_echo, reason


@pytest.mark.parametrize("hidden", [False, True])
def test_an_error_because_of_an_echo_is_an_echo(hidden: bool) -> None:
    """An error that user code raises because of a broken collective is not this rank's own either."""
    error = KeyError("logger")
    error.__context__ = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:34712.")
    error.__suppress_context__ = hidden
    assert echoes_another_rank(error)
    error.__context__ = LookupError("no")
    assert not echoes_another_rank(error)
