"""Exchange values between ranks, and run work whose result or error all ranks share."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_LONGEST_REASON = 2000
# Bytes in one broadcast: close to the fastest size, and small enough to limit the
# device memory that is needed.
_PIECE = 64 << 20


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
        values = [value] * self.world_size
        if self.world_size > 1:
            with self._exchange():
                dist.all_gather_object(values, value, group=self.group)
        return values

    def to_rank_zero(self, value: Any) -> list[Any] | None:
        """Return all values in rank order on rank 0, and ``None`` on other ranks."""
        values = [value] * self.world_size if self.rank == 0 else None
        if self.world_size > 1:
            with self._exchange():
                dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def from_rank_zero(self, value: Any) -> Any:
        """Return rank 0's value."""
        values = [value]
        if self.world_size > 1:
            with self._exchange():
                dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def broadcast(self, content: Tensor) -> None:
        """Fill a byte buffer in CPU memory with rank 0's content.

        Unlike the other methods, it needs a process group even for a single rank.
        """
        with self._exchange():
            wire = torch.device("cpu") if is_gloo("cpu", self.group) else self.device
            for piece in content.split(_PIECE):
                sent = piece.to(wire)
                dist.broadcast(sent, src=0, group=self.group)
                if self.rank != 0:
                    piece.copy_(sent)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Run collectives in the block, whose values may be used after it.

        If they raise because another rank failed, the error that ``check_received``
        raises names that rank, and replaces theirs on purpose.
        """
        self.check()
        try:
            yield
        finally:
            self.check_received()

    def on_rank_zero(self, work: Callable[[], T], what: str) -> T:
        """Run ``work`` on rank 0; every rank returns a copy of its result or raises its error.

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
        raised_here: Exception | None = None
        message: Any = None  # the pickled result, or the failure
        if self.rank == 0:
            try:
                message = pickle.dumps(work())
            except Exception as error:
                raised_here = error
                message = _Failure.of(error)
        message = self.from_rank_zero(message)
        if isinstance(message, _Failure):
            self.settle(what)
            raise raised_here or message.to_error(what, rank=0)
        return pickle.loads(message)  # type: ignore[no-any-return]

    def on_every_rank(self, work: Callable[[], T], what: str) -> T:
        """Run ``work`` on every rank; all raise the error of the lowest failing rank.

        ``work`` must not contain a collective.

        Raises:
            Exception: that rank's exception; see :meth:`on_rank_zero`.

        >>> Ranks().on_every_rank(lambda: 6 * 7, "multiplying")
        42
        """
        raised_here: Exception | None = None
        try:
            result = work()
        except Exception as error:
            raised_here = error
        failures = self.gather(None if raised_here is None else _Failure.of(raised_here))
        for rank, failure in enumerate(failures):
            if failure is not None:
                self.settle(what)
                if raised_here is not None and rank == self.rank:
                    raise raised_here
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

        A note names the rank and the operation. This changes the stored error, so call
        it once.
        """
        self.error.add_note(f"raised on rank {rank} (operation: {what})")
        self.error.__cause__ = RemoteTraceback(self.traceback_text)
        return self.error


class RemoteTraceback(Exception):
    """The traceback of another rank, set as the cause of an error."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


# Errors as text, for messages to other ranks.


def shortened(text: str, longest: int) -> str:
    """Return the text, or its beginning and end if it is longer than ``longest``.

    In the latter case, the number of characters left out is in between.

    >>> shortened("abcdefgh", 4).splitlines()
    ['ab', '... (4 characters left out) ...', 'gh']
    """
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n... ({left_out} characters left out) ...\n{text[-half:]}"


def chain_of(exception: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its cause or context, and so on, each once."""
    seen: set[int] = set()
    link: BaseException | None = exception
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def reason_of(exception: BaseException) -> str:
    """Return an exception's type and shortened text, even if its ``__str__`` raises.

    >>> reason_of(ValueError("no such layer"))
    'ValueError: no such layer'
    """
    name = type(exception).__name__
    try:
        text = str(exception)
    except Exception:
        text = "<its __str__ fails>"
    return shortened(f"{name}: {text}" if text else name, _LONGEST_REASON)
