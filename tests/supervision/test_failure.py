"""What an exception means for the other ranks, told from real errors of broken groups and stores."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import RankDiedError
from lightning_ddp_ext.rendezvous.peer_event import RemoteTraceback, reason_of
from lightning_ddp_ext.rendezvous.sockets import sockets_opened
from lightning_ddp_ext.supervision.failure import echoes_another_rank, supervised
from tests.harness.ranks import RankProcesses, free_port, hold

Finding = tuple[str, bool]  # an error's type and text, and whether it is taken for an echo


def finding(work: Callable[[], object]) -> Finding:
    try:
        work()
    except Exception as error:
        return reason_of(error), echoes_another_rank(error)
    raise AssertionError("this was to fail")


# --- errors of broken groups ----------------------------------------------------------------------


def call_collectives(rank: int, world_size: int, directory: Path, end: str) -> dict[str, Finding] | None:
    """Rank 1 brings the group to that end, then rank 0 calls one collective after another."""
    store = dist.FileStore(f"{directory}/store", world_size)
    timeout = timedelta(seconds=1 if end == "times out" else 30)
    with sockets_opened() as sockets:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()
    hold("in the group")
    if rank == 1:
        if end == "is closed":
            dist.destroy_process_group()
        if end == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        hold("at the end")
        return None
    if end == "is severed":
        sockets.sever()
    if end == "is gone":
        dist.destroy_process_group()
    tensor = torch.ones(8)
    return {
        "all_reduce": finding(lambda: dist.all_reduce(tensor)),
        "asynchronous": finding(lambda: dist.all_reduce(tensor, async_op=True).wait()),
        "barrier": finding(dist.barrier),
        "broadcast": finding(lambda: dist.broadcast_object_list([None], src=1)),
        "receive": finding(lambda: dist.recv(tensor, src=1)),
        "wrap": finding(lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))),
    }


@pytest.mark.parametrize("end", ["dies", "is closed", "is severed", "is gone", "times out"])
def test_errors_of_collectives_are_echoes(end: str, tmp_path: Path) -> None:
    """Whatever brings a group to its end, and in whichever collective: the error is not taken for this rank's own."""
    with RankProcesses(call_collectives, 2, tmp_path, end) as ranks:
        for rank in (0, 1):
            ranks.wait_for("in the group", rank)
        ranks.release(1)
        ranks.wait(1) if end == "dies" else ranks.wait_for("at the end", 1)
        ranks.release(0)
        (outcome,) = ranks.wait(0)
    assert outcome.result is not None, outcome.story()
    assert len({reason for reason, _ in outcome.result.values()}) <= 2, "one break, one error"
    assert [name for name, (_, is_echo) in outcome.result.items() if not is_echo] == [], outcome.result


def use_the_store_of_a_dead_rank(rank: int, world_size: int, port: int) -> list[Finding] | None:
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 1, timeout=timedelta(seconds=10))
    hold("in the store")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [finding(lambda: store.get("missing")), finding(lambda: store.set("key", "value"))]


def test_errors_of_a_dead_store_are_echoes() -> None:
    """A store whose host has died is not this rank's own trouble."""
    with RankProcesses(use_the_store_of_a_dead_rank, 2, free_port()) as ranks:
        for rank in (0, 1):
            ranks.wait_for("in the store", rank)
        ranks.release(1)
        ranks.wait(1)
        ranks.release(0)
        (outcome,) = ranks.wait(0)
    assert outcome.result is not None, outcome.story()
    assert all(is_echo for _, is_echo in outcome.result), outcome.result


# --- other errors ---------------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset[int]):
    """Kills the worker that reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def lose_a_worker() -> None:
    for _ in torch.utils.data.DataLoader(Batches(), num_workers=1):
        pass


def load_wrong_weights() -> None:
    torch.nn.Linear(2, 2).load_state_dict({"wight": torch.ones(2, 2)})


def multiply_wrong_shapes() -> None:
    torch.ones(2, 3) @ torch.ones(2, 3)


def ask_for_what_is_not_there() -> None:
    {"layer1": 1}["layer3"]


def connect_to_nobody() -> None:
    raise ConnectionRefusedError(111, "Connection refused by peer")


def fail_to_restore() -> None:
    raise ValueError("cannot restore the tokenizer, which was stored elsewhere")


def hear_of_a_death() -> None:
    raise RankDiedError("gloo: rank 1 died", rank=1, host="here", pid=4242)


@pytest.mark.parametrize(
    "work",
    [
        lose_a_worker,
        load_wrong_weights,
        multiply_wrong_shapes,
        ask_for_what_is_not_there,
        connect_to_nobody,
        fail_to_restore,
        hear_of_a_death,
    ],
)
def test_other_errors_are_the_ranks_own(work: Callable[[], None]) -> None:
    """Errors of models, data and a user's own connections are no echo, nor is one that names the culprit already."""
    reason, is_echo = finding(work)
    assert not is_echo, reason


def raise_because_of(cause: BaseException, *, hidden: bool) -> None:
    try:
        raise cause
    except BaseException as error:
        raise KeyError("logger") from (None if hidden else error)


@pytest.mark.parametrize("hidden", [False, True])
def test_an_error_because_of_an_echo_is_an_echo(hidden: bool) -> None:
    """What user code makes of a broken collective is as little this rank's own fault."""
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:34712.")
    assert finding(lambda: raise_because_of(broken, hidden=hidden)) == ("KeyError: 'logger'", True)
    assert finding(lambda: raise_because_of(LookupError("no"), hidden=hidden)) == ("KeyError: 'logger'", False)


def test_a_circle_of_causes_ends() -> None:
    """An exception that is its own cause's cause is looked at once."""
    error = KeyError("layer3")
    error.__cause__ = ValueError()
    error.__cause__.__cause__ = error
    assert not echoes_another_rank(error)


# --- alone ----------------------------------------------------------------------------------------


def test_alone_nothing_is_announced() -> None:
    """In a process that has met no other rank the job's result and its exception pass as they are."""
    assert supervised(divmod, 7, 2) == (3, 1)
    error = RuntimeError("gloo")
    with pytest.raises(RuntimeError) as caught:
        supervised(raise_it, error)
    assert caught.value is error
    assert error.__cause__ is None


def raise_it(error: BaseException) -> None:
    raise error


def test_a_remote_traceback_prints_as_it_was() -> None:
    """As the cause of an exception, the text of another rank's traceback keeps its lines."""
    assert str(RemoteTraceback("Traceback\n  File x\nKeyError")) == "\n\nTraceback\n  File x\nKeyError"
