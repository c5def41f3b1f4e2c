"""The collectives that checkpoints need, over the default process group or with nobody else."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.supervision.rank_zero import on_every_rank

T = TypeVar("T")

_SIZE = struct.Struct("<q")
# Bytes of a pickled value that travel together with its size.
_INLINE = 2048
# Bytes of one broadcast: at about this size it is fastest, and a device need hold no more at a time.
_PIECE = 64 << 20


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
        """The values of all ranks, by rank. Collective: one for values that are small once pickled, else two."""
        if self.world_size == 1:
            return [value]
        data = pickle.dumps(value)
        messages = self._exchange(data, _INLINE)
        longest = max(size for size, _ in messages)
        if longest > _INLINE:
            messages = self._exchange(data, longest)
        return [pickle.loads(content[:size]) for size, content in messages]

    def _exchange(self, data: bytes, room: int) -> list[tuple[int, bytes]]:
        """The size of each rank's data, and as much of the data as there is room for."""
        message = _SIZE.pack(len(data)) + data[:room].ljust(room)
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._wire)
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(gathered, mine)
        arrived = [bytes(each.cpu().numpy()) for each in gathered]
        return [(_SIZE.unpack_from(each)[0], each[_SIZE.size :]) for each in arrived]

    def on_every_rank(self, work: Callable[[], T], what: str) -> T:
        """Run ``work`` on every rank; if it raises on any, raise that error on all. Collective."""
        return on_every_rank(work, rank=self.rank, gather=self.gather, what=what)

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
        for piece in data.split(_PIECE):
            sent = piece.to(self._wire)
            dist.broadcast(sent, src=0)
            if sent is not piece and self.rank != 0:
                piece.copy_(sent)

    @property
    def _wire(self) -> torch.device:
        """Where what is sent has to be: other backends than gloo know no CPU memory."""
        return torch.device("cpu") if "gloo" in str(dist.get_backend()) else self.device
