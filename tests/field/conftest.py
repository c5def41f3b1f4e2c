"""Start the engines of these tests, once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.field import object_store
from tests.field.object_store import ObjectStore
from tests.field.slurm import Slurm, why_unavailable
from tests.harness.environment import skip_because


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A SLURM with two nodes; skips if it cannot run here."""
    skip_because(why_unavailable())
    with Slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """An S3 server with a bucket; skips if it is not installed."""
    skip_because(object_store.why_unavailable())
    with ObjectStore(tmp_path_factory.mktemp("store") / "log") as started:
        yield started
