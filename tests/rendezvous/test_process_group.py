"""A process joins once; everything in it uses the same ranks, and leaves them once, in good order."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import GroupInUseError, RankLeftError, RendezvousError
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.process_context import current, join, leave
from tests.harness.ranks import RankProcesses, announce, free_port, hold, launch_ranks, run_ranks
from tests.rendezvous.rooms import (
    add_ones,
    place,
    process,
    request,
    sentence,
    url,
)

kinds = pytest.mark.parametrize("kind", ["tcp", "file"])


def join_and_add(rank: int, world_size: int, where: Tcp | str) -> float:
    join(request(rank, world_size, where))
    return add_ones()


# Joining and leaving.


@kinds
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_ranks_meet_and_end_in_good_order(kind: str, world_size: int, tmp_path: Path) -> None:
    """All ranks are in one group, end with status 0 without leaving by themselves, and no file stays."""
    outcomes = launch_ranks(join_and_add, world_size, place(kind, tmp_path))
    assert [(outcome.result, outcome.exit_code) for outcome in outcomes] == [(float(world_size), 0)] * world_size
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:5])
def test_ranks_may_start_in_any_order(order: Sequence[int], tmp_path: Path) -> None:
    """A rank that is there before rank 0 waits for it."""
    with RankProcesses(join_and_add, 3, str(tmp_path / "store"), start=[], time_limit=30.0) as ranks:
        for rank in order:
            ranks.start(rank)
        assert [outcome.result for outcome in ranks.wait()] == [3.0] * 3


def leave_twice(rank: int, world_size: int, where: Tcp | str) -> list[bool]:
    """Join, leave, leave again; which of the things that a context holds are gone, without the garbage collector."""
    gc.disable()
    context = join(request(rank, world_size, where))
    assert context is not None
    assert context is current()
    parts = [weakref.ref(context), weakref.ref(context.store)]
    del context
    leave()
    leave()
    return [part() is None for part in parts] + [current() is None, not dist.is_initialized()]


def test_leaving_twice_is_harmless_and_nothing_stays(tmp_path: Path) -> None:
    """After leave there is no group and no context, and the file store has ended with it."""
    assert run_ranks(leave_twice, 2, str(tmp_path / "store")) == [[True] * 4] * 2
    assert list(tmp_path.iterdir()) == []


# Joining again.


def join_twice(rank: int, world_size: int, where: Tcp | str) -> dict[str, Any]:
    """Join as three Trainers would that want the same, another timeout, and another backend."""
    first = join(request(rank, world_size, where, timeout=30.0))
    group = dist.group.WORLD
    second = join(request(rank, world_size, where, timeout=30.0))
    same_group = dist.group.WORLD is group
    third = join(request(rank, world_size, where, timeout=40.0, is_explicit=False, init_method="env://"))
    timeout = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
    fourth = join(request(rank, world_size, where, timeout=40.0, backend="cpu:gloo"))
    other_group = dist.group.WORLD is not group
    return {
        "contexts": len({id(one) for one in (first, second, third, fourth)}),
        "same group": same_group,
        "timeout": timeout.total_seconds(),
        "other group": other_group,
        "sum": add_ones(),
    }


def test_joining_again_uses_the_same_ranks(tmp_path: Path) -> None:
    """A second Trainer gets the group that is there, with its own timeout, or a new one for its own backend."""
    expected = {"contexts": 1, "same group": True, "timeout": 40.0, "other group": True, "sum": 2.0}
    assert run_ranks(join_twice, 2, str(tmp_path / "store")) == [expected] * 2


def join_otherwise(rank: int, world_size: int, where: Tcp | str) -> list[str]:
    """Messages of what is refused, and then a sum in the group that is still there."""
    join(request(rank, world_size, where))
    messages = []
    for refused in (
        request(rank, world_size + 1, where),
        request((rank + 1) % world_size, world_size, where),
        request(rank, world_size, "/another/file"),
    ):
        with pytest.raises(GroupInUseError) as caught:
            join(refused)
        messages.append(str(caught.value))
    assert add_ones() == world_size
    return messages


def test_another_world_is_refused(tmp_path: Path) -> None:
    """A second Trainer with other ranks, or another init method, reads what is in use and what to do."""
    where = str(tmp_path / "store")
    first, _ = run_ranks(join_otherwise, 2, where)
    remedy = (
        "; give every Trainer of a script the same devices and num_nodes, or run the other one in a script of its own"
    )
    already = "this process is rank 0 of 2 already, and this Trainer wants it to be rank"
    assert first == [
        f"{already} 0 of 3{remedy}",
        f"{already} 1 of 2{remedy}",
        f"this process's group was formed with init_method 'file://{where}', and this Trainer asks for "
        "'file:///another/file'; use one init method in a script",
    ]


def with_a_group_of_its_own(rank: int, world_size: int, where: str, port: int) -> tuple[bool, str, float]:
    """Open a group without us, join with no init method, then with one; whether the first was used, and the message."""
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    adopted = join(request(rank, world_size, where, is_explicit=False, init_method="env://")) is None
    with pytest.raises(GroupInUseError) as caught:
        join(request(rank, world_size, where))
    total = add_ones()
    leave()
    assert dist.is_initialized()  # it is not ours to close
    dist.destroy_process_group()
    return adopted, str(caught.value), total


def test_a_group_that_somebody_else_opened_is_used_or_refused(tmp_path: Path) -> None:
    """It is used as it is where nothing else was asked for; an init method of the user's own is refused beside it."""
    where = str(tmp_path / "store")
    for rank, (adopted, message, total) in enumerate(run_ranks(with_a_group_of_its_own, 2, where, free_port())):
        assert (adopted, total) == (True, 2.0)
        assert message == (
            f"a process group that lightning_ddp_ext did not open is in use (rank {rank} of 2), and this Trainer asks "
            f"for rank {rank} of 2 by {url(where)}; call torch.distributed.destroy_process_group() before fit, or give "
            "the Trainer no init_method"
        )


# Failures.


def come_again(rank: int, world_size: int, where: Tcp | str, timeouts: Sequence[float]) -> float:
    """Join again and again until it works; the last attempt must."""
    for init_timeout in timeouts[:-1]:
        try:
            join(request(rank, world_size, where, init_timeout=init_timeout))
        except RendezvousError as error:
            announce("failed", str(error))
            hold("failed")
    join(request(rank, world_size, where, init_timeout=timeouts[-1]))
    return add_ones()


@kinds
def test_a_start_that_failed_can_be_tried_again(kind: str, tmp_path: Path) -> None:
    """Processes that live on after a rank has not come meet it when it does."""
    where = place(kind, tmp_path)
    with RankProcesses(come_again, 3, where, [1.5, 20.0], start=[0, 1], time_limit=60.0) as ranks:
        for rank in range(2):
            assert "rank 2 of 3 did not come" in ranks.wait_for("failed", rank)
        for rank in range(2):
            ranks.release(rank)
        ranks.start(2)
        assert [outcome.result for outcome in ranks.wait()] == [3.0] * 3


def need_one_who_left(rank: int, world_size: int, where: Tcp | str) -> str:
    """Rank 1 ends in good order while rank 0 still wants to add something with it."""
    context = join(request(rank, world_size, where))
    assert context is not None
    if rank == 1:
        return ""
    news = context.peers.wait(20.0)
    assert news is not None
    with pytest.raises(RuntimeError):
        add_ones()
    raise news.to_error()


def test_a_rank_that_is_needed_after_it_has_left_is_named(tmp_path: Path) -> None:
    """Whoever waits for it is released, and told that it has finished and gone, not that it died."""
    needing, leaving = launch_ranks(need_one_who_left, 2, str(tmp_path / "store"))
    assert leaving.exit_code == 0
    message = sentence(needing, RankLeftError)
    assert message.startswith(f"{process(1, leaving.pid)} has finished and gone, but this rank still needs it")


def join_after_destroying(rank: int, world_size: int, where: Tcp | str) -> float:
    """Destroy the group as a user may, and join again."""
    join(request(rank, world_size, where))
    dist.barrier()
    dist.destroy_process_group()
    join(request(rank, world_size, where))
    return add_ones()


@kinds
def test_a_group_that_the_user_has_destroyed_is_formed_again(kind: str, tmp_path: Path) -> None:
    """And the new one stays."""
    assert run_ranks(join_after_destroying, 2, place(kind, tmp_path)) == [2.0, 2.0]
