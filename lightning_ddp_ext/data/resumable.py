"""The place in an epoch where a sampler's reading begins, and how to save it and go back there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from lightning_ddp_ext.data.checks import epoch_of, seed_of, uneven_of, whole_number
from lightning_ddp_ext.data.partition import Share, Uneven
from lightning_ddp_ext.data.ranks import LazyRanks
from lightning_ddp_ext.errors import SamplerError

STATE_VERSION = 1

_REMEDIES = {
    "version": "load it with the version of lightning-ddp-ext that saved it",
    "kind": "build the same class of sampler as the run that saved the state",
    "length": "give the sampler the same data as in the run that saved the state",
    "seed": "build the sampler with the seed of the state",
    "shuffle": "build the sampler with the shuffle of the state",
    "uneven": "build the sampler with the policy of the state",
}


class Resumable:
    """Base of everything that shares out one global order among the ranks, and can begin anywhere in it.

    Attributes:
        epoch: the epoch whose order is read next.
        position: where in the global order of this epoch reading begins; the same number on every rank.
        seed, shuffle, uneven: as given.
    """

    kind: ClassVar[str]
    """What a state says that it is the state of."""

    def __init__(self, *, num_replicas: int | None, rank: int | None, shuffle: bool, seed: int, uneven: Uneven) -> None:
        self._ranks = LazyRanks(num_replicas, rank)
        self.shuffle = bool(shuffle)
        self.seed = seed_of(seed)
        self.uneven: Uneven = uneven_of(uneven)
        self.epoch = 0
        self._position = 0

    @property
    def length(self) -> int:
        """Positions of the global order of an epoch."""
        raise NotImplementedError

    @property
    def num_replicas(self) -> int:
        """Number of ranks, now."""
        return self._ranks.now()[0]

    @property
    def rank(self) -> int:
        """This process's rank, now."""
        return self._ranks.now()[1]

    @property
    def position(self) -> int:
        """Where in the global order of this epoch reading begins."""
        return self._position

    def share(self) -> Share:
        """What this rank reads from ``position`` on."""
        num_replicas, rank = self._ranks.now()
        return Share(self.length, num_replicas, rank, self.uneven, start=self._position)

    def __len__(self) -> int:
        """What this rank reads in a whole epoch, wherever reading begins now; loops count from an epoch's beginning."""
        return len(replace(self.share(), start=0))

    @property
    def left(self) -> int:
        """What this rank reads from ``position`` to the end of the epoch."""
        return len(self.share())

    def set_epoch(self, epoch: int) -> None:
        """Read this epoch's order; another one than so far is read from its beginning.

        Raises:
            SamplerError: ``epoch`` is not a whole number, or negative.
        """
        epoch = epoch_of(epoch)
        if epoch != self.epoch:
            self.resume_at(epoch, 0)

    def resume_at(self, epoch: int, position: int) -> None:
        """Read this epoch's order from a position of the global order on; every rank must be given the same.

        Raises:
            SamplerError: ``epoch`` is negative, or ``position`` is not from 0 to the length of the order.
        """
        epoch = epoch_of(epoch)
        remedy = "take it from a state that a sampler of this length has saved"
        self._position = whole_number(position, "position", at_most=self.length, remedy=remedy)
        self.epoch = epoch
        self._forget_iterator()

    def state_dict(self, consumed: int | None = None) -> dict[str, int | bool | str]:
        """The place that has been reached, the same on every rank and good for any number of ranks.

        Args:
            consumed: how much of its share each rank has used since the iterator was started; by default, what
                this rank's newest iterator has handed out, which a loader that prefetches asks for before it is used.

        Returns:
            Plain numbers, booleans and strings.

        Raises:
            SamplerError: ``consumed`` is negative or no whole number.
        """
        if consumed is None:
            consumed = self._handed_out()
        consumed = whole_number(consumed, "consumed", remedy="count the samples of this rank")
        return {**self._identity(), "epoch": self.epoch, "position": self.share().position_after(consumed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place of a state, saved on any number of ranks.

        Raises:
            SamplerError: it is no such state, or of another length, seed, shuffle, policy or kind of sampler.
        """
        if not isinstance(state, Mapping):
            raise SamplerError(f"state must be a dict (got {state!r}); pass what state_dict() returned")
        mine = self._identity()
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

    def _identity(self) -> dict[str, int | bool | str]:
        """What must be equal for a position to mean the same."""
        return {
            "version": STATE_VERSION,
            "kind": self.kind,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "uneven": self.uneven,
        }

    def _handed_out(self) -> int:
        """How much the newest iterator has handed out."""
        raise NotImplementedError

    def _forget_iterator(self) -> None:
        """The newest iterator is of another place."""
        raise NotImplementedError
