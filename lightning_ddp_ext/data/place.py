"""How far a training loader is in its epoch, and going on from there on any number of ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_ddp_ext.data.continued import Continued, index_sampler_name, put_index_sampler
from lightning_ddp_ext.data.random_state import RandomState, generator_states, kept, set_generators
from lightning_ddp_ext.data.resumable import Resumable
from lightning_ddp_ext.data.streams import with_wrapped
from lightning_ddp_ext.errors import ResumeError


@dataclass(frozen=True)
class Pass:
    """One iterator of a loader; a loader that is combined with a longer one makes several in an epoch.

    Args:
        begun_at: batches of the epoch before it.
        start: where it has begun: a position in the global order, or a number of this rank's own batches.
        is_first: whether it is the first of its epoch, or the rest of that one.
    """

    begun_at: int
    start: int = 0
    is_first: bool = True


class Place:
    """A loader whose order can be entered in the middle: it reads what a sampler with a length says.

    If that is a sampler of ours, it goes on at a position of the global order, on any number of ranks; else each rank
    leaves away as many of its own batches as it has trained on.

    Args:
        loader: with a sampler that has a length, see :func:`has_place`.
        remembered: how many passes are remembered: of a pass that was begun after the last optimiser step, the one
            before may be asked for.
    """

    def __init__(self, loader: DataLoader[Any], *, remembered: int) -> None:
        self._loader = loader
        self._index_sampler = getattr(loader, index_sampler_name(loader))
        self._sampler, self._unit = _resumable(self._index_sampler)
        self._passes: deque[Pass] = deque(maxlen=remembered)
        self._began: tuple[RandomState, list[torch.Tensor]] | None = None

    def begin(self, *, begun_at: int, epoch: int) -> None:
        """The loader is about to be read from its start."""
        put_index_sampler(self._loader, self._index_sampler)
        if self._sampler is not None:
            self._sampler.resume_at(epoch, 0)
        else:
            self._began = (RandomState.take(), generator_states(self._generators()))
        self._passes.append(Pass(begun_at, is_first=begun_at == 0))

    @property
    def length(self) -> int:
        """Batches of the whole epoch."""
        return len(self._index_sampler)

    def samples(self, world_size: int) -> int:
        """How far a batch on each rank leads in the global order."""
        return self._unit * world_size

    def state_dict(self, world_size: int) -> dict[str, Any]:
        """What all ranks have in common."""
        return {
            "passes": [list(astuple(each)) for each in self._passes],
            "samples": self.samples(world_size),
            "world_size": world_size,
            "sampler": None if self._sampler is None else self._sampler.state_dict(0),
        }

    def own_state_dict(self) -> dict[str, Any] | None:
        """What only this rank knows: its generators when the pass was begun, from which the order may have come."""
        if self._began is None:
            return None
        state, generators = self._began
        return {"random": state.to_dict(), "generators": generators}

    def go_on(
        self,
        state: Mapping[str, Any],
        own: Mapping[str, Any] | None,
        *,
        epoch: int,
        done: int,
        left: float | None,
        world_size: int,
    ) -> int:
        """The loader, which has begun this epoch, is about to be read from where another run has left it instead.

        Args:
            state: the other's :meth:`state_dict`.
            own: this rank's :meth:`own_state_dict`, if it is known.
            epoch: which epoch is continued.
            done: batches of the epoch that have been trained on.
            left: batches that were left of the epoch then; ``None`` if nobody knows.
            world_size: number of ranks now.

        Returns:
            How many batches this epoch has by this loader, those that are done among them.

        Raises:
            ResumeError: the number of ranks or the batch size is another, and the order is not ours.
            SamplerError: the data, seed or policy is another.
        """
        passes = [Pass(*each) for each in state["passes"]]
        last = next((each for each in reversed(passes) if each.begun_at <= done), Pass(0))
        trained = done - last.begun_at
        samples, whole = self.samples(world_size), self.length
        is_same = state["samples"] == samples
        if self._sampler is not None and state["sampler"] is not None:
            start = min(last.start + trained * state["samples"], self._sampler.length)
            self._sampler.load_state_dict({**state["sampler"], "epoch": epoch, "position": start})
            skip, rest = 0, self._left()
        elif is_same and state["world_size"] == world_size:
            start = skip = last.start + trained
            rest = whole - skip
        else:
            raise ResumeError(self._cannot_share(state["world_size"], world_size))
        if not is_same and left is not None:
            rest = min(rest, -(-int(left * state["samples"]) // samples))
        length = whole if is_same else done + rest if last.is_first else max(whole, done)
        rest_of_it = Continued(self._index_sampler, skip=skip, length=length, as_then=lambda: self._as_then(own))
        put_index_sampler(self._loader, rest_of_it)
        self._began = None if own is None else (RandomState.from_dict(own["random"]), own["generators"])
        self._passes.append(Pass(done, start, last.is_first))
        return length

    def leave_nothing(self, done: int) -> None:
        """The loader is about to be read, and all batches of its epoch are done."""
        put_index_sampler(self._loader, Continued((), skip=0, length=done))

    def put_back(self) -> None:
        """Leave the loader as it was found."""
        put_index_sampler(self._loader, self._index_sampler)

    def _left(self) -> int:
        """Batches from the sampler's position on."""
        assert self._sampler is not None
        if getattr(self._index_sampler, "drop_last", False):
            return self._sampler.left // self._unit
        return -(-self._sampler.left // self._unit)

    def _generators(self) -> list[torch.Generator]:
        owners = [self._loader, *with_wrapped(self._index_sampler)]
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    @contextmanager
    def _as_then(self, own: Mapping[str, Any] | None) -> Iterator[None]:
        """With the generators as they were when the pass was begun, and its iterator had drawn the workers' seed."""
        if own is None:
            yield
            return
        with kept():
            RandomState.from_dict(own["random"]).restore()
            set_generators(self._generators(), own["generators"])
            draw_base_seed(self._loader)
            yield

    def _cannot_share(self, saved_by: int, world_size: int) -> str:
        name = type(self._index_sampler).__name__
        sampler = getattr(self._index_sampler, "sampler", None)
        over = f" over {type(sampler).__name__}" if sampler is not None else ""
        return (
            f"the rest of the epoch cannot be shared out: {name}{over} gives each rank an order of its own, the "
            f"checkpoint is of {saved_by} ranks, and these are {world_size}, or their batches have another size; "
            "resume with as many ranks and the same batch size, from a checkpoint at the end of an epoch, or with a "
            "sampler of lightning_ddp_ext, such as ScalableDistributedSampler"
        )


def has_place(loader: object) -> bool:
    """Whether a loader reads what a sampler with a length says, and so can be entered in the middle."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or is_stateful(loader):
        return False
    try:
        len(getattr(loader, index_sampler_name(loader)))
    except (TypeError, NotImplementedError):
        return False
    return True


def is_stateful(loader: object) -> bool:
    """Whether a loader keeps a state of its own, as torchdata's ``StatefulDataLoader`` does."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def draw_base_seed(loader: DataLoader[Any]) -> None:
    """Draw what an iterator of the loader draws when it is made: a seed for its workers."""
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)


def _resumable(index_sampler: Any) -> tuple[Resumable | None, int]:
    """The sampler of ours that decides what is read, if there is one, and how many of its items make a batch."""
    if isinstance(index_sampler, Resumable):
        return index_sampler, 1
    size = getattr(index_sampler, "batch_size", None)
    is_plain = type(index_sampler) is BatchSampler and isinstance(index_sampler.sampler, Resumable)
    return (index_sampler.sampler if is_plain else None), size if isinstance(size, int) else 1
