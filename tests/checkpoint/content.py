"""Make checkpoints with tensors of each kind, compare them, and damage their files."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext.checkpoint.load import LoadOptions
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.restore import Restored, restore
from lightning_ddp_ext.ranks import Ranks

MAPPED = 5 << 20  # numbers; a file with this many is large enough to be mapped


def numbers(*shape: int) -> Tensor:
    """Return a tensor of different numbers."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


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


def same(left: Any, right: Any) -> bool:
    """Whether two checkpoints of tensors and numbers are equal to the last bit."""
    try:
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    except AssertionError:
        return False
    return True


def restored(
    path: Path, *, map_weights: bool = False, device: str = "cpu", **options: Any
) -> Restored:
    """Restore the checkpoint on a single rank, whose own device is ``device``."""
    ranks = Ranks(device=torch.device(device))
    return restore(locate(path), ranks, LoadOptions(**options), map_weights=map_weights)


def flip(path: Path, record: str) -> Path:
    """Change one bit in the middle of a record."""
    reader = torch._C.PyTorchFileReader(str(path))
    begin = reader.get_record_offset(record)
    size = len(reader.get_record(record))
    content = bytearray(path.read_bytes())
    content[begin + size // 2] ^= 1
    path.write_bytes(content)
    return path


@contextmanager
def without_checksums() -> Iterator[None]:
    """Have ``torch.save`` record no checksums, as a user may choose."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)
