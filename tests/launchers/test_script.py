"""A plain script, ``python train.py``: it starts the other ranks itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launchers.runs import SCRIPT, Reference, Run, output_of, results_of_tests
from tests.scripts import run_script


def test_a_plain_script(tmp_path: Path, reference: Reference) -> None:
    """The process that the user starts is rank 0, and starts the others where they shall meet."""
    run = Run(tmp_path, "tcp")
    run.expect_trained(reference(2), output_of(run_script(SCRIPT, *run.argv)))


def test_an_untouched_script(tmp_path: Path, reference: Reference) -> None:
    """``DDPX_INIT_METHOD`` chooses for ``strategy="ddp_ext"``."""
    run = Run(tmp_path, "file")
    env = {"DDPX_INIT_METHOD": run.url}
    run.expect_trained(reference(2), output_of(run_script(SCRIPT, str(run.records), env=env)))


class Repeated:
    """A script that fits and tests with one Trainer, and then fits with a second one; ranks meet by ``env``."""

    def __init__(self, directory: Path) -> None:
        self.run = Run(directory, "env")
        self.again = directory / "again"
        arguments = (str(self.run.records), "--calls", "fit", "test", "--again", str(self.again))
        self.output = output_of(run_script(SCRIPT, *arguments))


@pytest.fixture(scope="module")
def repeated(tmp_path_factory: pytest.TempPathFactory) -> Repeated:
    return Repeated(tmp_path_factory.mktemp("repeated"))


def test_a_plain_script_by_env(repeated: Repeated, reference: Reference) -> None:
    """Without an init method the script finds a port for its ranks, and starts each of them once."""
    repeated.run.expect_trained(reference(2), repeated.output, returns=4)


def test_fit_then_test(repeated: Repeated, reference: Reference) -> None:
    """A second call on a Trainer uses the same ranks, and evaluates what they have learned."""
    assert results_of_tests(repeated.output) == [reference(2).test_results] * 2


def test_a_second_trainer(repeated: Repeated, reference: Reference) -> None:
    """A second Trainer in the script uses the same ranks, and learns the same from the start."""
    repeated.run.expect_records(repeated.again, reference(2))
