"""The command ``python -m lightning_ddp_ext``, which describes ranks and times them."""

import re
from importlib import metadata
from pathlib import Path

from tests.harness.scripts import run_on_ranks


def test_each_rank_is_described_before_an_all_reduce(tmp_path: Path) -> None:
    """Under a launcher, each rank prints its place, and rank 0 the time."""
    command = tmp_path / "command.py"
    command.write_text(
        "import runpy\n\n"
        "runpy.run_module('lightning_ddp_ext', run_name='__main__', alter_sys=True)\n"
    )
    output = run_on_ranks(command, "--accelerator", "cpu", cwd=tmp_path)
    versions = rf"torch {re.escape(metadata.version('torch'))}, lightning \S+, lightning-ddp-ext \S"
    for rank in (0, 1):
        place = rf"^rank {rank} of 2: local rank {rank} of node 0, .*, pid \d+, cpu \(CPU\); "
        assert re.search(f"{place}.*{versions}", output, re.MULTILINE), output
    assert re.search(r"^env://: all-reduce of 4 MiB in \d+\.\d ms$", output, re.MULTILINE), output
