"""What all launchers have to equal: stock Lightning."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.harness.training import Kind, make_strategy, on_ranks
from tests.launchers.runs import Learned, Reference
from tests.launchers.train import learn


def learn_with(kind: Kind, directory: Path) -> Learned:
    weights, (_, results) = learn(make_strategy(kind, directory), ("fit", "test"), devices=dist.get_world_size())
    return weights, results


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What stock ``ddp`` learns on so many ranks."""

    @functools.cache
    def learned(world_size: int) -> Learned:
        found: Learned = on_ranks("stock", learn_with, tmp_path_factory.mktemp("stock"), world_size=world_size)[0]
        return found

    return learned
