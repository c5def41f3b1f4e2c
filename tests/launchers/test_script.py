"""A plain script, ``python train.py``: it starts the other ranks itself. Those of the README meet in a file."""

from __future__ import annotations

from pathlib import Path

from tests.harness.scripts import run_script
from tests.launchers.runs import SCRIPT, Reference, Run, output_of, results_of_tests


def test_a_plain_script(tmp_path: Path, reference: Reference) -> None:
    """The process that the user starts is rank 0, and starts each other rank once, for all of its Trainers."""
    run, again = Run(tmp_path, "env"), tmp_path / "again"
    arguments = (str(run.records), "--calls", "fit", "test", "--again", str(again))
    output = output_of(run_script(SCRIPT, *arguments))
    run.expect_trained(reference(2), output, returns=4)  # without an init method the script finds a port
    assert results_of_tests(output) == [reference(2).test_results] * 2, "a second call evaluates what was learned"
    run.expect_records(again, reference(2))  # a second Trainer learns the same from the start


def test_an_untouched_script(tmp_path: Path, reference: Reference) -> None:
    """``DDPX_INIT_METHOD`` chooses for ``strategy="ddp_ext"`` where the started ranks shall meet."""
    run = Run(tmp_path, "tcp")
    env = {"DDPX_INIT_METHOD": run.url}
    run.expect_trained(reference(2), output_of(run_script(SCRIPT, str(run.records), env=env)))
