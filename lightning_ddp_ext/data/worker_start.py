"""Start a loader's worker: in a separate process group, with seeded generators."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from lightning_ddp_ext.data.seeding import seed_generators


@dataclass(frozen=True)
class StartWorker:
    """A ``worker_init_fn`` that leaves the rank's process group, calls the loader's own one, and seeds the worker.

    torchrun, schedulers and terminals send a signal to all processes of a group. It would kill the workers, which a
    rank needs until it stops.

    Attributes:
        own: the loader's own function.
        epoch: from 0.
        rank: from 0.
        seed: for :func:`seed_generators`; ``None`` to leave the generators as torch and ``own`` seed them.
    """

    own: Callable[[int], None] | None
    epoch: int
    rank: int
    seed: int | None

    def __call__(self, worker: int) -> None:
        """Start a worker."""
        with suppress(OSError):  # a session leader cannot change its group
            os.setpgid(0, 0)
        if self.own is not None:
            self.own(worker)
        if self.seed is not None:
            seed_generators(self.seed, epoch=self.epoch, rank=self.rank, worker=worker)
