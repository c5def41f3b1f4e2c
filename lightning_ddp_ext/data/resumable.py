"""A position in an epoch's global order, which a sampler can start from, save and load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch.distributed as dist

from lightning_ddp_ext.data.checks import epoch_of, seed_of, uneven_of, whole_number
from lightning_ddp_ext.data.partition import Share, Uneven
from lightning_ddp_ext.errors import SamplerError

STATE_VERSION = 1

_REMEDIES = {
    "version": "load it with the version of lightning-ddp-ext that saved it",
    "kind": "build the same class of sampler as the run that saved the state",
    "length": "give the sampler the same data as in the run that saved the state",
    "uneven": "build the sampler with the policy of the state",
}


class Resumable:
    """Base of everything that shares out one global order among the ranks, and can start at any position of it.

    A subclass names its ``kind``, has a ``length``, iterates over ``share()``, and puts an object into ``_progress``
    whose ``handed_out`` is the number of elements that its newest iterator has yielded.

    Attributes:
        epoch: the epoch whose order is read next.
        seed, shuffle, uneven: as given.
    """

    kind: ClassVar[str]
    """Whose state a state is."""

    def __init__(self, *, num_replicas: int | None, rank: int | None, shuffle: bool, seed: int, uneven: Uneven) -> None:
        self._given_ranks = _validated(num_replicas, rank)
        self.shuffle = bool(shuffle)
        self.seed = seed_of(seed)
        self.uneven: Uneven = uneven_of(uneven)
        self.epoch = 0
        self._position = 0
        self._progress: Any = None

    @property
    def length(self) -> int:
        """Positions of the global order of an epoch."""
        raise NotImplementedError

    @property
    def num_replicas(self) -> int:
        """Number of ranks, now."""
        return self._ranks()[0]

    @property
    def rank(self) -> int:
        """This process's rank, now."""
        return self._ranks()[1]

    @property
    def position(self) -> int:
        """Where in the global order of this epoch an iterator starts; the same number on every rank."""
        return self._position

    def share(self) -> Share:
        """Return what this rank reads from ``position`` on."""
        num_replicas, rank = self._ranks()
        return Share(self.length, num_replicas, rank, self.uneven, start=self._position)

    def __len__(self) -> int:
        """What this rank reads in a whole epoch, whatever ``position`` is; loops count from an epoch's beginning."""
        return len(replace(self.share(), start=0))

    @property
    def left(self) -> int:
        """What this rank reads from ``position`` to the end of the epoch."""
        return len(self.share())

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch's order; if it is another epoch than before, from its beginning.

        Raises:
            SamplerError: ``epoch`` is not a whole number, or negative.
        """
        epoch = epoch_of(epoch)
        if epoch == self.epoch:
            self._tell_wrapped()
        else:
            self.resume_at(epoch, 0)

    def resume_at(self, epoch: int, position: int) -> None:
        """Read this epoch's order from a position of the global order on; pass the same on every rank.

        Raises:
            SamplerError: ``epoch`` is negative, or ``position`` is not from 0 to the length of the order.
        """
        epoch = epoch_of(epoch)
        remedy = "take it from a state that a sampler of this length has saved"
        self._position = whole_number(position, "position", at_most=self.length, remedy=remedy)
        self.epoch = epoch
        self._progress = None
        self._tell_wrapped()

    def state_dict(self, consumed: int | None = None) -> dict[str, int | bool | str]:
        """Return the position that has been reached: the same on every rank, and good for any number of ranks.

        Args:
            consumed: how much of its share each rank has used since the iterator was started; by default, what
                this rank's newest iterator has handed out, which a loader that prefetches asks for before it is used.

        Returns:
            Plain numbers, booleans and strings.

        Raises:
            SamplerError: ``consumed`` is negative or no whole number.
        """
        if consumed is None:
            consumed = 0 if self._progress is None else self._progress.handed_out
        consumed = whole_number(consumed, "consumed", remedy="count the samples of this rank")
        return {**self.identity(), "epoch": self.epoch, "position": self.share().position_after(consumed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a state, saved on any number of ranks.

        Raises:
            SamplerError: it is no such state, or of another length, seed, shuffle, policy or kind of sampler.
        """
        if not isinstance(state, Mapping):
            raise SamplerError(f"state must be a dict (got {state!r}); pass what state_dict() returned")
        mine = self.identity()
        missing = [name for name in (*mine, "epoch", "position") if name not in state]
        if missing:
            raise SamplerError(
                f"state must have {', '.join(map(repr, missing))} (got {sorted(state, key=str)});"
                " pass what state_dict() returned"
            )
        for name, value in mine.items():
            if state[name] != value:
                remedy = _REMEDIES.get(name, f"build the sampler with the {name} of the state")
                raise SamplerError(
                    f"{name} of the state must be the sampler's, {value!r} (got {state[name]!r}); {remedy}"
                )
        self.resume_at(state["epoch"], state["position"])

    def _ranks(self) -> tuple[int, int]:
        """Number of ranks and own rank; what was not given is the process group's at this moment, else 1 and 0.

        So a sampler that is built before the process group is right once the group exists.
        """
        num_replicas, rank = self._given_ranks
        grouped = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if grouped else 1
        if rank is None:
            rank = dist.get_rank() if grouped else 0
        _check_rank(rank, num_replicas)
        return num_replicas, rank

    def identity(self) -> dict[str, int | bool | str]:
        """What must be equal for a position to mean the same."""
        return {
            "version": STATE_VERSION,
            "kind": self.kind,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "uneven": self.uneven,
        }

    def _tell_wrapped(self) -> None:
        """Set the epoch of what this sampler wraps."""


def _validated(num_replicas: int | None, rank: int | None) -> tuple[int | None, int | None]:
    remedy = "leave it out to use the process group's"
    if num_replicas is not None:
        whole_number(num_replicas, "num_replicas", at_least=1, remedy=remedy)
    if rank is not None:
        whole_number(rank, "rank", remedy=remedy)
    if num_replicas is not None and rank is not None:
        _check_rank(rank, num_replicas)
    return num_replicas, rank


def _check_rank(rank: int, num_replicas: int) -> None:
    if rank >= num_replicas:
        raise SamplerError(
            f"rank must be below num_replicas, {num_replicas} (got {rank});"
            " leave both out to use those of the process group"
        )
