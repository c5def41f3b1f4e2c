"""Exchange values between ranks, and run work whose result or error all ranks share."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_LONGEST_REASON = 2000
# Bytes in one broadcast: close to the fastest size, and small enough to limit the
# device memory that is needed.
_PIECE = 64 << 20
_LENGTH = 8  # bytes that hold the length of a pickled value
_SHORT = 1024  # bytes of the first message, which hold most values


@dataclass(frozen=True)
class Ranks:
    """A set of ranks, as seen from one of them.

    Each method is collective: every rank must call it.

    Args:
        rank: this rank.
        world_size: the number of ranks; a single rank needs no process group.
        device: this rank's device.
        group: the ranks' process group; ``None`` for the default group.
        check: called before each collective. It raises if another rank has failed: a
            collective that starts during an abort may wait until its timeout.
        check_received: called before received values are used. It raises if they may be
            arbitrary, as those of a collective that NCCL aborts.
        settle: called with the name of the work before all ranks raise its error, to wait
            until every rank has it. Otherwise the first rank to raise might abort the
            collective in which a slower rank still receives it.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 # immutable
    group: dist.ProcessGroup | None = None
    check: Callable[[], None] = lambda: None
    check_received: Callable[[], None] = lambda: None
    settle: Callable[[str], None] = lambda what: None

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        if self.world_size == 1:
            return [value]
        return self._exchange(value, self._all_gather)

    def to_rank_zero(self, value: Any) -> list[Any] | None:
        """Return all values in rank order on rank 0, and ``None`` on other ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self.check()
        dist.gather_object(value, values, dst=0, group=self.group)
        self.check_received()
        return values

    def from_rank_zero(self, value: Any) -> Any:
        """Return rank 0's value."""
        if self.world_size == 1:
            return value
        return self._exchange(value if self.rank == 0 else None, self._broadcast)[0]

    def all_equal(self, number: int) -> bool:
        """Whether a signed 64-bit integer is the same on all ranks."""
        if self.world_size == 1:
            return True
        self.check()
        # One collective returns both extremes, since ~ reverses the order of integers.
        extremes = torch.tensor([number, ~number], device=self._wire)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        largest, complement_of_smallest = extremes.tolist()
        self.check_received()
        return bool(largest == ~complement_of_smallest)

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own, group=self.group)
        return rows

    def _broadcast(self, own: Tensor) -> list[Tensor]:
        dist.broadcast(own, src=0, group=self.group)
        return [own]

    def _exchange(self, value: Any, collective: Callable[[Tensor], list[Tensor]]) -> list[Any]:
        """Run a collective on the pickled values, and a second one if a value is long.

        The first message has a value's length and its beginning.
        """
        pickled = pickle.dumps(value)
        message = len(pickled).to_bytes(_LENGTH, "little") + pickled
        received = self._exchange_bytes(message, _SHORT, collective)
        longest = max(int.from_bytes(each[:_LENGTH], "little") for each in received)
        if _LENGTH + longest > _SHORT:
            received = self._exchange_bytes(message, _LENGTH + longest, collective)
        return [pickle.loads(each[_LENGTH:]) for each in received]

    def _exchange_bytes(
        self, data: bytes, size: int, collective: Callable[[Tensor], list[Tensor]]
    ) -> list[bytes]:
        """Run a collective on bytes, filled up to ``size`` with zeros, which pickle ignores.

        Bytes that are only received may be longer, and are cut off.
        """
        self.check()
        filled = bytearray(data[:size].ljust(size, b"\0"))
        own = torch.frombuffer(filled, dtype=torch.uint8).to(self._wire)
        rows = [row.cpu().numpy().tobytes() for row in collective(own)]
        self.check_received()
        return rows

    def broadcast(self, buffers: Iterable[Tensor]) -> None:
        """Fill byte buffers in CPU memory with rank 0's content.

        A piece is prepared while the previous one is sent.
        """
        finish: Callable[[], None] = lambda: None  # noqa: E731
        self.check()
        for piece in (piece for buffer in buffers for piece in buffer.split(_PIECE)):
            sent = piece.to(self._wire)
            work = dist.broadcast(sent, src=0, group=self.group, async_op=True)
            finish()
            finish = partial(self._receive, work, sent, piece)
        finish()
        self.check_received()

    def _receive(self, work: Any, sent: Tensor, piece: Tensor) -> None:
        work.wait()
        if sent is not piece and self.rank != 0:
            piece.copy_(sent)

    @property
    def _wire(self) -> torch.device:
        """The device whose tensors the group can send."""
        return torch.device("cpu") if is_gloo("cpu", self.group) else self.device

    def on_rank_zero(self, work: Callable[[], T], what: str) -> T:
        """Run ``work`` on rank 0; every rank returns its result or raises its error.

        If rank 0 dies during the work, the control channel unblocks the other ranks.

        Args:
            work: called on rank 0 only; its result must be picklable.
            what: the name of the work in the note that other ranks add to the error.

        Raises:
            Exception: the exception of ``work``. Other ranks raise a copy, or a
                ``RuntimeError`` with its type and text if pickle does not keep both;
                rank 0's traceback is the cause.

        >>> Ranks().on_rank_zero(lambda: 6 * 7, "multiplying")
        42
        """
        own: Exception | None = None
        message: Any = None
        if self.rank == 0:
            try:
                result = work()
                message = pickle.dumps(result)
            except Exception as error:
                own = error
                message = _Failure.of(error)
        message = self.from_rank_zero(message)
        if isinstance(message, _Failure):
            self.settle(what)
            raise own or message.to_error(what, rank=0)
        return result if self.rank == 0 else pickle.loads(message)

    def on_every_rank(self, work: Callable[[], T], what: str) -> T:
        """Run ``work`` on every rank; all raise the error of the lowest failing rank.

        ``work`` must not contain a collective.

        Raises:
            Exception: that rank's exception; see :meth:`on_rank_zero`.

        >>> Ranks().on_every_rank(lambda: 6 * 7, "multiplying")
        42
        """
        own: Exception | None = None
        try:
            result = work()
        except Exception as error:
            own = error
        failures = self.gather(None if own is None else _Failure.of(own))
        for rank, failure in enumerate(failures):
            if failure is not None:
                self.settle(what)
                if own is not None and rank == self.rank:
                    raise own
                raise failure.to_error(what, rank=rank)
        return result


def is_gloo(device: str | torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the group uses gloo for tensors on this device.

    A group may have one backend for each type of device.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> is_gloo("cpu"), is_gloo(torch.device("cuda", 1))
    (True, True)
    >>> dist.destroy_process_group()
    """
    kind = device if isinstance(device, str) else device.type
    return f"{kind}:gloo" in dist.get_backend_config(group).split(",")


@dataclass(frozen=True)
class _Failure:
    """An error that a rank sends in place of a result."""

    error: Exception
    traceback_text: str

    @staticmethod
    def of(error: Exception) -> _Failure:
        """Wrap the error in a form that survives pickling.

        If pickle does not keep its type and text, this is a ``RuntimeError`` with both.
        """
        try:
            rebuilt = pickle.loads(pickle.dumps(error))
            survives = (type(rebuilt), str(rebuilt)) == (type(error), str(error))
        except Exception:
            survives = False
        portable = error if survives else RuntimeError(reason_of(error))
        return _Failure(portable, "".join(traceback.format_exception(error)))

    def to_error(self, what: str, *, rank: int) -> Exception:
        """Return the error for other ranks, with the remote traceback as its cause.

        A note names the rank and the operation.
        """
        self.error.add_note(f"raised on rank {rank} (operation: {what})")
        self.error.__cause__ = RemoteTraceback(self.traceback_text)
        return self.error


class RemoteTraceback(Exception):
    """The traceback of another rank, set as the cause of an error."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def shortened(text: str, longest: int) -> str:
    """Return the text, or its beginning and end if it is longer than ``longest``.

    In the latter case, the number of characters left out is in between.
    """
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n... ({left_out} characters left out) ...\n{text[-half:]}"


def chain_of(exception: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its cause or context, and so on."""
    seen: set[int] = set()
    link: BaseException | None = exception
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def reason_of(exception: BaseException) -> str:
    """Return an exception's type and shortened text, even if its ``__str__`` raises."""
    name = type(exception).__name__
    try:
        text = str(exception)
    except Exception:
        text = "<its __str__ fails>"
    return shortened(f"{name}: {text}" if text else name, _LONGEST_REASON)
