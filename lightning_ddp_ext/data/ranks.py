"""Which rank of how many is a sampler on, when it is asked?"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from lightning_ddp_ext.data.checks import whole_number
from lightning_ddp_ext.errors import SamplerError


@dataclass(frozen=True)
class LazyRanks:
    """``num_replicas`` and ``rank`` as a user gave them; what is None comes from the process group at the time of use.

    Without a process group it is rank 0 of 1: a sampler that is built before the group exists is right once it does.

    Raises:
        SamplerError: one of them is out of range.

    >>> LazyRanks(None, None).now()
    (1, 0)
    >>> LazyRanks(4, 2).now()
    (4, 2)
    """

    num_replicas: int | None
    rank: int | None

    def __post_init__(self) -> None:
        if self.num_replicas is not None:
            whole_number(
                self.num_replicas, "num_replicas", at_least=1, remedy="leave it out to use the process group's"
            )
        if self.rank is not None:
            whole_number(self.rank, "rank", remedy="leave it out to use the process group's")
        if self.num_replicas is not None and self.rank is not None:
            _check_rank(self.rank, self.num_replicas)

    def now(self) -> tuple[int, int]:
        """Number of ranks, and the rank of this process."""
        grouped = dist.is_available() and dist.is_initialized()
        num_replicas = self.num_replicas or (dist.get_world_size() if grouped else 1)
        rank = self.rank if self.rank is not None else (dist.get_rank() if grouped else 0)
        _check_rank(rank, num_replicas)
        return num_replicas, rank


def _check_rank(rank: int, num_replicas: int) -> None:
    if rank >= num_replicas:
        raise SamplerError(
            f"rank must be below num_replicas, {num_replicas} (got {rank});"
            " leave both out to use those of the process group"
        )
