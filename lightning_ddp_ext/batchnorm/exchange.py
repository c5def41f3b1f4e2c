"""How a BatchNorm layer exchanges numbers with itself on the other ranks, and notices when they are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import BatchNormMismatchError

_HEADER = 2  # which layer, and what it is doing


class Doing(IntEnum):
    """What a rank sends its numbers for."""

    FORWARD = 0
    BACKWARD = 1
    END_OF_FORWARD = 2

    def describe(self, layer: str) -> str:
        """A few words on a rank that does this."""
        if self is Doing.END_OF_FORWARD:
            return "has finished its forward pass"
        return f"is in the {'forward' if self is Doing.FORWARD else 'backward'} pass of {layer}"


@dataclass
class Exchange:
    """What the synchronised layers of one model have in common.

    On CPU memory all of them send messages of one length, whose first numbers say which layer sends them: ranks that
    are in different layers find that out from what they receive, where messages of different lengths would end in an
    abort or a wait without end.

    Args:
        process_group: the ranks whose batches are joined; ``None``: all there are.
        names: of the layers, in an order that is the same on every rank.
        longest: how many numbers the layer with most of them has to send.
    """

    process_group: dist.ProcessGroup | None = None
    names: Sequence[str] = ("",)
    longest: int = 0
    _announced: tuple[Any, Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    @property
    def world_size(self) -> int:
        """How many ranks join their batches; 1 where there is no process group, or where it is one of others."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return max(1, dist.get_world_size(self.process_group))

    def name_of(self, number: int) -> str:
        """What errors call a layer."""
        name = self.names[number]
        return f"BatchNorm layer {name!r}" if name else "a BatchNorm layer"

    def gather(self, numbers: Tensor, number: int, doing: Doing) -> Tensor:
        """The vectors of all ranks, by rank. Collective: every rank in the group.

        Args:
            numbers: this rank's, (n).
            number: which layer it is, a place in ``names``.
            doing: which pass.

        Returns:
            (ranks, n).

        Raises:
            BatchNormMismatchError: another rank is in another layer or pass.
        """
        if numbers.device.type != "cpu":
            return self._gather_on_device(numbers)
        self.settle()
        _, _, received = self._send(numbers, number, doing, wait=True)
        self._check(received)
        return received[:, _HEADER : _HEADER + len(numbers)]

    def announce_end_of_forward(self) -> None:
        """Say that this rank will not run another layer forward, to those that still do. Does not wait for anybody.

        Every rank in the group must call it once before each backward pass, or none. Under NCCL, which sends nothing
        from CPU memory, nobody is told.
        """
        if self.world_size > 1 and dist.get_backend(self.process_group) != "nccl":
            self.settle()
            self._announced = self._send(torch.empty(0, dtype=torch.float64), 0, Doing.END_OF_FORWARD, wait=False)

    def settle(self) -> None:
        """Wait for what has been announced, and see whether the others were at its end, too."""
        if self._announced is not None:
            work, _, received = self._announced
            self._announced = None
            work.wait()
            self._check(received)

    def forget(self) -> None:
        """Drop what has been announced: other ranks may never do so."""
        self._announced = None

    def _send(self, numbers: Tensor, number: int, doing: Doing, *, wait: bool) -> tuple[Any, Tensor, Tensor]:
        """Send this rank's message; the work, the message, and where those of all ranks arrive: (ranks, length)."""
        message = numbers.new_empty(_HEADER + max(self.longest, len(numbers)))
        message[:_HEADER] = numbers.new_tensor([number, doing])
        message[_HEADER : _HEADER + len(numbers)] = numbers
        received = message.new_empty(self.world_size, len(message))
        work = _all_gather(received.view(-1), message, group=self.process_group, async_op=not wait)
        return work, message, received

    def _check(self, received: Tensor) -> None:
        headers = received[:, :_HEADER]
        if bool((headers == headers[0]).all()):
            return
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        told = (
            f"rank {rank} {Doing(int(doing)).describe(self.names[int(number)] or 'the layer')}"
            for rank, (number, doing) in zip(ranks, headers.tolist(), strict=True)
        )
        raise BatchNormMismatchError(
            f"ranks are in different BatchNorm layers: {', '.join(told)}; every rank must run the same layers in the "
            "same order, so leave those that only some ranks run out of the conversion (exclude=)"
        )

    def _gather_on_device(self, numbers: Tensor) -> Tensor:
        world_size = self.world_size
        if "nccl" in str(dist.get_backend(self.process_group)):
            received = numbers.new_empty(world_size * len(numbers))
            _all_gather(received, numbers, group=self.process_group)
            return received.view(world_size, -1)
        pieces = [torch.empty_like(numbers) for _ in range(world_size)]
        dist.all_gather(pieces, numbers, group=self.process_group)
        return torch.stack(pieces)

    def __deepcopy__(self, memo: object) -> Exchange:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # A process group does not travel: in another process, all ranks that there are.
        return (Exchange, (None, self.names, self.longest))


def _all_gather(received: Tensor, message: Tensor, **options: Any) -> Any:
    """Gather into one tensor: with a list of them torch copies everything once more."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    return gather(received, message, **options)


@dataclass(frozen=True)
class Peers:
    """A layer's namesakes on the other ranks: layer ``number`` of those that have an exchange in common."""

    exchange: Exchange
    number: int = 0

    @property
    def world_size(self) -> int:
        """How many ranks join their batches."""
        return self.exchange.world_size

    @property
    def name(self) -> str:
        """What errors call the layer."""
        return self.exchange.name_of(self.number)

    def gather(self, numbers: Tensor, doing: Doing) -> Tensor:
        """The vectors (n) of all ranks, (ranks, n). Collective: see ``Exchange.gather``."""
        return self.exchange.gather(numbers, self.number, doing)
