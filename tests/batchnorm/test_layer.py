"""What the synchronised BatchNorm layer does alone and in groups of ranks, and what it
refuses.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_ddp_ext import SyncBatchNorm, convert_sync_batchnorm
from lightning_ddp_ext.errors import BatchNormError, ConfigurationError
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group


def use(rank: int, world_size: int, directory: Path) -> None:
    with stock_group(rank, world_size, directory):
        share = torch.randn(4 + rank, 3)
        is_alone_in_evaluation_and_outside_its_group(rank, share)
        refuses_inputs_that_cannot_be(share)
        refuses_one_value(rank)
        makes_one_collective_each_way(share)
        cannot_be_differentiated_twice(share)


def is_alone_in_evaluation_and_outside_its_group(rank: int, share: Tensor) -> None:
    options: Any = {"track_running_stats": False}
    if rank == 0:  # the other rank would be waited for
        assert torch.equal(
            SyncBatchNorm(3, **options).eval()(share), nn.BatchNorm1d(3, **options)(share)
        )
    first: Any = dist.new_group([0])
    torch.testing.assert_close(
        SyncBatchNorm(3, process_group=first)(share), nn.BatchNorm1d(3)(share)
    )


def refuses_inputs_that_cannot_be(share: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected 2D to 5D input \(got 1D input\)"):
        SyncBatchNorm(3)(torch.ones(3))
    for channels in (1, 5):
        with pytest.raises(
            BatchNormError, match=rf"expects inputs with 3 channels \(got shape \(2, {channels}\)"
        ):
            SyncBatchNorm(3, affine=False)(torch.ones(2, channels))
    with pytest.raises(
        BatchNormError,
        match=r"a BatchNorm layer supports inputs on cpu and cuda \(got one on meta\)",
    ):
        SyncBatchNorm(3)(share.to("meta"))


def refuses_one_value(rank: int) -> None:
    layer = SyncBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        BatchNormError, match="a BatchNorm layer needs more than 1 value per channel in training"
    ):
        layer(torch.ones(1 if rank == 1 else 0, 3))
    assert torch.equal(layer.running_var, before["running_var"])
    assert layer(torch.full((1, 3), float(rank))).shape == (1, 3)


def makes_one_collective_each_way(share: Tensor) -> None:
    layer = SyncBatchNorm(3)
    outputs = list[Tensor]()
    passes = {
        "forward": lambda: outputs.append(layer(share.clone().requires_grad_())),
        "backward": lambda: outputs[0].sum().backward(),
    }
    for name, run in passes.items():
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            run()
        assert sum("gloo:" in event.name for event in recorded.events()) == 1, name


def cannot_be_differentiated_twice(share: Tensor) -> None:
    loss = SyncBatchNorm(3)(share.requires_grad_()).square().sum()
    (gradient,) = torch.autograd.grad(loss, share, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice a function"):
        gradient.square().sum().backward()


def test_what_it_does_alone_and_what_it_refuses(tmp_path: Path) -> None:
    """Evaluation, and training outside of a layer's group, do not wait for other ranks;
    every rank raises a refusal.

    A forward pass makes one collective, and a backward pass one.
    """
    run_ranks(use, 2, tmp_path)


OPTIONS: list[dict[str, Any]] = [{}, {"affine": False}, {"track_running_stats": False}]
OPTIONS += [{"bias": False}] if "bias" in inspect.signature(nn.BatchNorm2d).parameters else []


@pytest.mark.parametrize("options", OPTIONS)
def test_one_process_is_torchs(options: dict[str, Any]) -> None:
    """Without a process group it is torch's layer, to the last bit, and the state dict
    of one fits the other.
    """
    ours = SyncBatchNorm(3, **options)
    plain = nn.BatchNorm2d(3, **options)
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(ours(x), plain(x))
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)
    ours.load_state_dict(plain.state_dict())
    plain.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("ranks", [0, True, "nodes", 2.5, [0, 1], "node", 2])
def test_what_cannot_be_a_group_is_refused(ranks: Any) -> None:
    """The error has the value and the allowed ones; "node" and numbers need a process
    group.
    """
    told = (
        "process_group must be None, 'node', a positive number of ranks, or a ProcessGroup (got"
        " {!r}); omit it"
    )
    told = (
        "process_group={!r} needs a process group, which is not initialised yet"
        if ranks in ("node", 2)
        else told
    )
    with pytest.raises(ConfigurationError) as raised:
        convert_sync_batchnorm(torch.nn.BatchNorm1d(3), process_group=ranks)
    assert str(raised.value).startswith(told.format(ranks))


def members(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Return the mean over this rank's group, for each form of the argument; rank r's
    batch has the mean 2 ** r.
    """
    with stock_group(rank, world_size, directory):
        by_hand = dist.new_group([0, 3]), dist.new_group([1, 2])
        ways: dict[str, Any] = {
            "None": None,
            **{str(size): size for size in (1, 2, 3, 9)},
            "by hand": by_hand[rank in (1, 2)],
            "of others": dist.new_group([0, 1]),
        }
        layers: dict[str, Any] = {
            way: convert_sync_batchnorm(torch.nn.BatchNorm1d(1, momentum=1.0), process_group=ranks)
            for way, ranks in ways.items()
        }
        layers["copied"] = copy.deepcopy(layers["by hand"])
        layers["pickled"] = pickle.loads(pickle.dumps(layers["by hand"]))
        assert (layers["copied"].process_group, layers["pickled"].process_group) == (
            ways["by hand"],
            None,
        )
        for layer in layers.values():
            layer(torch.tensor([[-1.0], [1.0]]) + 2**rank)
        return {way: layer.running_mean.item() for way, layer in layers.items()}


def test_statistics_are_those_of_the_ranks_in_the_group(tmp_path: Path) -> None:
    """Only ranks of the group count; a rank outside of it is alone.

    A pickled layer uses all ranks.
    """
    found = run_ranks(members, 4, tmp_path)
    expected = {
        "None": [[0, 1, 2, 3]],
        "9": [[0, 1, 2, 3]],
        "pickled": [[0, 1, 2, 3]],
        "1": [[0], [1], [2], [3]],
        "2": [[0, 1], [2, 3]],
        "3": [[0, 1, 2], [3]],
        "by hand": [[0, 3], [1, 2]],
        "copied": [[0, 3], [1, 2]],
        "of others": [[0, 1], [2], [3]],
    }
    for way, parts in expected.items():
        for part in parts:
            mean = pytest.approx(sum(2**rank for rank in part) / len(part))
            assert [found[rank][way] for rank in part] == [mean] * len(part), way
