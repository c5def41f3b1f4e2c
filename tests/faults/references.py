"""Runs that nothing happens to, for comparison: what they learn, and a checkpoint of theirs to go on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.faults.training import Fault, train
from tests.harness.ranks import run_ranks

Weights = list[float]


@dataclass(frozen=True)
class Reference:
    """The weights at the end of a run, and a checkpoint of its second step."""

    weights: Weights
    checkpoint: Path


class References:
    """Makes each run once.

    Args:
        directory: where their checkpoints are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[int, Reference] = {}

    def __getitem__(self, world_size: int) -> Reference:
        if world_size not in self._made:
            directory = self._directory / f"{world_size}-ranks"
            directory.mkdir()
            weights = learn(directory, world_size, keep=-1)
            self._made[world_size] = Reference(weights, directory / "step=2.ckpt")
        return self._made[world_size]


def learn(directory: Path, world_size: int, checkpoint: Path | None = None, keep: int = 1) -> Weights:
    """What a run learns that nothing happens to, from its beginning or from a checkpoint on."""
    first, *others = run_ranks(one_rank, world_size, directory, checkpoint and str(checkpoint), keep)
    assert all(other == first for other in others), "ranks have different weights"
    return first


def alike(learnt: Weights, reference: Weights, world_size: int) -> bool:
    """Whether two runs have learnt the same; of more than two ranks' gradients the order of adding them may differ."""
    # DDP lays its buckets out anew after the first step in a process, so a resumed run may add up otherwise.
    tolerance = 0.0 if world_size == 2 else 1e-6
    return all(abs(mine - other) <= tolerance for mine, other in zip(learnt, reference, strict=True))


def one_rank(rank: int, world_size: int, directory: Path, checkpoint: str | None, keep: int) -> Weights:
    url = f"file://{directory}/store"
    return train(
        Fault(None, rank, directory),
        directory,
        world_size,
        checkpoint,
        keep,
        init_method=url,
        rank=rank,
        world_size=world_size,
    )
