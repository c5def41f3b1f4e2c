"""Checkpoints for the tests of this room: tensors of each kind, and how two checkpoints are compared."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext.checkpoint.load import LoadOptions, read, refuse_damage
from lightning_ddp_ext.checkpoint.zip_crc import Archive, open_archive


def numbers(*shape: int, start: float = 0.0) -> Tensor:
    """Different numbers; large enough to be mapped where there are more than 4096."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


class Owner:
    """An object of its own class that has a tensor."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Tagged(Tensor):
    """A subclass of tensors."""


def model() -> nn.Module:
    """A module with a buffer that is no part of its state."""
    module = nn.Sequential(nn.Linear(70, 90), nn.BatchNorm1d(90))
    module.register_buffer("scratch", numbers(5000), persistent=False)
    for index, parameter in enumerate(module.parameters()):
        nn.init.constant_(parameter, index)
    return module


def kinds() -> dict[str, Any]:
    """Large tensors (which are mapped) and small ones (which are not), one of each kind; always the same."""
    large = numbers(80, 100)
    complex_numbers = torch.complex(large, -large)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse tensors are said to be in beta
        return {
            "float": large.clone(),
            "integers": torch.arange(9000, dtype=torch.int16),
            "bool": large.bool(),
            "complex": complex_numbers.clone(),
            "conjugated": complex_numbers.clone().conj(),
            "negated": complex_numbers.clone().conj().imag,
            "float8": torch.arange(20_000).remainder(200).to(torch.float8_e4m3fn),
            "half": large.half(),
            "bfloat16": large.bfloat16(),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "small": numbers(3),
            "strided": numbers(100, 80)[::2, 1::3],
            "expanded": numbers(5000).expand(3, 5000),
            "coo": large.to_sparse(),
            "uncoalesced": torch.sparse_coo_tensor(torch.zeros(1, 5000, dtype=torch.long), numbers(5000), (9,)),
            "csr": large.to_sparse_csr(),
            "bsc": large.to_sparse_bsc((10, 10)),
            "parameter": nn.Parameter(numbers(5000)),
            "frozen": nn.Parameter(numbers(5000), requires_grad=False),
            "meta": torch.empty(3, device="meta"),
        }


def unusual() -> dict[str, Tensor]:
    """Tensors that only ``weights_only=False`` can read, or that have a history."""
    leaf = numbers(100, 80).requires_grad_()
    tagged = numbers(5000)
    tagged.other = numbers(6000)  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantisation is deprecated, and strided nested tensors are in beta
        scales, zeros = torch.linspace(0.1, 1, 100).double(), torch.zeros(100, dtype=torch.long)
        return {
            "attribute": tagged,
            "subclass": numbers(5000).as_subclass(Tagged),
            "subclass with a history": (leaf * 2).as_subclass(Tagged),
            "with a history": leaf * 2,
            "nested": torch.nested.nested_tensor([numbers(5000), numbers(4000)]),
            "jagged": torch.nested.nested_tensor([numbers(5000), numbers(4000)], layout=torch.jagged),
            "quantized": torch.quantize_per_tensor(numbers(80, 100), 40.0, 3, torch.quint8),
            "per channel": torch.quantize_per_channel(leaf.detach(), scales, zeros, 0, torch.qint8),
        }


def plain(tensor: Tensor) -> list[Tensor]:
    """An unusual tensor as others."""
    if tensor.is_nested:
        return [part.detach() for part in tensor.unbind()]
    if tensor.layout != torch.strided:
        return [tensor]
    dense = (tensor.dequantize() if tensor.is_quantized else tensor).detach().as_subclass(Tensor)
    return [dense, *(value for value in vars(tensor).values() if isinstance(value, Tensor))]


def same(left: Any, right: Any) -> bool:
    """Whether two checkpoints are equal to the last bit, types, layouts and bits of views included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return _same_tensors(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def _same_tensors(left: Tensor, right: Tensor) -> bool:
    def facts(tensor: Tensor) -> tuple[Any, ...]:
        bits = (tensor.is_conj(), tensor.is_neg(), tensor.requires_grad, tensor.device.type)
        strides = tensor.stride() if tensor.layout == torch.strided else ()
        return (tensor.dtype, tensor.layout, tensor.shape, strides, *bits)

    if facts(left) != facts(right) or not same(vars(left), vars(right)):
        return False
    return left.device.type == "meta" or _content(left) == _content(right)


def _content(tensor: Tensor) -> list[bytes]:
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout == torch.sparse_csr:
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout == torch.sparse_bsc:
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        parts = [tensor]
    dense = [part.resolve_conj().resolve_neg().contiguous().reshape(-1) for part in parts]
    return [bytes(part.view(torch.uint8).numpy()) for part in dense]


def saved(path: Path, content: Any, **options: Any) -> Archive:
    """The checkpoint as ``torch.save`` writes it."""
    torch.save(content, path, **options)
    return open_archive(path)


def read_alone(archive: Archive, *, map_weights: bool = False, **options: Any) -> Any:
    """The checkpoint as one rank reads it that has nobody to share the checking with."""
    if options.get("verify", True):
        refuse_damage(archive, archive.tensor_data)
    return read(archive, LoadOptions(**options), map_weights=map_weights)


def as_bytes(content: Any) -> bytes:
    """For results of ranks: a plain pickle knows no float8."""
    written = io.BytesIO()
    torch.save(content, written)
    return written.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def mapped(path: Path | str) -> bool:
    """Whether the file, removed or not, is mapped into this process."""
    return str(path) in Path("/proc/self/maps").read_text()


def flip(path: Path, position: int, bits: int = 0xFF) -> None:
    """Change one byte of the file."""
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)
