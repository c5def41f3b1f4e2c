"""Start the engines of these tests, once for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.field.slurm import Slurm, why_unavailable
from tests.harness.environment import skip_because


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A SLURM with two nodes; skips if it cannot run here."""
    skip_because(why_unavailable())
    with Slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started
