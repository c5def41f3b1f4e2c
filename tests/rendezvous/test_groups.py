"""A group is checked when it is formed, and groups of some ranks form on each kind of
device.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future as create_work
from torch.futures import Future

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rendezvous.process_context import join, leave
from tests.harness.ranks import run_ranks
from tests.harness.training import backend
from tests.rendezvous.servers import request

GPU = torch.device("cuda", 0)


def on_cpu(*size: int, device: torch.device, ones: Any = torch.ones) -> torch.Tensor:
    return ones(*size)  # type: ignore[no-any-return]


def form_groups_of_one(rank: int, world_size: int, where: str) -> list[int]:
    with (
        patch.object(torch, "ones", on_cpu),
        patch.object(torch.cuda, "set_device", lambda device: None),
    ):
        context = join(request(rank, world_size, where, device=GPU))
    assert context is not None
    groups = [context.new_group([member]) for member in range(world_size)]
    sizes = [dist.get_world_size(group) for group in groups]
    leave()
    return sizes


def test_ranks_on_a_gpu_form_groups_of_some_ranks_over_gloo(tmp_path: Path) -> None:
    """``SyncBatchNormConversion(process_group=1)`` and ``"node"`` need them.

    For ranks outside of a group, torch returns the size -1.
    """
    assert run_ranks(form_groups_of_one, 2, str(tmp_path / "store")) == [[1, -1], [-1, 1]]


def add_ones(rank: int, world_size: int, where: str, **fields: Any) -> int:
    mine = request(rank, world_size, where, backend=backend("nccl_stand_in"), device=GPU, **fields)
    with (
        patch.object(torch, "ones", on_cpu),
        patch.object(torch.cuda, "set_device", lambda device: None),
    ):
        join(mine)
    total = torch.ones(1)
    dist.all_reduce(total)
    return int(total)


def test_ranks_with_several_gpus_form_a_group_that_is_bound_to_none(tmp_path: Path) -> None:
    """NCCL refuses tensors on other devices than the one to which a group is bound."""
    given = partial(add_ones, has_one_device=False)
    assert run_ranks(given, 2, str(tmp_path / "several")) == [2, 2]
    with pytest.raises(AssertionError, match=r"device_id cuda:0 does not match"):
        run_ranks(add_ones, 1, str(tmp_path / "one"))


def aborted(tensor: torch.Tensor, *, async_op: bool = False) -> Any:
    """Return zeros, as an aborted collective of NCCL may."""
    tensor.zero_()
    done: Future[Any] = Future()
    done.set_result(tensor)
    return create_work(done)


def stuck(tensor: torch.Tensor, *, async_op: bool = False) -> Any:
    """Never finish, as with NCCL if GPUs cannot reach each other."""
    return create_work(Future())


def form_broken_group(
    rank: int, world_size: int, where: str, all_reduce: Any, finding: str
) -> None:
    mine = request(rank, world_size, where, init_timeout=2.0, backend=backend("nccl_stand_in"))
    with (
        patch.object(dist, "all_reduce", all_reduce),
        pytest.raises(RendezvousError, match=finding),
    ):
        join(mine)


@pytest.mark.parametrize(
    ("all_reduce", "finding"),
    [
        (aborted, "of 1 ranks was formed, but its ranks add up to 0; look for messages of nccl_"),
        (stuck, r"formed, but its first collective did not finish within 2 s \(init_timeout\);"),
    ],
)
def test_a_group_that_does_not_work_is_refused(
    all_reduce: Any, finding: str, tmp_path: Path
) -> None:
    """The error is raised in time and names a remedy."""
    run_ranks(form_broken_group, 1, str(tmp_path / "store"), all_reduce, finding)
