"""The command as it is started: by its name, and with ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness.scripts import run_on_ranks

COMMAND = "from lightning_ddp_ext.cli import main\n\nif __name__ == '__main__':\n    main()\n"


@pytest.mark.parametrize("world_size", [1, 2], ids=["alone", "as ranks"])
def test_ranks_connect_reduce_save_verify_and_restore(world_size: int, tmp_path: Path) -> None:
    """Two ranks, started by the command itself or by a launcher; only rank 0 prints,
    and only its verdict.
    """
    command = tmp_path / "command.py"
    command.write_text(COMMAND)
    output = run_on_ranks(command, "test", cwd=tmp_path, world_size=world_size)
    # On a busy machine the launching process waits for the other rank and prints that;
    # torch warns if lo has no name, and a library of torch 2.15 reports leaks at exit.
    ours = [
        line
        for line in output.splitlines()
        if "; waiting" not in line
        and not line.startswith(("[W", "nanobind: ", " - ", "See https://nanobind."))
    ]
    parts = [line.partition(" s  ")[2] for line in ours]
    expected = ["connected and trained", "reduced", "saved", "verified", "restored"]
    assert parts == [*expected, "all tests passed (ranks: 2, nodes: 1)"], output


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
REFUSED = [
    ("--devices 0", "devices=0"),
    ("--devices -3", "should be an int > 0"),
    ("--init-method foo", "init_method 'foo' needs a scheme (got none); write env://, "),
    (
        "--init-method tcp://host",
        "init_method 'tcp://host' needs a port (got none); write tcp://host:29500",
    ),
    ("--accelerator foo", "invalid accelerator name: `accelerator='foo'`"),
    pytest.param("--accelerator gpu", "No supported gpu backend found", marks=NO_GPU),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_an_option_that_cannot_be_used_is_an_error_in_one_line(
    options: str, reason: str, tmp_path: Path
) -> None:
    """The status is that of wrong usage, and no traceback is printed."""
    command = tmp_path / "command.py"
    command.write_text(COMMAND)
    [line] = run_on_ranks(
        command, "test", *options.split(), cwd=tmp_path, world_size=1, returncode=2
    ).splitlines()
    assert line.startswith("lightning-ddp-ext test: error: ")
    assert reason in line
