"""The synchronised BatchNorm layer gives what one process gives for all ranks' batches joined."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_ddp_ext import SyncBatchNorm, convert_sync_batchnorm
from lightning_ddp_ext.batchnorm import cuda
from lightning_ddp_ext.batchnorm.statistics import merge
from lightning_ddp_ext.errors import BatchNormError, BatchNormInputError, BatchNormMismatchError, ConversionError
from tests.batchnorm.cases import CASES, Case, rows
from tests.batchnorm.cuda_kernels import install
from tests.batchnorm.references import (
    collectives,
    deviations,
    expected_collectives,
    of_layer,
    of_one_process,
)
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group

_HAS_GPU = torch.cuda.is_available()
_EXACT = {"rtol": 1e-10, "atol": 1e-10}


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
        return self.slack == 1.0 or case.values(self.world_size) > 1


WAYS = {
    "2 ranks": Way(),
    "3 ranks": Way(world_size=3),
    "CUDA kernels on CPU": Way(ByCudaKernels, 3, slack=16.0),
    **({"gloo on a GPU": Way(device="cuda", slack=16.0)} if _HAS_GPU else {}),
    **({"NCCL": Way(AlwaysJoint, 1, "cuda", "nccl", 16.0)} if _HAS_GPU else {}),
}


def wrong_cases(rank: int, world_size: int, directory: Path, way: Way) -> list[str]:
    kernels = install() if way.kind is ByCudaKernels else None
    store, limit = f"file://{directory}/store", timedelta(seconds=25)
    dist.init_process_group(way.backend, init_method=store, rank=rank, world_size=world_size, timeout=limit)
    found = [f"{case}: {line}" for case in CASES if way.takes(case) for line in _deviations_of(case, way, rank)]
    dist.destroy_process_group()
    del kernels
    return found


def _deviations_of(case: Case, way: Way, rank: int) -> list[str]:
    ours, calls = of_layer(case, way.kind, rank, way.world_size, way.device)
    exact = of_one_process(case, rank, way.world_size, "cpu", torch.float64)
    torchs = exact if case.dtype == torch.float64 else of_one_process(case, rank, way.world_size, way.device)
    found = deviations(ours, exact, torchs, way.slack)
    return found if len(calls) == expected_collectives(case) else [*found, f"calls {calls}"]


@pytest.mark.parametrize("way", WAYS)
def test_equals_the_joined_batch(tmp_path: Path, way: str) -> None:
    """Outputs, gradients and running statistics of several steps, with one collective a pass, whatever the input."""
    world_size = WAYS[way].world_size
    assert run_ranks(wrong_cases, world_size, tmp_path, WAYS[way]) == [[]] * world_size


class Net(nn.Module):
    """Two layers of BatchNorm, the second in a part that is checkpointed, in one of two ways, unless that is None."""

    def __init__(self, kind: type[nn.Module], reentrant: bool | None = None) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(0)
        self.first, self.second = kind(3), kind(4)
        self.linear = nn.Linear(3, 4)
        self.reentrant = reentrant
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(_normal(parameter.shape, generator))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self.end(x)
        output: Tensor = checkpoint(self.end, x, use_reentrant=self.reentrant)
        return output

    def end(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.linear(x).tanh()).sin()
        return output


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return numbers.to(torch.get_default_device())


def _inputs(world_size: int, sizes: tuple[int, ...] = (5, 2, 0), seed: int = 0) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return [_normal((sizes[rank % len(sizes)], 3), generator) + 2 for rank in range(world_size)]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def _assert_part_of(plain: nn.Module, joined: Tensor, model: nn.Module, shares: list[Tensor], rank: int) -> None:
    """Gradients of this rank's share, and of all parameters summed over ranks, are those of the joined batch."""
    exact = {"rtol": 1e-10, "atol": 1e-10 * float(joined.grad.abs().max())}
    parts = joined.grad.split([len(rows(share)) for share in shares])
    torch.testing.assert_close(rows(shares[rank].grad), parts[rank], **exact)
    gradients = _gradients(model)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    torch.testing.assert_close(gradients, _gradients(plain), **exact)


def trains_in_ddp(rank: int, world_size: int) -> None:
    for broadcast_buffers in (True, False):
        model, plain = Net(SyncBatchNorm), Net(nn.BatchNorm1d)
        wrapped = DistributedDataParallel(model, broadcast_buffers=broadcast_buffers)
        for step in range(3):  # accumulated, each of two forward passes
            shares = _inputs(world_size, seed=step)
            joined = torch.cat(shares)
            (plain(joined).sum() + plain(joined.square()).sum()).backward()
            with wrapped.no_sync() if step < 2 else nullcontext():
                (wrapped(shares[rank]).sum() + wrapped(shares[rank].square()).sum()).backward()
            torch.testing.assert_close(wrapped.eval()(joined), plain.eval()(joined), **_EXACT)
            wrapped.train(), plain.train()
        for gradient in _gradients(plain).values():
            gradient /= world_size
        torch.testing.assert_close(_gradients(model), _gradients(plain), **_EXACT)
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), **_EXACT)
        _assert_same_on_all_ranks(model.state_dict())


def _assert_same_on_all_ranks(state: dict[str, Tensor]) -> None:
    for name, value in state.items():
        of_rank_zero = value.clone()
        dist.broadcast(of_rank_zero, 0)
        assert torch.equal(value, of_rank_zero), name


def is_checkpointed(rank: int, world_size: int) -> None:
    for reentrant in (True, False):
        model, plain = Net(SyncBatchNorm, reentrant), Net(nn.BatchNorm1d, reentrant)
        shares = _inputs(world_size)
        mine, joined = shares[rank].requires_grad_(), torch.cat(shares).detach().requires_grad_()
        model(mine).sum().backward()
        plain(joined).sum().backward()
        _assert_part_of(plain, joined, model, shares, rank)
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()), **_EXACT)


def is_copied(rank: int, world_size: int) -> None:
    share = _inputs(world_size)[rank]
    original = Net(SyncBatchNorm)
    file = io.BytesIO()
    torch.save(original, file)
    file.seek(0)
    copies = [copy.deepcopy(original), pickle.loads(pickle.dumps(original)), torch.load(file, weights_only=False)]
    assert copies[0].first.process_group is original.first.process_group
    expected = original(share)
    for other in copies:
        assert torch.equal(other(share), expected)
        torch.testing.assert_close(other.state_dict(), original.state_dict(), rtol=0, atol=0)


def diverges_without_a_warning(rank: int, world_size: int) -> None:
    share = torch.tensor([[torch.inf], [-torch.inf]], requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SyncBatchNorm(1)(share).sum().backward()
    assert share.grad is not None
    assert share.grad.isnan().all()


def refuses_to_be_differentiated_twice(rank: int, world_size: int) -> None:
    share = _inputs(world_size)[rank].requires_grad_()
    output = SyncBatchNorm(3, dtype=torch.float64)(share)
    with pytest.raises(BatchNormError, match=r"^a BatchNorm layer synchronises, and so cannot be differentiated twice"):
        torch.autograd.grad(output.sum(), share, create_graph=True)


def is_alone_in_evaluation(rank: int, world_size: int) -> None:
    share = _inputs(world_size, sizes=(4, 7))[rank]
    options: Any = {"track_running_stats": False, "dtype": torch.float64}
    with collectives() as calls:
        output = SyncBatchNorm(3, **options).eval()(share)
    assert torch.equal(output, nn.BatchNorm1d(3, **options)(share))
    assert calls == []


def is_alone_outside_the_group(rank: int, world_size: int) -> None:
    first: Any = dist.new_group([0])
    share = _inputs(world_size, sizes=(4, 7))[rank]
    output = SyncBatchNorm(3, process_group=first, dtype=torch.float64)(share)
    torch.testing.assert_close(output, nn.BatchNorm1d(3, dtype=torch.float64)(share), **_EXACT)


def keeps_memory_format(rank: int, world_size: int) -> None:
    for shape, memory_format in (((2, 3, 4, 5), torch.channels_last), ((2, 3, 4, 5, 2), torch.channels_last_3d)):
        x = torch.randn(shape).contiguous(memory_format=memory_format).requires_grad_()
        output = SyncBatchNorm(3)(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        assert output.is_contiguous(memory_format=memory_format)
        assert gradient.is_contiguous(memory_format=memory_format)


def refuses_one_value(rank: int, world_size: int) -> None:
    layer = SyncBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(BatchNormInputError, match="a BatchNorm layer needs more than 1 value per channel in training"):
        layer(torch.ones(1 if rank == 1 else 0, 3))
    assert torch.equal(layer.running_var, before["running_var"])
    assert layer(torch.full((1, 3), float(rank))).shape == (1, 3)


def refuses_inputs(rank: int, world_size: int) -> None:
    for shape in ((3,), (1, 3, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match=f"expected 2D to 5D input \\(got {len(shape)}D input\\)"):
            SyncBatchNorm(3)(torch.ones(shape))
    options = ({}, {"affine": False}, {"track_running_stats": False})
    for channels, chosen in ((channels, chosen) for channels in (1, 5) for chosen in options):
        with pytest.raises(
            BatchNormInputError,
            match=rf"a BatchNorm layer takes inputs of 3 channels \(got one of shape \(2, {channels}\)\)",
        ):
            SyncBatchNorm(3, **chosen)(torch.ones(2, channels))
    with pytest.raises(BatchNormInputError, match=r"a BatchNorm layer takes inputs on cpu or cuda \(got one on meta\)"):
        SyncBatchNorm(3)(torch.ones(2, 3, device="meta"))


_USES: list[Callable[[int, int], None]] = [
    trains_in_ddp,
    is_checkpointed,
    is_copied,
    diverges_without_a_warning,
    refuses_to_be_differentiated_twice,
    is_alone_in_evaluation,
    is_alone_outside_the_group,
    keeps_memory_format,
    refuses_inputs,
]


def run_uses(rank: int, world_size: int, directory: Path, device: str) -> None:
    uses = [*_USES, refuses_one_value] if device == "cpu" else _USES  # the host does not learn of it
    torch.set_default_device(device)
    with stock_group(rank, world_size, directory):
        for use in uses:
            use(rank, world_size)


@pytest.mark.parametrize(("device", "world_size"), [("cpu", 2), ("cpu", 3), *[("cuda", 2)] * _HAS_GPU])
def test_uses(tmp_path: Path, device: str, world_size: int) -> None:
    """Accumulation, checkpointing, copies, gradients of gradients; and what a layer refuses, on every rank."""
    run_ranks(run_uses, world_size, tmp_path, device)


def _two_forwards(rank: int, stem: SyncBatchNorm, head: SyncBatchNorm) -> None:
    head(torch.randn(2, 5)) if rank == 1 else stem(torch.randn(2, 3))


def _forward_and_backward(rank: int, stem: SyncBatchNorm, head: SyncBatchNorm) -> None:
    output = stem(torch.randn(2, 3, requires_grad=True))
    head(torch.randn(2, 5)) if rank == 1 else output.sum().backward()


def _forward_and_backward_of_one(rank: int, *_: SyncBatchNorm) -> None:
    layer = SyncBatchNorm(3)
    output = layer(torch.randn(2, 3, requires_grad=True))
    layer(torch.randn(2, 3)) if rank == 1 else output.sum().backward()


_MEETINGS = {
    _two_forwards: ("is in the forward pass of 0", "is in the forward pass of 1"),
    _forward_and_backward: ("is in the backward pass of 0", "is in the forward pass of 1"),
    _forward_and_backward_of_one: ("is in the backward pass of the layer", "is in the forward pass of the layer"),
}


def meet_elsewhere(rank: int, world_size: int, directory: Path) -> list[str]:
    messages = []
    with stock_group(rank, world_size, directory):
        for meeting in _MEETINGS:
            layers: Any = convert_sync_batchnorm(nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(5)]))
            with pytest.raises(BatchNormMismatchError) as caught:
                meeting(rank, *layers)
            messages.append(str(caught.value))
    return messages


def test_ranks_in_different_layers(tmp_path: Path) -> None:
    """Every rank names who is where: in two layers' forward passes, in forward and backward."""
    expected = [
        f"ranks are in different BatchNorm layers: rank 0 {most}, rank 1 {one}, rank 2 {most}; every rank must run "
        "the same layers in the same order, so leave those that only some ranks run out of the conversion (exclude=)"
        for most, one in _MEETINGS.values()
    ]
    assert run_ranks(meet_elsewhere, 3, tmp_path) == [expected] * 3


def test_one_process_is_torchs() -> None:
    """Without a process group it is torch's layer, to the last bit, and says nothing to anybody."""
    ours, plain = SyncBatchNorm(3), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(ours(x), plain(x))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(torch.ones(1, 3))


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_state_dict_of_batchnorm(options: dict[str, Any]) -> None:
    """A state dict of one fits the other, in both directions, and has the same keys in the same order."""
    ours, plain = SyncBatchNorm(3, **options), nn.BatchNorm2d(3, **options)
    plain(torch.randn(4, 3, 5, 5))
    ours.load_state_dict(plain.state_dict())
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)
    ours(torch.randn(4, 3, 5, 5))
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(plain.state_dict(), ours.state_dict(), rtol=0, atol=0)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    offset=st.floats(-1e8, 1e8),
    spread=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1000),
)
def test_merge(sizes: list[int], offset: float, spread: float, seed: int) -> None:
    """Parts of any size, none included, have the statistics of all their values together, also far from zero."""
    generator = np.random.default_rng(seed)
    parts = [generator.standard_normal((size, 3)) * spread + offset for size in sizes]
    rows = [np.concatenate([[len(part)], part.mean(0), part.var(0)]) if len(part) else np.zeros(7) for part in parts]
    joint = merge(np.stack(rows))

    joined = np.concatenate(parts) if sum(sizes) else np.zeros((1, 3))
    assert joint.count == sum(sizes)
    # Means have been rounded to the last place that the offset leaves them.
    last_place = 4 * np.finfo(float).eps * (abs(offset) + spread)
    np.testing.assert_allclose(joint.mean, joined.mean(0), rtol=0, atol=last_place)
    np.testing.assert_allclose(joint.var, joined.var(0), rtol=1e-10, atol=4 * last_place * (spread + last_place))


@pytest.mark.parametrize("process_group", ["node", 2])
def test_a_layer_takes_no_recipe_for_a_group(process_group: Any) -> None:
    """What a conversion makes a group of is refused, though in one process it would never be missed."""
    with pytest.raises(ConversionError, match=r"^process_group of a layer must be None or a ProcessGroup \(got "):
        SyncBatchNorm(3, process_group=process_group)


@pytest.mark.skipif("bias" not in inspect.signature(nn.BatchNorm1d).parameters, reason="this torch has no bias=")
def test_a_layer_without_bias() -> None:
    """As torch's, where torch has it."""
    layer = SyncBatchNorm(3, bias=False)
    assert list(layer.state_dict()) == list(nn.BatchNorm1d(3, bias=False).state_dict())
