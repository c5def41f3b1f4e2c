"""Exchange a BatchNorm layer's values between ranks.

An exchange on CPU also checks that every rank is in the same layer and pass.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from lightning_ddp_ext.errors import BatchNormError, ConfigurationError

_PASSES = ("forward", "backward")
# A message begins with two numbers: the indices of the layer and of the pass.
_HEADER = 2
# Twice the time of a small exchange between ranks that start together.
_POLL_SECONDS = 0.002

# It does not copy, as all_gather does. torch 2.13 introduced the first name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _wait_for(work: dist.Work) -> None:
    """Wait for an exchange; poll first.

    Waking a thread takes a third of the time of a short exchange. Polling lets other
    threads, such as those in which torch runs the exchange, use the processor.
    """
    deadline = time.monotonic() + _POLL_SECONDS
    while not work.is_completed() and time.monotonic() < deadline:
        os.sched_yield()
    work.wait()


@dataclass(frozen=True)
class SyncContext:
    """The ranks that share a layer's statistics, and the layer's index in the model.

    On CPU, all layers of a model send messages of the same length that begin with the
    layer and the pass, so ranks can detect that their layers differ. Messages of
    different lengths would cause an abort or an endless wait. A layer's few numbers are
    NumPy arrays, since a call on a small array takes a third of the time of a call on a
    tensor.

    A deep copy is the same object, since a copied layer synchronises with the same ranks. A
    pickled copy has no process group, because groups cannot be pickled: it joins the batches
    of all ranks.

    Args:
        process_group: the ranks whose batches are joined; ``None`` for all.
        names: the names of the model's synchronised layers, in the same order on every
            rank; a layer that was not converted is alone.
        index: the layer's position in ``names``.
        max_features: the number of channels of the widest of these layers.

    Raises:
        ConfigurationError: ``process_group`` is not a process group.
    """

    process_group: dist.ProcessGroup | None = None
    names: Sequence[str] = ("a BatchNorm layer",)
    index: int = 0
    max_features: int = 0

    def __post_init__(self) -> None:
        group: object = self.process_group
        # On ranks outside of a new group, torch returns this number in place of the group.
        is_outside = group is dist.GroupMember.NON_GROUP_MEMBER
        if not (group is None or is_outside or isinstance(group, dist.ProcessGroup)):
            raise ConfigurationError(
                "process_group must be a torch.distributed.ProcessGroup, as dist.new_group returns"
                f" it, or None for all ranks (got {group!r})"
            )

    @property
    def world_size(self) -> int:
        """The number of ranks that join their batches.

        It is 1 without any group, or on a rank outside ``process_group``.
        """
        if not dist.is_initialized():
            return 1
        return max(1, dist.get_world_size(self.process_group))  # -1 outside of the group

    @property
    def name(self) -> str:
        """The layer's name, for errors."""
        return self.names[self.index]

    def gather(self, which_pass: str, *vectors: ArrayLike) -> NDArray[np.float64]:
        """Concatenate the vectors, and return those of all ranks, (ranks, n).

        Collective; on CPU. ``which_pass`` is "forward" or "backward".

        Raises:
            BatchNormError: another rank is in another layer or pass.
        """
        values = np.concatenate(vectors)
        message = self._message(which_pass, values)
        received = np.empty((self.world_size, len(message)))
        work = _all_gather(
            torch.from_numpy(received).view(-1),
            torch.from_numpy(message),
            group=self.process_group,
            async_op=True,
        )
        _wait_for(work)
        headers = received[:, :_HEADER]
        if (headers != message[:_HEADER]).any():
            self._refuse(headers.astype(int).tolist())
        return received[:, _HEADER : _HEADER + len(values)]

    def _message(self, which_pass: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        # The widest layer sends most: a count, and two values per channel. A layer may
        # have more channels than at the conversion.
        message = np.zeros(_HEADER + max(1 + 2 * self.max_features, len(values)))
        message[:_HEADER] = self.index, _PASSES.index(which_pass)
        message[_HEADER : _HEADER + len(values)] = values
        return message

    def _refuse(self, headers: list[list[int]]) -> NoReturn:
        ranks = dist.get_process_group_ranks(self.process_group or dist.group.WORLD)
        positions = ", ".join(
            f"rank {rank} is in the {_PASSES[which_pass]} pass of {self._name_of(index)}"
            for rank, (index, which_pass) in zip(ranks, headers, strict=True)
        )
        raise BatchNormError(
            f"ranks are in different BatchNorm layers or passes: {positions}; every rank must run"
            " the same layers in the same order, so use exclude= to leave out layers that only"
            " some ranks run"
        )

    def _name_of(self, index: int) -> str:
        # A rank may be in a model that was converted separately, and has more layers.
        return self.names[index] if index < len(self.names) else "a layer of another model"

    def __deepcopy__(self, memo: object) -> SyncContext:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SyncContext, (None, self.names, self.index, self.max_features)
