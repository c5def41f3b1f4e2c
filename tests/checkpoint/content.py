"""Make checkpoints with tensors of each kind, compare them, and damage their files."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import set_crc32_options

from lightning_ddp_ext.checkpoint.load import Archive, LoadOptions
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.restore import restore
from lightning_ddp_ext.ranks import Ranks

MAPPED = 5 << 20  # numbers; a file with this many is large enough to be mapped


def numbers(*shape: int, start: float = 0.0) -> Tensor:
    """Different numbers."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(
        shape
    )


class Tagged(Tensor):
    """A subclass of tensors."""


def kinds() -> dict[str, Tensor]:
    """Return a tensor of each kind that ``weights_only=True`` reads; always the same."""
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
            "bfloat16": large.bfloat16(),
            "scalar": torch.tensor(2.5),
            "empty": torch.empty(0, 3),
            "strided": numbers(100, 80)[::2, 1::3],
            "expanded": numbers(5000).expand(3, 5000),
            "coo": large.to_sparse(),
            "uncoalesced": torch.sparse_coo_tensor(
                torch.zeros(1, 5000, dtype=torch.long), numbers(5000), (9,)
            ),
            "csr": large.to_sparse_csr(),
            "bsc": large.to_sparse_bsc((10, 10)),
            "parameter": nn.Parameter(numbers(5000)),
            "frozen": nn.Parameter(numbers(5000), requires_grad=False),
            "meta": torch.empty(3, device="meta"),
        }


def unusual() -> dict[str, Any]:
    """Return tensors and objects of which most need ``weights_only=False``."""
    leaf = numbers(100, 80).requires_grad_()
    tagged = numbers(5000)
    tagged.other = numbers(6000)
    module = nn.Sequential(nn.BatchNorm1d(5000))
    module.register_buffer("scratch", numbers(5000), persistent=False)
    with warnings.catch_warnings():
        # Quantisation is deprecated, and strided nested tensors are in beta.
        warnings.simplefilter("ignore")
        scales = torch.linspace(0.1, 1, 100).double()
        zeros = torch.zeros(100, dtype=torch.long)
        return {
            "attribute": tagged,
            "subclass": numbers(5000).as_subclass(Tagged),
            "subclass with a history": (leaf * 2).as_subclass(Tagged),
            "with a history": leaf * 2,
            "nested": torch.nested.nested_tensor([numbers(5000), numbers(4000)]),
            "jagged": torch.nested.nested_tensor(
                [numbers(5000), numbers(4000)], layout=torch.jagged
            ),
            "quantized": torch.quantize_per_tensor(numbers(80, 100), 40.0, 3, torch.quint8),
            "per channel": torch.quantize_per_channel(leaf.detach(), scales, zeros, 0, torch.qint8),
            "module": module,
        }


def facts(value: Any) -> Any:
    """Return all that is compared of a checkpoint: every bit, and types, layouts, views."""
    if isinstance(value, Tensor):
        return type(value), (
            [facts(part) for part in value.unbind()] if value.is_nested else _of_tensor(value)
        )
    if isinstance(value, dict):
        return type(value), [(key, facts(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [facts(each) for each in value]
    if isinstance(value, nn.Module):
        return type(value), facts([*value.parameters(), *value.buffers()])
    return type(value), value


def _of_tensor(tensor: Tensor) -> dict[str, Any]:
    is_strided = tensor.layout == torch.strided
    return {
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "shape": tensor.shape,
        "strides or count": tensor.stride() if is_strided else tensor._nnz(),
        "conjugate bit": tensor.is_conj(),
        "negative bit": tensor.is_neg(),
        "requires_grad": tensor.requires_grad,
        "device": tensor.device.type,
        "attributes": facts(vars(tensor)),
        "bytes": None if tensor.is_meta else _bytes_of(tensor),
    }


def _bytes_of(tensor: Tensor) -> bytes:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    elif tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return bytes(plain.contiguous().reshape(-1).view(torch.uint8).numpy())


def same(left: Any, right: Any) -> bool:
    """Whether two checkpoints are equal; a failed ``assert`` of it prints no megabytes."""
    return bool(facts(left) == facts(right))


def restored(path: Path, *, map_weights: bool = False, **options: Any) -> Any:
    """Return the checkpoint as a single rank restores it."""
    return restore(locate(path), Ranks(), LoadOptions(**options), map_weights=map_weights).content


@contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """Open a checkpoint file."""
    with path.open("rb") as file:
        yield Archive(file, str(path))


def flip(path: Path, record: str) -> Path:
    """Change one bit in the middle of a record."""
    reader = torch._C.PyTorchFileReader(str(path))
    begin = reader.get_record_offset(record)
    size = len(reader.get_record(record))
    with path.open("r+b") as file:
        file.seek(begin + size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return path


class WouldRun:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.directory),)


@contextmanager
def without_checksums() -> Iterator[None]:
    """Have ``torch.save`` record no checksums, as a user may choose."""
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(True)
