"""The collectives that checkpoints need, over the default process group or with nobody else."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Shows how far a long piece of work is: given its name and size in bytes, if that is known, it yields what to call with
# the bytes done.
Show = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]
# Over a backend that knows no CPU memory, so much goes through the device at a time.
_STAGED = 32 << 20
# Bytes that each rank gives to an exchange of small values: their size, and they themselves.
_SLOT, _SIZE_BYTES = 2048, 8


@contextmanager
def show_nothing(what: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """No progress bar."""
    yield lambda done: None


@dataclass(frozen=True)
class Ranks:
    """This rank among those that read or write a checkpoint together.

    Args:
        rank: this one.
        world_size: how many there are; 1 takes no process group.
        device: this rank's own.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 # immutable

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank. Collective: one exchange where all of them are small."""
        if self.world_size == 1:
            return [value]
        pickled = pickle.dumps(value)
        mine = torch.zeros(_SLOT, dtype=torch.uint8)
        mine[:_SIZE_BYTES] = _tensor(len(pickled).to_bytes(_SIZE_BYTES, "little"))
        if len(pickled) <= _SLOT - _SIZE_BYTES:
            mine[_SIZE_BYTES : _SIZE_BYTES + len(pickled)] = _tensor(pickled)
        slots = [torch.empty(_SLOT, dtype=torch.uint8, device=self._exchange_device) for _ in range(self.world_size)]
        dist.all_gather(slots, mine.to(self._exchange_device))
        contents = [bytes(slot.cpu().numpy()) for slot in slots]
        sizes = [int.from_bytes(content[:_SIZE_BYTES], "little") for content in contents]
        if max(sizes) <= _SLOT - _SIZE_BYTES:
            return [pickle.loads(content[_SIZE_BYTES:]) for content in contents]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    @property
    def _exchange_device(self) -> torch.device:
        """Where tensors must be for the backend."""
        knows_cpu = "gloo" in str(dist.get_backend()) or self.device.type == "cpu"
        return torch.device("cpu") if knows_cpu else self.device

    def to_rank_zero(self, value: Any) -> list[Any] | None:
        """The values of all ranks, by rank, on rank 0, and ``None`` on the others. Collective."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0)
        return values

    def from_rank_zero(self, value: Any) -> Any:
        """Rank 0's value. Collective."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def broadcast(self, data: Tensor) -> None:
        """Fill ``data``, bytes in CPU memory, with rank 0's. Collective."""
        if self.world_size == 1:
            return
        if self._exchange_device.type == "cpu":
            dist.broadcast(data, src=0)
            return
        for piece in data.split(_STAGED):
            staged = piece.to(self.device)
            dist.broadcast(staged, src=0)
            if self.rank != 0:
                piece.copy_(staged)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
