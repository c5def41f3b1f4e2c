"""A script's ranks start as it was started, and programs that a rank starts are not
that rank.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harness.scripts import run_script

TRAINS = """
    import json
    import os
    import sys

    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    import lightning_ddp_ext

    start = {
        "arguments": sys.argv[1:],
        "directory": os.getcwd(),
        "optimize": sys.flags.optimize,
        "utf8_mode": sys.flags.utf8_mode,
        "warnoptions": sys.warnoptions,
    }
    sys.argv = sys.argv[:1]  # the script consumes its arguments
    os.makedirs("out", exist_ok=True)
    os.chdir("out")
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_ext", max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    start["rank"] = trainer.global_rank
    start["world_size"] = trainer.world_size
    sys.stdout.write(f"started: {json.dumps(start)}\\n")
"""
OPTIONS = ("-X", "utf8", "-O", "-Wignore::DeprecationWarning")
# ``run_script`` appends a script's path to the command. The commands below already name
# their script, which takes this harmless path as its last argument.
LAST_ARGUMENT = "/dev/null"


class Start(NamedTuple):
    """The file with the script, and the command that runs it in the file's directory."""

    file: str
    command: tuple[str, ...]


STARTS = {
    "a relative path": Start("train.py", ("python", *OPTIONS, "train.py")),
    "a module": Start("pkg/train.py", ("python", *OPTIONS, "-m", "pkg.train")),
    "a folder": Start("pkg/__main__.py", ("python", *OPTIONS, "pkg")),
    "a console script": Start("train-it", ("./train-it",)),
}


def write(path: Path, source: str = TRAINS) -> None:
    """Write a script that can also be run as a command."""
    path.parent.mkdir(exist_ok=True)
    options = " ".join(OPTIONS)
    path.write_text(f"#!/usr/bin/env -S {sys.executable} {options}\n{textwrap.dedent(source)}")
    path.chmod(0o755)


def starts_in(output: str) -> list[dict[str, Any]]:
    """Return how each rank of a script was started."""
    return [json.loads(line) for line in re.findall(r"^started: (.*)$", output, re.MULTILINE)]


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_ranks_start_as_their_script_did(start: Start, tmp_path: Path) -> None:
    """They get the interpreter's options, the arguments and the directory of the start."""
    write(tmp_path / start.file)
    launcher = ("env", "-C", str(tmp_path), *start.command, "--lr", "0.1")
    done = run_script(LAST_ARGUMENT, launcher=launcher)
    assert done.exit_code == 0, done.output
    starts = starts_in(done.output)
    assert sorted(each.pop("rank") for each in starts) == [0, 1]
    of_each_rank = {
        "arguments": ["--lr", "0.1", LAST_ARGUMENT],
        "directory": str(tmp_path),
        "optimize": 1,
        "utf8_mode": 1,
        "warnoptions": ["ignore::DeprecationWarning"],
        "world_size": 2,
    }
    assert starts == [of_each_rank] * 2


# Rank ``RANK_THAT_STARTS_IT`` runs the script again, with an argument.
EVALUATES = f"""{TRAINS}
    import subprocess

    program = [sys.executable, "../train.py"]
    if not start["arguments"] and trainer.global_rank == int(os.environ["RANK_THAT_STARTS_IT"]):
        sys.stdout.flush()
        raise SystemExit(subprocess.run([*program, "again"]).returncode)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_program_that_a_rank_starts_has_ranks_of_both_numbers(rank: int, tmp_path: Path) -> None:
    """It inherits the rank's variables, and still trains on two ranks."""
    write(tmp_path / "train.py", EVALUATES)
    launcher = ("env", "-C", str(tmp_path), f"RANK_THAT_STARTS_IT={rank}", "python")
    done = run_script(tmp_path / "train.py", launcher=launcher)
    assert done.exit_code == 0, done.output
    again = [each for each in starts_in(done.output) if each["arguments"] == ["again"]]
    assert sorted(each["rank"] for each in again) == [0, 1], done.output
    assert [each["world_size"] for each in again] == [2, 2]
