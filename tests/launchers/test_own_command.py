"""A script's ranks start as it was started, and programs that a rank starts are not
that rank.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.harness.scripts import run_script

TRAINS = """
    import os
    import sys
    import warnings

    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    import lightning_ddp_ext

    how = (sys.argv, os.getcwd(), sys.flags.optimize, sys.flags.utf8_mode, sys.warnoptions)
    sys.argv = sys.argv[:1]  # the script consumes its arguments
    os.makedirs("out", exist_ok=True)
    os.chdir("out")
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_ext", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    sys.stdout.write(f"rank {trainer.global_rank} of {trainer.world_size}: {how}\\n")
"""
OPTIONS = ("-X", "utf8", "-O", "-Wignore::DeprecationWarning")
# The words before the arguments, and the file with the script.
STARTS = {
    "a relative path": ((*OPTIONS, "train.py"), "train.py"),
    "a module": ((*OPTIONS, "-m", "pkg.train"), "pkg/train.py"),
    "a folder": ((*OPTIONS, "pkg"), "pkg/__main__.py"),
}


def write(directory: Path, file: str, source: str = TRAINS) -> None:
    path = directory / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(line.removeprefix("    ") for line in source.splitlines()))


@pytest.mark.parametrize("start", STARTS)
def test_ranks_start_as_their_script_did(start: str, tmp_path: Path) -> None:
    """They get the interpreter's options, the arguments and the directory of the start."""
    words, file = STARTS[start]
    write(tmp_path, file)
    launcher = ("env", "-C", str(tmp_path), "python", *words, "--lr", "0.1")
    done = run_script("/dev/null", launcher=launcher)
    seen = re.findall(r"^rank \d of 2: (.*)$", done.output, re.MULTILINE)
    assert done.exit_code == 0, done.output
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert (
        f"'--lr', '0.1', '/dev/null'], '{tmp_path}', 1, 1, ['ignore::DeprecationWarning'])"
        in seen[0]
    )


def test_a_command_on_the_path_starts_its_ranks(tmp_path: Path) -> None:
    """A console script, such as pip installs, changes the directory before it trains."""
    write(tmp_path, "train-it")
    command = tmp_path / "train-it"
    command.write_text(f"#!{sys.executable}\n{command.read_text()}")
    command.chmod(0o755)
    done = run_script("/dev/null", launcher=("env", f"--chdir={tmp_path}", str(command)))
    assert done.exit_code == 0, done.output
    assert len(re.findall(rf"^rank \d of 2: .*'{tmp_path}'", done.output, re.MULTILINE)) == 2, (
        done.output
    )


EVALUATES = f"""{TRAINS}
    import subprocess

    program = [sys.executable, "../train.py"]
    if len(how[0]) == 1 and trainer.global_rank == int(os.environ["RANK_THAT_STARTS_IT"]):
        sys.stdout.flush()
        raise SystemExit(subprocess.run([*program, "again"]).returncode)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_that_a_rank_starts_has_ranks_of_both_numbers(rank: int, tmp_path: Path) -> None:
    """It inherits the rank's variables, and still trains on two ranks."""
    write(tmp_path, "train.py", EVALUATES)
    launcher = ("env", "-C", str(tmp_path), f"RANK_THAT_STARTS_IT={rank}", "python")
    done = run_script(tmp_path / "train.py", launcher=launcher)
    assert done.exit_code == 0, done.output
    ranks = re.findall(r"^rank (\d) of 2: \(\[[^]]*'again'\]", done.output, re.MULTILINE)
    assert sorted(ranks) == ["0", "1"], done.output
