"""The synchronised BatchNorm layer: several ranks' layers give what one process gives for
the joined batch; the layer alone, in groups of ranks, and its errors.

The reference is torch's layer in one process that has all ranks' batches, in float64.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext import (
    BatchNormError,
    ConfigurationError,
    SyncBatchNorm,
    convert_sync_batchnorm,
)
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group

STEPS = 2
HALF = (torch.bfloat16, torch.float16)
# How far a result may be from the exact one, relative to the largest value, or to 1.
TOLERANCES = {
    torch.int64: 0.0,
    torch.float64: 1e-10,
    torch.float32: 2e-6,
    **{dtype: torch.finfo(dtype).eps for dtype in HALF},
}

Change = Callable[[Any], Any]
Shape = tuple[int, ...]
Results = dict[str, Tensor]


def unchanged(value: Any) -> Any:
    return value


class Batch(NamedTuple):
    """A rank's input, and the gradient of its output."""

    input: Tensor
    gradient: Tensor

    def to(self, *target: Any) -> Batch:
        return Batch(self.input.to(*target), self.gradient.to(*target))


@dataclass(frozen=True)
class Case:
    """A layer, and the batches of all ranks.

    Attributes:
        name: a description for a failing test.
        shapes: the shapes of the ranks' batches; further ranks begin again with the
            first.
        options: arguments of the layer.
        dtype: that of the layer.
        input_dtype: that of the batches; ``None`` is the layer's.
        fill: makes a batch from normal random numbers.
        layout: changes the memory format of batches and gradients.
        prepare: changes the layer before its first step.
        input_needs_grad: whether the input's gradient is computed.
    """

    name: str
    shapes: tuple[Shape, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    input_dtype: torch.dtype | None = None
    fill: Change = unchanged
    layout: Change = unchanged
    prepare: Change = unchanged
    input_needs_grad: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, input {self.input_dtype or self.dtype})"

    def batches(self, world_size: int, step: int) -> list[Batch]:
        """Return the batches of all ranks in a step, the same in each call."""
        generator = torch.Generator().manual_seed(step)
        shapes = [self.shapes[rank % len(self.shapes)] for rank in range(world_size)]
        return [self._batch(shape, generator) for shape in shapes]

    def layer(self, kind: type[nn.Module]) -> Any:
        """Return a layer whose parameters and statistics are not initial ones."""
        layer = kind(self.shapes[0][1], **self.options, dtype=self.dtype)
        generator = torch.Generator().manual_seed(0)
        for value in layer.state_dict().values():
            if value.is_floating_point():
                drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64)
                value.copy_(drawn + 0.5)
        self.prepare(layer)
        return layer

    def _batch(self, shape: Shape, generator: torch.Generator) -> Batch:
        noise, other = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        dtype = self.input_dtype or self.dtype
        # Gradients of parameters, which are sums over the batch, are not to be
        # differences of large numbers.
        gradient = (other + noise + 1).to(dtype)
        return Batch(self.layout(self.fill(noise).to(dtype)), self.layout(gradient))


def rows(batch: Tensor) -> Tensor:
    """Reshape a batch (N, C, ...) to (values per channel, C).

    Batches of all shapes can then be joined.
    """
    return batch.movedim(1, -1).flatten(0, -2)


def channels_last(values: Tensor) -> Tensor:
    return values.contiguous(
        memory_format=torch.channels_last if values.dim() == 4 else torch.channels_last_3d
    )


def far_off(values: Tensor) -> Tensor:
    return values + 1e4


_IMAGES: tuple[Shape, ...] = ((4, 3, 5, 5),)
_UNEVEN: tuple[Shape, ...] = ((4, 3, 5, 5), (1, 3, 2, 7), (3, 3, 6, 1))

_IN_ALL_PRECISIONS = [
    Case("2-D", ((5, 3),)),
    Case("5-D", ((2, 3, 4, 3, 2),)),
    Case("many channels", ((3, 300),)),
    Case("uneven", _UNEVEN),
    Case("nothing on rank 0", ((0, 3, 4, 4), (3, 3, 4, 4))),
    Case("no pixels on rank 1", ((3, 3, 4, 4), (3, 3, 0, 4))),
    Case("one sample a rank", ((1, 3, 2),)),
    Case("nothing anywhere", ((0, 3, 4, 4),)),
    Case("momentum None", _UNEVEN, {"momentum": None}),
    Case("no momentum, large eps", _IMAGES, {"momentum": 0.0, "eps": 0.5}),
    Case("no affine", _UNEVEN, {"affine": False}),
    Case("no running statistics", _UNEVEN, {"track_running_stats": False}),
    Case("evaluation", _UNEVEN, prepare=nn.Module.eval),
    Case("frozen", _UNEVEN, prepare=lambda layer: layer.requires_grad_(False)),
    Case("no bias", _IMAGES, prepare=lambda layer: layer.register_parameter("bias", None)),
    Case("input without gradient", ((0, 3), (3, 3)), input_needs_grad=False),
    Case("channels_last", _IMAGES, layout=channels_last),
    Case("channels_last_3d", ((2, 3, 4, 3, 2),), layout=channels_last),
    Case("expanded", _IMAGES, layout=lambda values: values[..., :1].expand(values.shape)),
    Case("far off", _UNEVEN, fill=far_off),
    Case("far off, nothing on rank 0", ((0, 3), (16, 3)), fill=far_off),
    Case("constant", _IMAGES, fill=lambda values: torch.full_like(values, 2.5)),
]
_OF_HALF_INPUTS = [
    Case("half input", _UNEVEN, dtype=torch.float32),
    Case("half input, nothing on rank 0", ((0, 3, 4), (6, 3, 4)), dtype=torch.float32),
    Case(
        "half input, no running statistics",
        _IMAGES,
        {"track_running_stats": False},
        dtype=torch.float32,
    ),
]
CASES = [
    *(
        replace(case, dtype=dtype)
        for case in _IN_ALL_PRECISIONS
        for dtype in (torch.float64, torch.float32)
    ),
    *(replace(case, input_dtype=dtype) for case in _OF_HALF_INPUTS for dtype in HALF),
    *(Case("half layer", _UNEVEN, dtype=dtype) for dtype in HALF),
    *(Case("half layer, many values", ((8, 3, 24, 24),), dtype=dtype) for dtype in HALF),
    Case("large", ((8, 16, 32, 32), (5, 16, 32, 32)), dtype=torch.float32),
]


@dataclass(frozen=True)
class Way:
    """How ranks compute.

    Attributes:
        slack: a factor of the allowed error. Torch's kernels on a GPU merge what each
            rank has rounded to float32, which costs a digit.
    """

    world_size: int
    kind: type[SyncBatchNorm] = SyncBatchNorm
    device: str = "cpu"
    slack: float = 1.0


def results_of_layer(case: Case, way: Way, rank: int) -> Results:
    """Return this rank's results, with the sums of all ranks' parameter gradients."""
    layer = case.layer(way.kind).to(way.device)
    results: Results = {}
    for step in range(STEPS):
        batches = case.batches(way.world_size, step)
        results |= run_step(case, layer, batches[rank].to(way.device), step)
    gradients = parameter_gradients(layer)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    results |= gradients | dict(layer.named_buffers())
    return {name: value.cpu() for name, value in results.items()}


def exact_results(case: Case, way: Way, rank: int) -> Results:
    """Return this rank's part of torch's results for the joined batch."""
    layer = case.layer(nn.BatchNorm1d).double()
    results: Results = {}
    for step in range(STEPS):
        batches = case.batches(way.world_size, step)
        joined = Batch(
            torch.cat([rows(batch.input) for batch in batches]).double(),
            torch.cat([rows(batch.gradient) for batch in batches]).double(),
        )
        sizes = [len(rows(batch.input)) for batch in batches]
        results_of_all = run_step(case, layer, joined, step)
        results |= {name: value.split(sizes)[rank] for name, value in results_of_all.items()}
    return results | parameter_gradients(layer) | dict(layer.named_buffers())


def run_step(case: Case, layer: nn.Module, batch: Batch, step: int) -> Results:
    input = batch.input.detach().requires_grad_(case.input_needs_grad)
    output = layer(input)
    assert output.dtype == input.dtype
    if case.layout is channels_last and input.dim() > 2:
        assert output.stride() == input.stride()
    results = {f"output {step}": rows(output.detach())}
    if output.requires_grad:
        output.backward(batch.gradient)
    if input.grad is not None:
        results[f"input gradient {step}"] = rows(input.grad)
    return results


def parameter_gradients(layer: nn.Module) -> Results:
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {f"gradient of {name}": value for name, value in gradients.items() if value is not None}


def deviations(case: Case, way: Way, rank: int) -> list[str]:
    """Describe results that are too far from the exact ones."""
    ours = results_of_layer(case, way, rank)
    exact = exact_results(case, way, rank)
    assert ours.keys() == exact.keys()
    found = []
    for name, value in ours.items():
        assert value.shape == exact[name].shape, f"{case}: {name}"
        error = distance(value, exact[name])
        largest = max(1.0, distance(exact[name], torch.zeros_like(exact[name])))
        allowed = way.slack * TOLERANCES[value.dtype] * largest
        if not error <= allowed:  # also if it is NaN
            found.append(f"{case}: {name} is {error:.2e} off instead of {allowed:.2e}")
    return found


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference."""
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def all_deviations(way: Way, rank: int) -> list[str]:
    """Describe the deviations of all cases, in a process group; none if the layer is right."""
    return [line for case in CASES for line in deviations(case, way, rank)]


def deviations_on_cpu(rank: int, world_size: int, directory: Path) -> list[str]:
    with stock_group(rank, world_size, directory):
        return all_deviations(Way(world_size=world_size), rank)


def test_equals_the_joined_batch(tmp_path: Path) -> None:
    """Outputs, gradients and running statistics are those of the joined batch.

    This holds for several steps and any input on CPU; `make gpu` checks CUDA.
    """
    assert run_ranks(deviations_on_cpu, 3, tmp_path) == [[], [], []]


# Groups, and errors.


def in_group(
    rank: int, world_size: int, directory: Path, check: Callable[[int, Tensor], None]
) -> None:
    """Call ``check`` with this rank and its batch, in a process group."""
    with stock_group(rank, world_size, directory):
        check(rank, torch.randn(4 + rank, 3))


def normalises_alone(rank: int, batch: Tensor) -> None:
    """In evaluation and outside of the group, a rank does not wait for the others; the layer
    normalises its batch as torch's does.
    """
    if rank == 0:  # it must not wait for the other rank
        options: Any = {"track_running_stats": False}
        evaluated = SyncBatchNorm(3, **options).eval()(batch)
        assert torch.equal(evaluated, nn.BatchNorm1d(3, **options)(batch))
    first: Any = dist.new_group([0])
    normalised = SyncBatchNorm(3, process_group=first)(batch)
    torch.testing.assert_close(normalised, nn.BatchNorm1d(3)(batch))


def refuses_inputs(rank: int, _: Tensor) -> None:
    """Inputs that the kernels cannot take raise on every rank, with the dimensions or the
    shape.
    """
    with pytest.raises(ValueError, match=r"expected 2D to 5D input \(got 1D input\)"):
        SyncBatchNorm(3)(torch.ones(3))
    for channels in (1, 5):
        message = rf"expects inputs with 3 channels \(got shape \(2, {channels}\)"
        with pytest.raises(BatchNormError, match=message):
            SyncBatchNorm(3, affine=False)(torch.ones(2, channels))


def refuses_one_value(rank: int, _: Tensor) -> None:
    """One value on all ranks together raises on every rank, which keeps its running
    statistics and takes more values later.
    """
    layer = SyncBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        BatchNormError, match="a BatchNorm layer needs more than 1 value per channel in training"
    ):
        layer(torch.ones(1 if rank == 1 else 0, 3))
    assert torch.equal(layer.running_mean, before["running_mean"])
    assert torch.equal(layer.running_var, before["running_var"])
    assert layer(torch.full((1, 3), float(rank))).shape == (1, 3)


def refuses_second_derivative(_: int, batch: Tensor) -> None:
    """The layer cannot be differentiated twice: every rank raises, instead of computing a
    wrong gradient.
    """
    loss = SyncBatchNorm(3)(batch.requires_grad_()).square().sum()
    [gradient] = torch.autograd.grad(loss, batch, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice a function"):
        gradient.square().sum().backward()


@pytest.mark.parametrize(
    "check", [normalises_alone, refuses_inputs, refuses_one_value, refuses_second_derivative]
)
def test_the_layer_on_two_ranks(check: Callable[[int, Tensor], None], tmp_path: Path) -> None:
    """Each rank does what the functions above say."""
    run_ranks(in_group, 2, tmp_path, check)


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_one_process_is_torchs(options: dict[str, Any]) -> None:
    """Without a process group the layer is torch's, to the last bit.

    The state dict of one fits the other.
    """
    ours = SyncBatchNorm(3, **options)
    plain = nn.BatchNorm2d(3, **options)
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(ours(x), plain(x))
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)
    ours.load_state_dict(plain.state_dict())
    plain.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("make", [SyncBatchNorm, convert_sync_batchnorm])
@pytest.mark.parametrize("group", ["node", [0, 1], -100])
def test_what_cannot_be_a_group_is_refused(make: Any, group: Any) -> None:
    """The error has the value and the allowed ones.

    Torch's placeholder for a group without this rank is the same number as -100.
    """
    layer = nn.BatchNorm1d(3)
    with pytest.raises(ConfigurationError) as raised:
        make(layer if make is convert_sync_batchnorm else 3, process_group=group)
    assert str(raised.value).startswith(
        "process_group must be a torch.distributed.ProcessGroup, as dist.new_group returns it, or"
        f" None for all ranks (got {group!r})"
    )
    assert type(layer) is nn.BatchNorm1d


def means_of_groups(rank: int, world_size: int, directory: Path) -> dict[str, float]:
    """Return the mean over this rank's group, for each form of the argument.

    The batch of rank r has the mean 2 ** r.
    """
    with stock_group(rank, world_size, directory):
        outer = dist.new_group([0, 3])
        inner = dist.new_group([1, 2])
        groups: dict[str, Any] = {
            "None": None,
            "own group": outer if rank in (0, 3) else inner,
            "others' group": dist.new_group([0, 1]),
        }
        layers: dict[str, Any] = {
            form: convert_sync_batchnorm(nn.BatchNorm1d(1, momentum=1.0), process_group=group)
            for form, group in groups.items()
        }
        layers["pickled"] = pickle.loads(pickle.dumps(layers["own group"]))
        for layer in layers.values():
            layer(torch.tensor([[-1.0], [1.0]]) + 2**rank)
        return {form: layer.running_mean.item() for form, layer in layers.items()}


def test_statistics_are_those_of_the_ranks_in_the_group(tmp_path: Path) -> None:
    """Only ranks of the group count; a rank outside of it is alone.

    A pickled layer uses all ranks.
    """
    of_all = {"None": 3.75, "pickled": 3.75}
    assert run_ranks(means_of_groups, 4, tmp_path) == [
        {**of_all, "own group": 4.5, "others' group": 1.5},
        {**of_all, "own group": 3.0, "others' group": 1.5},
        {**of_all, "own group": 3.0, "others' group": 4.0},
        {**of_all, "own group": 4.5, "others' group": 8.0},
    ]
