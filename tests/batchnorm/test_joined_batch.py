"""Several ranks' layers give what one process gives for the joined batch.

Each case is computed three times: by the layer on several ranks, by torch's layer in one
process that has all ranks' batches, and by the latter in float64, which counts as exact.
The ranks' results may be as far from the exact ones as torch's, or as rounding takes
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext import SyncBatchNorm
from tests.harness.ranks import run_ranks

STEPS = 2
HALF = (torch.bfloat16, torch.float16)
# The error of rounding, relative to the largest value of a result.
_ROUNDING = {
    torch.float64: 1e-10,
    torch.float32: 1e-6,
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
        layout: changes the memory format of batches and, unless ``layout_of_gradient``
            is given, of gradients.
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
    layout_of_gradient: Change | None = None
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
        layout_of_gradient = self.layout_of_gradient or self.layout
        return Batch(self.layout(self.fill(noise).to(dtype)), layout_of_gradient(gradient))


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
    Case("one sample a rank", ((1, 3),)),
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
    Case(
        "channels_last_3d, gradient not",
        ((2, 3, 4, 3, 2),),
        layout=channels_last,
        layout_of_gradient=unchanged,
    ),
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

    kind: type[SyncBatchNorm] = SyncBatchNorm
    world_size: int = 3
    device: str = "cpu"
    backend: str = "gloo"
    slack: float = 1.0

    def takes(self, case: Case) -> bool:
        """Whether torch can compute a case; one value per channel is an error."""
        values = sum(len(rows(batch.input)) for batch in case.batches(self.world_size, step=0))
        return values != 1


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
    return on_cpu(results | gradients | dict(layer.named_buffers()))


def results_of_one_process(
    case: Case, way: Way, rank: int, dtype: torch.dtype | None = None
) -> Results:
    """Return this rank's part of torch's results for the joined batch.

    They are computed in ``dtype``; ``None`` is the case's dtype.
    """
    layer = case.layer(nn.BatchNorm1d).to(way.device, dtype)
    results: Results = {}
    for step in range(STEPS):
        batches = case.batches(way.world_size, step)
        joined = Batch(
            torch.cat([rows(batch.input) for batch in batches]),
            torch.cat([rows(batch.gradient) for batch in batches]),
        )
        sizes = [len(rows(batch.input)) for batch in batches]
        results_of_all = run_step(case, layer, joined.to(way.device, dtype), step)
        results |= {name: value.split(sizes)[rank] for name, value in results_of_all.items()}
    return on_cpu(results | parameter_gradients(layer) | dict(layer.named_buffers()))


def run_step(case: Case, layer: nn.Module, batch: Batch, step: int) -> Results:
    input = batch.input.detach().requires_grad_(case.input_needs_grad)
    output = layer(input)
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


def on_cpu(results: Results) -> Results:
    return {name: value.cpu() for name, value in results.items()}


def deviations(case: Case, way: Way, rank: int) -> list[str]:
    """Describe results whose error is larger than torch's, and than that of rounding."""
    ours = results_of_layer(case, way, rank)
    exact = results_of_one_process(case, replace(way, device="cpu"), rank, torch.float64)
    is_exact = case.dtype == torch.float64
    torchs = exact if is_exact else results_of_one_process(case, way, rank)
    assert ours.keys() == exact.keys()
    found = []
    for name, value in ours.items():
        expected = torchs[name]
        assert value.shape == expected.shape, f"{case}: {name}"
        assert value.dtype == expected.dtype, f"{case}: {name}"
        error = distance(value, exact[name])
        error_of_torch = distance(expected, exact[name])
        allowed = way.slack * max(error_of_torch, rounding(exact[name], value.dtype))
        if not error <= allowed:  # also if it is NaN
            found.append(f"{case}: {name} is {error:.2e} off instead of {allowed:.2e}")
    return found


def rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """Return the error that rounding a result to this dtype may cause."""
    largest = distance(exact, torch.zeros_like(exact))
    if dtype == torch.float64:  # values near zero are differences of larger ones
        largest = max(largest, 1.0)
    return _ROUNDING.get(dtype, 0.0) * largest  # a number of batches is not rounded


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference."""
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def all_deviations(rank: int, world_size: int, directory: Path, way: Way) -> list[str]:
    """Describe the deviations of all cases; none if the layer is right."""
    store = f"file://{directory}/store"
    limit = timedelta(seconds=60)
    dist.init_process_group(
        way.backend, init_method=store, rank=rank, world_size=world_size, timeout=limit
    )
    found = [line for case in CASES if way.takes(case) for line in deviations(case, way, rank)]
    dist.destroy_process_group()
    return found


def test_equals_the_joined_batch(tmp_path: Path) -> None:
    """Outputs, gradients and running statistics are those of the joined batch.

    This holds for several steps and any input on CPU; `make gpu` checks CUDA.
    """
    way = Way()
    no_deviations: list[list[str]] = [[]] * way.world_size
    assert run_ranks(all_deviations, way.world_size, tmp_path, way) == no_deviations
