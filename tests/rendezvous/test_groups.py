"""A group is checked when it is formed, and groups of some ranks form on each kind of
device.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rendezvous.process_context import join, leave
from lightning_ddp_ext.threads import start_thread
from tests.harness.environment import wait_until
from tests.harness.ranks import launch_ranks, run_ranks
from tests.harness.training import backend
from tests.rendezvous.connecting import Place, message_of, place, request

GPU = torch.device("cuda", 0)


ONES = torch.ones  # also while ``pretended_gpus`` replaces it


def on_cpu(*size: int, device: torch.device) -> torch.Tensor:
    return ONES(*size)


@contextmanager
def pretended_gpus() -> Iterator[list[torch.device]]:
    """Have tensors of GPUs on the CPU; yield the devices that threads set."""
    chosen: list[torch.device] = []
    with (
        patch.object(torch, "ones", on_cpu),
        patch.object(torch.cuda, "set_device", chosen.append),
    ):
        yield chosen


def form_groups_of_one(rank: int, world_size: int, where: Place) -> list[int]:
    with pretended_gpus():
        join(request(rank, world_size, where, device=GPU))
    groups = [dist.new_group([member]) for member in range(world_size)]
    sizes = [dist.get_world_size(group) for group in groups]
    leave()
    return sizes


def test_ranks_on_a_gpu_form_groups_of_some_ranks_over_gloo(tmp_path: Path) -> None:
    """Each rank has the group of itself, and cannot use the other rank's."""
    sizes = run_ranks(form_groups_of_one, 2, place("file", tmp_path))
    assert sizes == [[1, -1], [-1, 1]]  # torch returns -1 to ranks outside of a group


def join_and_add_ones(rank: int, world_size: int, where: Place, **fields: Any) -> int:
    mine = request(rank, world_size, where, backend=backend("nccl_stand_in"), device=GPU, **fields)
    with pretended_gpus():
        join(mine)
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def test_ranks_with_several_gpus_form_a_group_that_is_bound_to_none(tmp_path: Path) -> None:
    """Their group takes tensors on any device, here on the CPU.

    NCCL refuses tensors on other devices than the one to which a group is bound.
    """
    with_several_devices = partial(join_and_add_ones, has_one_device=False)
    assert run_ranks(with_several_devices, 2, place("file", tmp_path)) == [2, 2]


def test_a_rank_with_one_gpu_forms_a_group_that_is_bound_to_it(tmp_path: Path) -> None:
    """The group is refused because of its device, which this machine does not have."""
    (outcome,) = launch_ranks(join_and_add_ones, 1, place("file", tmp_path))
    assert outcome.failure.type_name == "ValueError", outcome.story()
    assert "device_id cuda:0 " in outcome.failure.message


def change_gpu(rank: int, world_size: int, where: Place) -> None:
    options = {"backend": backend("nccl_stand_in"), "has_one_device": False}
    first, second = (
        request(rank, world_size, where, device=torch.device("cuda", number), **options)
        for number in (0, 1)
    )
    with pretended_gpus() as chosen:
        join(first)
        group = dist.group.WORLD
        join(first)
        assert dist.group.WORLD is group
        join(second)
        assert dist.group.WORLD is not group
        chosen.clear()
        start_thread("worker", chosen.append, torch.device("cpu")).join()
        assert chosen == [second.device, torch.device("cpu")]


def test_a_trainer_on_another_gpu_gets_a_group_on_it(tmp_path: Path) -> None:
    """A single rank gets a new group for another device, in which NCCL takes its tensors."""
    run_ranks(change_gpu, 1, place("file", tmp_path))


def aborted(tensor: torch.Tensor) -> None:
    """Return zeros, as an aborted collective of NCCL may."""
    tensor.zero_()


def stuck(*args: Any, **kwargs: Any) -> None:
    """Never return, as NCCL if GPUs or hosts cannot reach each other."""
    threading.Event().wait()


def form_broken_group(rank: int, world_size: int, where: Place, functions: dict[str, Any]) -> None:
    for target, function in functions.items():
        patch(target, function).start()  # until this process exits
    join(request(rank, world_size, where, init_timeout=2.0, backend=backend("nccl_stand_in")))


ALL_REDUCE = "torch.distributed.all_reduce"
ABORT = "torch.distributed.distributed_c10d._abort_process_group"
LATE = "did not connect its devices within 2 s (init_timeout); look for messages of nccl_stand_in"


@pytest.mark.parametrize(
    ("functions", "finding"),
    [
        ({ALL_REDUCE: aborted}, "adds ones up to 0; look for messages of nccl_stand_in above"),
        ({ALL_REDUCE: stuck}, LATE),
        ({"torch.distributed.init_process_group": stuck}, LATE),
        ({ALL_REDUCE: stuck, ABORT: stuck}, LATE),
    ],
    ids=["aborted", "stuck", "never formed", "abort is stuck"],
)
def test_a_group_that_does_not_work_is_refused(
    functions: dict[str, Any], finding: str, tmp_path: Path
) -> None:
    """The error is raised in time and names a remedy, and the process exits."""
    (outcome,) = launch_ranks(form_broken_group, 1, place("file", tmp_path), functions)
    message = message_of(outcome, RendezvousError)
    assert f"the nccl_stand_in group of 1 ranks {finding}" in message


def form_without_the_last_rank(rank: int, world_size: int, where: Place, raised: Path) -> str:
    """Form a group on rank 0, which rank 1 does not enter; return rank 0's error name.

    Rank 1 passes the barrier before it, and then waits until rank 0 has raised.
    """
    asked = request(rank, world_size, where, init_timeout=120.0)
    context = join(replace(asked, timeout=timedelta(seconds=1)))
    assert context is not None
    if rank == 1:
        wait = partial(wait_until, raised.exists, lambda: "rank 0 has not raised", 60.0)
        with patch.object(dist, "new_group", lambda *_, **__: wait()):
            context.new_group()
        return ""
    with pytest.raises(dist.DistError) as error:
        context.new_group()
    raised.touch()
    return type(error.value).__name__


def test_a_later_group_forms_within_the_timeout_of_collectives(tmp_path: Path) -> None:
    """``init_timeout`` only applies while ranks start."""
    where = place("file", tmp_path)
    on_rank_0, _ = run_ranks(
        form_without_the_last_rank, 2, where, tmp_path / "raised", time_limit=60
    )
    assert on_rank_0 == "DistStoreError"
