"""What the tests of the BatchNorm layer give it: batches of all shapes, in all memory formats and precisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)

Change = Callable[[Any], Any]
Shape = tuple[int, ...]


def unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Case:
    """A layer and what it is given.

    ``shapes`` are those of the ranks' batches, over and over where there are more ranks; ``fill`` makes data from
    normal random numbers, ``layout`` puts data (and gradients, unless they have a layout of their own) in memory,
    ``prepare`` is done to the layer.
    """

    name: str
    shapes: tuple[Shape, ...]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    input_dtype: torch.dtype | None = None
    autocast: bool = False
    fill: Change = unchanged
    layout: Change = unchanged
    layout_of_gradient: Change | None = None
    prepare: Change = unchanged
    input_needs_grad: bool = True

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype}, input {self.input_dtype or self.dtype})"

    def shares(self, world_size: int, step: int) -> list[tuple[Tensor, Tensor]]:
        """Inputs of all ranks, and gradients of their outputs; the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        shapes = [self.shapes[rank % len(self.shapes)] for rank in range(world_size)]
        return [self._share(shape, generator) for shape in shapes]

    def values(self, world_size: int) -> int:
        """How many values a channel has in all ranks' batches together."""
        return sum(len(rows(input)) for input, _ in self.shares(world_size, 0))

    def layer(self, kind: type[nn.Module]) -> Any:
        """A layer of this kind, with parameters and running statistics that are not those of a new one."""
        layer = kind(self.shapes[0][1], **self.options, dtype=self.dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for value in layer.state_dict().values():
                if value.is_floating_point():
                    value.copy_(torch.rand(value.shape, generator=generator, dtype=torch.float64) + 0.5)
        self.prepare(layer)
        return layer

    def _share(self, shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise, other = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        # Gradients of parameters, which are sums over the batch, are not to be differences of large numbers.
        dtype = self.input_dtype or self.dtype
        layout_of_gradient = self.layout_of_gradient or self.layout
        return self.layout(self.fill(noise).to(dtype)), layout_of_gradient((other + noise + 1).to(dtype))


def rows(batch: Tensor) -> Tensor:
    """A batch (N, C, ...) as (values a channel, C): batches of all shapes can be joined this way."""
    return batch.movedim(1, -1).flatten(0, -2)


def _frozen(layer: nn.Module) -> None:
    layer.requires_grad_(False)


def _weight_frozen(layer: Any) -> None:
    layer.weight.requires_grad_(False)


def _without_bias(layer: Any) -> None:
    layer.register_parameter("bias", None)


def _in_evaluation(layer: nn.Module) -> None:
    layer.eval()


def _with_gaps(values: Tensor) -> Tensor:
    return torch.stack([values, values], dim=-1)[..., 0]


def _transposed(values: Tensor) -> Tensor:
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def _expanded(values: Tensor) -> Tensor:
    return values[..., :1].expand(values.shape)


def _channels_last(values: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return values.contiguous(memory_format=formats[values.dim()])


def _far_off(values: Tensor) -> Tensor:
    return values + 1e4


def _far_off_in_a_channel(values: Tensor) -> Tensor:
    offsets = torch.zeros(values.size(1), dtype=values.dtype)
    offsets[0] = -300.0
    return values + offsets.view([1, -1] + [1] * (values.dim() - 2))


def _constant(values: Tensor) -> Tensor:
    return torch.full_like(values, 2.5)


def _constant_zero_channel(values: Tensor) -> Tensor:
    values = values.clone()
    values[:, 0] = 0.0
    return values


_IMAGES: tuple[Shape, ...] = ((4, 3, 5, 5),)
_UNEVEN: tuple[Shape, ...] = ((4, 3, 5, 5), (1, 3, 2, 7), (3, 3, 6, 1))

_IN_ALL_PRECISIONS = [
    Case("2-D", ((5, 3),)),
    Case("3-D", ((4, 3, 6),)),
    Case("4-D", _IMAGES),
    Case("5-D", ((2, 3, 4, 3, 2),)),
    Case("one channel", ((4, 1, 3, 3),)),
    Case("many channels", ((3, 300),)),
    Case("uneven batches", ((5, 3, 4, 4), (2, 3, 4, 4), (1, 3, 4, 4))),
    Case("uneven spatial sizes", _UNEVEN),
    Case("nothing on rank 0", ((0, 3, 4, 4), (3, 3, 4, 4))),
    Case("nothing on rank 1", ((3, 3, 4, 4), (0, 3, 4, 4))),
    Case("no pixels on rank 1", ((3, 3, 4, 4), (3, 3, 0, 4))),
    Case("one sample a rank, 2-D", ((1, 3),)),
    Case("one sample a rank, 4-D", ((1, 3, 4, 4),)),
    Case("nothing anywhere", ((0, 3, 4, 4),)),
    Case("momentum None", _UNEVEN, {"momentum": None}),
    Case("momentum 1", _IMAGES, {"momentum": 1.0}),
    Case("momentum 0", _IMAGES, {"momentum": 0.0}),
    Case("large eps", _IMAGES, {"eps": 0.5}),
    Case("no affine", _UNEVEN, {"affine": False}),
    Case("no running statistics", _UNEVEN, {"track_running_stats": False}),
    Case("neither", _IMAGES, {"affine": False, "track_running_stats": False}),
    Case("evaluation", _UNEVEN, prepare=_in_evaluation),
    Case("frozen", _UNEVEN, prepare=_frozen),
    Case("frozen weight", _IMAGES, prepare=_weight_frozen),
    Case("no bias", _IMAGES, prepare=_without_bias),
    Case("input without gradient", _UNEVEN, input_needs_grad=False),
    Case("nothing on rank 0, input without gradient", ((0, 3), (3, 3)), input_needs_grad=False),
    Case("no gradients at all", _IMAGES, prepare=_frozen, input_needs_grad=False),
    Case("channels_last", _IMAGES, layout=_channels_last),
    Case("channels_last_3d", ((2, 3, 4, 3, 2),), layout=_channels_last),
    Case("channels_last, gradient not", _IMAGES, layout=_channels_last, layout_of_gradient=unchanged),
    Case("gradient channels_last, input not", _IMAGES, layout_of_gradient=_channels_last),
    Case("with gaps", _IMAGES, layout=_with_gaps),
    Case("transposed", ((4, 3, 6),), layout=_transposed),
    Case("expanded", _IMAGES, layout=_expanded),
    Case("far off", _UNEVEN, fill=_far_off),
    Case("far off, 2-D", ((16, 3),), fill=_far_off),
    Case("far off, nothing on rank 0", ((0, 3, 4), (6, 3, 4)), fill=_far_off),
    Case("far off in a channel", _IMAGES, fill=_far_off_in_a_channel),
    Case("constant", _IMAGES, fill=_constant),
    Case("a channel of zeros", _UNEVEN, fill=_constant_zero_channel),
]  # fmt: skip

_IN_HALF_PRECISION = [
    Case("half input", _UNEVEN, dtype=torch.float32),
    Case("half input, channels_last", _IMAGES, dtype=torch.float32, layout=_channels_last),
    Case("half input, nothing on rank 0", ((0, 3, 4), (6, 3, 4)), dtype=torch.float32),
    Case("half input, no affine", _IMAGES, {"affine": False}, dtype=torch.float32),
    Case("half input, no running statistics", _IMAGES, {"track_running_stats": False}, dtype=torch.float32),
    Case("half input under autocast", _UNEVEN, dtype=torch.float32, autocast=True),
]

CASES = [
    *(replace(case, dtype=dtype) for case in _IN_ALL_PRECISIONS for dtype in (torch.float64, torch.float32)),
    *(replace(case, input_dtype=dtype) for case in _IN_HALF_PRECISION for dtype in HALF),
    *(Case("half layer", _UNEVEN, dtype=dtype) for dtype in HALF),
    *(Case("half layer, many values", ((8, 3, 24, 24),), dtype=dtype) for dtype in HALF),
    Case("float32 under autocast", _UNEVEN, dtype=torch.float32, autocast=True),
    Case("large", ((8, 16, 32, 32), (5, 16, 32, 32)), dtype=torch.float32),
]
