"""Work that every rank does together, and that ends on all ranks with a result or with the same error."""

from __future__ import annotations

import pickle
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_LONGEST_REASON = 2000
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
        """Where what is sent has to be: backends other than gloo do not take CPU memory."""
        return torch.device("cpu") if is_gloo("cpu") else self.device


def is_gloo(device: str | torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether gloo moves tensors of this device; a group may have another backend for each kind of device.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> is_gloo("cpu"), is_gloo(torch.device("cuda", 1))
    (True, True)
    >>> dist.destroy_process_group()
    """
    kind = device if isinstance(device, str) else device.type
    return f"{kind}:gloo" in dist.get_backend_config(group).split(",")


def rank_zero_for_all(
    work: Callable[[], T],
    *,
    is_rank_zero: bool,
    broadcast: Callable[[Any], Any],
    what: str = "work",
    settle: Callable[[], object] = lambda: None,
) -> T:
    """Run ``work`` on rank 0 and give every rank its result, or raise its error on every rank.

    Collective: every rank must call it. If rank 0 dies on the way, its peers are released by the control channel.

    Args:
        work: called on rank 0 alone. Its result must be picklable, or that is the error.
        is_rank_zero: whether this is rank 0.
        broadcast: sends rank 0's object to every rank and returns it there, such as ``strategy.broadcast``.
        what: names the work in the note that other ranks add to the error.
        settle: waits until every rank has the error. Without it the first rank that raises may release a slower one
            from the broadcast that brings it the same.

    Raises:
        Exception: whatever ``work`` raised; on other ranks of the same type and with the same text where pickle keeps
            both, else a ``RuntimeError`` that says them, and rank 0's traceback as its cause.

    >>> rank_zero_for_all(lambda: 6 * 7, is_rank_zero=True, broadcast=lambda obj: obj)
    42
    """
    if not is_rank_zero:
        message = broadcast(None)
        if isinstance(message, _Failure):
            settle()
            raise message.to_error(what, rank=0)
        return pickle.loads(message)  # type: ignore[no-any-return]
    try:
        result = work()
        pickled = pickle.dumps(result)
    except Exception as error:
        broadcast(_Failure.of(error))
        settle()
        raise
    broadcast(pickled)
    return result


def on_every_rank(work: Callable[[], T], *, rank: int, gather: Callable[[Any], list[Any]], what: str = "work") -> T:
    """Run ``work`` on every rank; if it raises on any, raise the error of the first such rank on all.

    Collective: every rank must call it, and ``work`` must have no collective in it.

    Args:
        work: this rank's part.
        rank: this rank.
        gather: gives every rank the objects of all, by rank, such as ``all_gather_object``.
        what: names the work in the note that other ranks add to the error.

    Raises:
        Exception: as for :func:`rank_zero_for_all`.

    >>> on_every_rank(lambda: 6 * 7, rank=0, gather=lambda obj: [obj])
    42
    """
    own: Exception | None = None
    try:
        result = work()
    except Exception as error:
        own = error
    failures = gather(None if own is None else _Failure.of(own))
    first = next((index for index, failure in enumerate(failures) if failure is not None), None)
    if first is None:
        return result
    if own is not None and first == rank:
        raise own
    raise failures[first].to_error(what, rank=first)


@dataclass(frozen=True)
class _Failure:
    """What travels instead of a result."""

    error: Exception
    traceback_text: str

    @staticmethod
    def of(error: Exception) -> _Failure:
        """With the error, or where pickle does not keep its type and text, a plain one that says both."""
        try:
            rebuilt = pickle.loads(pickle.dumps(error))
            survives = (type(rebuilt), str(rebuilt)) == (type(error), str(error))
        except Exception:
            survives = False
        portable = error if survives else RuntimeError(reason_of(error))
        return _Failure(portable, "".join(traceback.format_exception(error)))

    def to_error(self, what: str, *, rank: int) -> Exception:
        """The error for other ranks."""
        if hasattr(self.error, "add_note"):  # Python 3.11
            self.error.add_note(f"raised on rank {rank} during {what}")
        self.error.__cause__ = RemoteTraceback(self.traceback_text)
        return self.error


class RemoteTraceback(Exception):
    """The traceback of another rank, as the cause of a another error."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def shortened(text: str, longest: int) -> str:
    """The text, or its two ends with a note on what was left out between them."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n... ({left_out} characters left out) ...\n{text[-half:]}"


def reason_of(exception: BaseException) -> str:
    """Type and text of an exception as other ranks are told, however long the text, also where it cannot be made."""
    name = type(exception).__name__
    try:
        text = str(exception)
    except Exception:
        text = "<its __str__ fails>"
    return shortened(f"{name}: {text}" if text else name, _LONGEST_REASON)
