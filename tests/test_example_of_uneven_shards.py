"""The example of ranks with shards of different lengths does what it says."""

from pathlib import Path

from tests.harness.scripts import run_script


def test_uneven_shards(tmp_path: Path) -> None:
    """All samples are trained on with "join", and those of equally many steps without."""
    done = run_script(Path(__file__).parents[1] / "examples" / "uneven_shards.py", cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert "stop_at_shortest: 6 steps, 48 of 64 samples" in done.stdout
    assert "join: 10 steps, 64 of 64 samples" in done.stdout
