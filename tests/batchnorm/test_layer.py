"""The synchronised BatchNorm layer gives what one process gives for all ranks' batches joined."""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext import SyncBatchNorm
from lightning_ddp_ext.batchnorm import cuda
from lightning_ddp_ext.batchnorm.statistics import Running, Statistics
from lightning_ddp_ext.errors import BatchNormError, BatchNormInputError
from tests.batchnorm.cuda_kernels import install
from tests.batchnorm.joined import CASES, Case, deviations, of_layer, of_one_process, rows
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group


class AlwaysJoint(SyncBatchNorm):
    """Takes the way of several ranks also where there is one: NCCL has one rank on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self._normalise(input) if self.training else super().forward(input)
        return output


class ByCudaKernels(SyncBatchNorm):
    """Takes the way of CUDA tensors, with kernels for the CPU."""

    def _normalise(self, input: Tensor) -> Tensor:
        return cuda.batch_norm(input, self.weight, self.bias, self._count_batch(), self.eps, self._ddpx_context)


@dataclass(frozen=True)
class Way:
    """How ranks compute; torch's kernels on a GPU merge what each rank has rounded to float32, which costs a digit."""

    kind: type[SyncBatchNorm] = SyncBatchNorm
    world_size: int = 2
    device: str = "cpu"
    backend: str = "gloo"
    slack: float = 1.0

    def takes(self, case: Case) -> bool:
        """On a GPU the host does not learn how many values there are, and so not that there is none or one."""
        return self.slack == 1.0 or sum(len(rows(input)) for input, _ in case.shares(self.world_size, 0)) > 1


def wrong_cases(rank: int, world_size: int, directory: Path, way: Way) -> list[str]:
    kernels = install() if way.kind is ByCudaKernels else None
    store, limit = f"file://{directory}/store", timedelta(seconds=25)
    dist.init_process_group(way.backend, init_method=store, rank=rank, world_size=world_size, timeout=limit)
    found = [f"{case}: {line}" for case in CASES if way.takes(case) for line in _deviations_of(case, way, rank)]
    dist.destroy_process_group()
    del kernels
    return found


def _deviations_of(case: Case, way: Way, rank: int) -> list[str]:
    ours = of_layer(case, way.kind, rank, way.world_size, way.device)
    exact = of_one_process(case, rank, way.world_size, "cpu", torch.float64)
    torchs = exact if case.dtype == torch.float64 else of_one_process(case, rank, way.world_size, way.device)
    return deviations(ours, exact, torchs, way.slack)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(Way(), id="2 ranks"),
        pytest.param(Way(world_size=3), id="3 ranks"),
        pytest.param(Way(ByCudaKernels, 3, slack=16.0), id="CUDA kernels on CPU"),
        pytest.param(Way(device="cuda", slack=16.0), id="gloo on a GPU", marks=pytest.mark.gpu),
        pytest.param(Way(AlwaysJoint, 1, "cuda", "nccl", 16.0), id="NCCL", marks=pytest.mark.gpu),
    ],
)
def test_equals_the_joined_batch(tmp_path: Path, way: Way) -> None:
    """Outputs, gradients and running statistics of several steps, whatever the input."""
    if way.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    assert run_ranks(wrong_cases, way.world_size, tmp_path, way) == [[]] * way.world_size


def use(rank: int, world_size: int, directory: Path) -> None:
    with stock_group(rank, world_size, directory):
        share = torch.randn(4 + rank, 3)
        is_alone_in_evaluation_and_outside_its_group(rank, share)
        refuses_inputs_that_cannot_be(share)
        refuses_one_value(rank)
        is_quiet_about_infinity(share)
        with pytest.raises(
            BatchNormError, match=r"^a BatchNorm layer synchronises, and so cannot be differentiated tw"
        ):
            torch.autograd.grad(SyncBatchNorm(3)(share.requires_grad_()).sum(), share, create_graph=True)


def is_alone_in_evaluation_and_outside_its_group(rank: int, share: Tensor) -> None:
    options: Any = {"track_running_stats": False}
    if rank == 0:  # the other rank would be waited for
        assert torch.equal(SyncBatchNorm(3, **options).eval()(share), nn.BatchNorm1d(3, **options)(share))
    first: Any = dist.new_group([0])
    torch.testing.assert_close(SyncBatchNorm(3, process_group=first)(share), nn.BatchNorm1d(3)(share))


def refuses_inputs_that_cannot_be(share: Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected 2D to 5D input \(got 1D input\)"):
        SyncBatchNorm(3)(torch.ones(3))
    for channels in (1, 5):
        with pytest.raises(
            BatchNormInputError, match=rf"takes inputs of 3 channels \(got one of shape \(2, {channels}\)"
        ):
            SyncBatchNorm(3, affine=False)(torch.ones(2, channels))
    with pytest.raises(BatchNormInputError, match=r"a BatchNorm layer takes inputs on cpu or cuda \(got one on meta\)"):
        SyncBatchNorm(3)(share.to("meta"))


def refuses_one_value(rank: int) -> None:
    layer = SyncBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(BatchNormInputError, match="a BatchNorm layer needs more than 1 value per channel in training"):
        layer(torch.ones(1 if rank == 1 else 0, 3))
    assert torch.equal(layer.running_var, before["running_var"])
    assert layer(torch.full((1, 3), float(rank))).shape == (1, 3)


def is_quiet_about_infinity(share: Tensor) -> None:
    input = torch.full_like(share, float("inf")).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SyncBatchNorm(3, eps=0.0)(input).sum().backward()
        SyncBatchNorm(3, eps=0.0)(torch.ones_like(share).requires_grad_()).sum().backward()
    assert input.grad is not None


def test_what_it_does_alone_and_what_it_refuses(tmp_path: Path) -> None:
    """Evaluation, and training outside of a layer's group, wait for nobody; a refusal is every rank's."""
    run_ranks(use, 2, tmp_path)


def test_one_process_is_torchs() -> None:
    """Without a process group it is torch's layer, to the last bit."""
    ours, plain = SyncBatchNorm(3), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(ours(x), plain(x))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(torch.ones(1, 3))


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"bias": False}])
def test_state_dict_of_batchnorm(options: dict[str, Any]) -> None:
    """A state dict of one fits the other, in both directions, and has the same keys in the same order."""
    if not options.keys() <= inspect.signature(nn.BatchNorm2d).parameters.keys():
        pytest.skip("this torch has no bias=")
    ours, plain = SyncBatchNorm(3, **options), nn.BatchNorm2d(3, **options)
    plain(torch.randn(4, 3, 5, 5))
    ours.load_state_dict(plain.state_dict())
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)
    plain.load_state_dict(SyncBatchNorm(3, **options).state_dict())


def test_a_variance_beyond_half_precision_is_averaged_before_it_is_rounded() -> None:
    """A batch may have one that float16 cannot hold, the running one need not be infinite because of it."""
    running = Running(torch.zeros(1, dtype=torch.float16), torch.ones(1, dtype=torch.float16), 0.1)
    running.update(Statistics(np.zeros(1), np.array([160_000.0]), 10.0))
    assert running.var is not None
    assert running.var.item() == pytest.approx(0.9 + 16_000 * 10 / 9, rel=1e-3)
