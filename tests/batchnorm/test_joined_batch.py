"""The synchronised BatchNorm layer gives what one process gives for all ranks' batches
joined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext import SyncBatchNorm
from tests.harness.ranks import run_ranks

STEPS = 2
HALF = (torch.bfloat16, torch.float16)
# What counts as exact, in parts of the largest value (float64: of one, if that is
# more); half precision: last place.
_EXACT = {
    torch.float64: 1e-10,
    torch.float32: 1e-6,
    **{dtype: torch.finfo(dtype).eps for dtype in HALF},
}

Change = Callable[[Any], Any]
Shape = tuple[int, ...]
Results = dict[str, Tensor]


def unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Case:
    """A layer and what it is given.

    ``shapes`` are those of the ranks' batches, over and over where there are more
    ranks; ``fill`` makes data from normal random numbers, ``layout`` puts data (and
    gradients, unless they have their own layout) in memory, ``prepare`` is done to the
    layer.
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

    def shares(self, world_size: int, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return inputs of all ranks, and gradients of their outputs; the same on every
        rank.
        """
        generator = torch.Generator().manual_seed(step)
        shapes = [self.shapes[rank % len(self.shapes)] for rank in range(world_size)]
        return [self._share(shape, generator) for shape in shapes]

    def layer(self, kind: type[nn.Module]) -> Any:
        """Return a layer of this kind, with parameters and running statistics that are
        not those of a new one.
        """
        layer = kind(self.shapes[0][1], **self.options, dtype=self.dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for value in layer.state_dict().values():
                if value.is_floating_point():
                    value.copy_(
                        torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5
                    )
        self.prepare(layer)
        return layer

    def _share(self, shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise, other = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        # Gradients of parameters, which are sums over the batch, are not to be
        # differences of large numbers.
        dtype = self.input_dtype or self.dtype
        layout_of_gradient = self.layout_of_gradient or self.layout
        return self.layout(self.fill(noise).to(dtype)), layout_of_gradient(
            (other + noise + 1).to(dtype)
        )


def rows(batch: Tensor) -> Tensor:
    """Reshape a batch (N, C, ...) to (values per channel, C), so that batches of all
    shapes can be joined.
    """
    return batch.movedim(1, -1).flatten(0, -2)


def channels_last(values: Tensor) -> Tensor:
    return values.contiguous(
        memory_format=torch.channels_last if values.dim() == 4 else torch.channels_last_3d
    )


def far_off(values: Tensor) -> Tensor:
    return values + 1e4


def frozen(layer: nn.Module) -> None:
    layer.requires_grad_(False)


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
    Case("frozen", _UNEVEN, prepare=frozen),
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
    """How ranks compute; torch's kernels on a GPU merge what each rank has rounded to
    float32, which costs a digit.
    """

    kind: type[SyncBatchNorm] = SyncBatchNorm
    world_size: int = 3
    device: str = "cpu"
    backend: str = "gloo"
    slack: float = 1.0

    def takes(self, case: Case) -> bool:
        """One value is an error; on a GPU the host does not read their number, so zero
        or one is not detected.
        """
        values = sum(len(rows(input)) for input, _ in case.shares(self.world_size, 0))
        return values > 1 or (values == 0 and self.slack == 1.0)


def of_layer(case: Case, way: Way, rank: int) -> Results:
    """Return the results of the ranks' layers on this rank, with summed parameter
    gradients.
    """
    layer = case.layer(way.kind).to(way.device)
    results: Results = {}
    for step in range(STEPS):
        input, gradient = (
            tensor.to(way.device) for tensor in case.shares(way.world_size, step)[rank]
        )
        results |= _of_step(case, layer, input, gradient, step)
    gradients = _of_parameters(layer)
    for value in gradients.values():
        dist.all_reduce(value)
    return {
        name: value.cpu()
        for name, value in (results | gradients | dict(layer.named_buffers())).items()
    }


def of_one_process(case: Case, way: Way, rank: int, dtype: torch.dtype | None = None) -> Results:
    """Return torch's result for the joined batch, this rank's part; computed in
    ``dtype`` (None: the case's).
    """
    layer = case.layer(nn.BatchNorm1d).to(way.device, dtype)
    results: Results = {}
    for step in range(STEPS):
        shares = [
            (rows(input), rows(gradient)) for input, gradient in case.shares(way.world_size, step)
        ]
        input, gradient = (
            torch.cat(parts).to(way.device, dtype) for parts in zip(*shares, strict=True)
        )
        sizes = [len(input) for input, _ in shares]
        joint = _of_step(case, layer, input, gradient, step)
        results |= {name: value.split(sizes)[rank] for name, value in joint.items()}
    results |= _of_parameters(layer) | dict(layer.named_buffers())
    return {name: value.cpu() for name, value in results.items()}


def _of_step(case: Case, layer: nn.Module, input: Tensor, gradient: Tensor, step: int) -> Results:
    input = input.detach().requires_grad_(case.input_needs_grad)
    output = layer(input)
    if case.layout is channels_last and input.dim() > 2:
        assert output.stride() == input.stride()
    results = {f"output {step}": rows(output.detach())}
    if output.requires_grad:
        output.backward(gradient)
    if input.grad is not None:
        results[f"input gradient {step}"] = rows(input.grad)
    return results


def _of_parameters(layer: nn.Module) -> Results:
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {f"gradient of {name}": value for name, value in gradients.items() if value is not None}


def deviations(case: Case, way: Way, rank: int) -> list[str]:
    """Return results that are neither exact nor as near to exact as torch's, within the
    path's tolerance.
    """
    ours = of_layer(case, way, rank)
    exact = of_one_process(case, replace(way, device="cpu"), rank, torch.float64)
    torchs = exact if case.dtype == torch.float64 else of_one_process(case, way, rank)
    assert ours.keys() == exact.keys()
    found = []
    for name, value in ours.items():
        assert (value.shape, value.dtype) == (
            torchs[name].shape,
            torchs[name].dtype,
        ), f"{case}: {name}"
        largest = max(
            _distance(exact[name], 0 * exact[name]), 1.0 if value.dtype == torch.float64 else 0.0
        )
        allowed = way.slack * max(
            _distance(torchs[name], exact[name]), _EXACT.get(value.dtype, 0.0) * largest
        )
        if (error := _distance(value, exact[name])) > allowed:
            found.append(f"{case}: {name} is {error:.2e} off instead of {allowed:.2e}")
    return found


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def all_deviations(rank: int, world_size: int, directory: Path, way: Way) -> list[str]:
    store = f"file://{directory}/store"
    limit = timedelta(seconds=60)
    dist.init_process_group(
        way.backend, init_method=store, rank=rank, world_size=world_size, timeout=limit
    )
    found = [line for case in CASES if way.takes(case) for line in deviations(case, way, rank)]
    dist.destroy_process_group()
    return found


def test_equals_the_joined_batch(tmp_path: Path) -> None:
    """Outputs, gradients and running statistics of several steps, whatever the input;
    `make gpu` has the others.
    """
    way = Way()
    assert run_ranks(all_deviations, way.world_size, tmp_path, way) == [[]] * way.world_size
