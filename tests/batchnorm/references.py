"""What a synchronised BatchNorm layer gives, and what one process' torch BatchNorm does for the joined batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext import SyncBatchNorm
from tests.batchnorm.cases import HALF, Case, rows

STEPS = 2

# What counts as exact, in parts of the largest value (float64: of one, if that is more); half precision: last place.
_EXACT = {torch.float64: 1e-10, torch.float32: 1e-6, **{dtype: torch.finfo(dtype).eps for dtype in HALF}}

Results = dict[str, Tensor]


def of_layer(
    case: Case, kind: type[SyncBatchNorm], rank: int, world_size: int, device: str
) -> tuple[Results, list[str]]:
    """What the ranks' layers give this rank, parameter gradients summed; and the collectives that this took."""
    layer = case.layer(kind).to(device)
    results: Results = {}
    with collectives() as calls:
        for step in range(STEPS):
            input, gradient = (tensor.to(device) for tensor in case.shares(world_size, step)[rank])
            results |= _of_step(case, layer, input, gradient, step)
    gradients = _of_parameters(layer)
    for value in gradients.values():
        dist.all_reduce(value)
    return _at_hand(results | gradients | dict(layer.named_buffers())), calls


def of_one_process(case: Case, rank: int, world_size: int, device: str, dtype: torch.dtype | None = None) -> Results:
    """What torch gives for the joined batch, this rank's part of it; computed in ``dtype`` (None: as the case is)."""
    layer = case.layer(nn.BatchNorm1d).to(device, dtype)
    results: Results = {}
    for step in range(STEPS):
        shares = [(rows(input), rows(gradient)) for input, gradient in case.shares(world_size, step)]
        input, gradient = (torch.cat(parts).to(device, dtype) for parts in zip(*shares, strict=True))
        sizes = [len(input) for input, _ in shares]
        joint = _of_step(case, layer, input, gradient, step)
        results |= {name: value.split(sizes)[rank] for name, value in joint.items()}
    return _at_hand(results | _of_parameters(layer) | dict(layer.named_buffers()))


def _at_hand(results: Results) -> Results:
    return {name: value.cpu() for name, value in results.items()}


def _of_step(case: Case, layer: nn.Module, input: Tensor, gradient: Tensor, step: int) -> Results:
    input = input.detach().requires_grad_(case.input_needs_grad)
    with torch.autocast(input.device.type, torch.bfloat16) if case.autocast else nullcontext():
        output = layer(input)
    results = {f"output {step}": rows(output.detach())}
    if output.requires_grad:
        output.backward(gradient)
    if input.grad is not None:
        results[f"input gradient {step}"] = rows(input.grad)
    return results


def _of_parameters(layer: nn.Module) -> Results:
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {f"gradient of {name}": value for name, value in gradients.items() if value is not None}


def deviations(ours: Results, exact: Results, torchs: Results, slack: float = 1.0) -> list[str]:
    """What is neither exact nor as near to that as torch is, with ``slack`` times as much allowed."""
    if ours.keys() != exact.keys():
        return [f"has {sorted(ours)} instead of {sorted(exact)}"]
    found = [_deviation(name, ours[name], exact[name], torchs[name], slack) for name in ours]
    return [line for line in found if line]


def _deviation(name: str, ours: Tensor, exact: Tensor, torchs: Tensor, slack: float) -> str:
    if (ours.shape, ours.dtype) != (torchs.shape, torchs.dtype):
        return f"{name} is {ours.dtype} {tuple(ours.shape)} instead of {torchs.dtype} {tuple(torchs.shape)}"
    error, of_torch = _distance(ours, exact), _distance(torchs, exact)
    largest = max(_distance(exact, torch.zeros_like(exact)), 1.0 if ours.dtype == torch.float64 else 0.0)
    allowed = slack * max(of_torch, _EXACT.get(ours.dtype, 0.0) * largest)
    return "" if error <= allowed else f"{name} is {error:.2e} off instead of {allowed:.2e}"


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


# What a layer calls: torch has renamed it in 2.13.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the collectives that are called within."""
    calls: list[str] = []
    names = ("all_gather", GATHER, "all_reduce", "broadcast", "barrier", "reduce_scatter")
    originals = {name: getattr(dist, name) for name in names}
    for name, original in originals.items():
        setattr(dist, name, _counted(name, original, calls))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _counted(name: str, original: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    return call


def expected_collectives(case: Case) -> int:
    """One forward and one backward, if the layer is in training and its input needs a gradient."""
    training = case.layer(SyncBatchNorm).training
    return STEPS * (training + (training and case.input_needs_grad))
