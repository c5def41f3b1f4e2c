"""Synchronised BatchNorm layers on several ranks give what one process gives for the
joined batch.

1. ``CASES`` are layers, and batches of the ranks.
2. On each rank, a case is run by our layer, and by torch's in float64, which has the
   batches of all ranks.
3. ``all_deviations`` describes results that are too far apart.

``tests/gpu`` repeats this on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext import SyncBatchNorm
from tests.harness.training import Kind, on_ranks

STEPS = 2
HALF = (torch.bfloat16, torch.float16)
UNCHANGED = nn.Identity()
Results = dict[str, Tensor]


# Cases.


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
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    input_dtype: torch.dtype | None = None
    fill: Callable[[Any], Any] = UNCHANGED
    layout: Callable[[Any], Any] = UNCHANGED
    prepare: Callable[[Any], Any] = UNCHANGED
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

    def _batch(self, shape: tuple[int, ...], generator: torch.Generator) -> Batch:
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


_IMAGES: tuple[tuple[int, ...], ...] = ((4, 3, 5, 5),)
_UNEVEN: tuple[tuple[int, ...], ...] = ((4, 3, 5, 5), (1, 3, 2, 7), (3, 3, 6, 1))

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


# Run a case, on a rank.


@dataclass(frozen=True)
class Way:
    """How ranks compute.

    Attributes:
        world_size: the number of ranks.
        kind: the class of the layer.
        device: that of the layer and the batches.
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
    """Return the output and the input's gradient, as rows; gradients add up in the layer."""
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


# Judge.

# How far a result may be from the exact one, relative to the largest value, or to 1.
TOLERANCES = {
    torch.int64: 0.0,
    torch.float64: 1e-10,
    torch.float32: 2e-6,
    **{dtype: torch.finfo(dtype).eps for dtype in HALF},
}


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


def deviations_on_cpu(kind: Kind, directory: Path) -> list[str]:
    return all_deviations(Way(world_size=dist.get_world_size()), dist.get_rank())


def test_layers_on_three_ranks_equal_one_with_the_joined_batch(tmp_path: Path) -> None:
    """Outputs, gradients and running statistics are those of the joined batch.

    This holds for several steps and any input on CPU; `make gpu` checks CUDA.
    """
    assert on_ranks("stock", deviations_on_cpu, tmp_path, world_size=3) == [[], [], []]
