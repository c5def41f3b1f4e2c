"""A script's ranks start as it was started, and programs that a rank starts are not
that rank.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

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
# ``run_script`` appends the script's path. Where the launcher's words name the script
# already, this harmless path becomes its last argument.
NO_SCRIPT = "/dev/null"
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


def starts(output: str) -> list[dict[str, Any]]:
    """Return how the ranks of a script were started."""
    return [json.loads(line) for line in re.findall(r"^started: (.*)$", output, re.MULTILINE)]


@pytest.mark.parametrize("start", STARTS)
def test_ranks_start_as_their_script_did(start: str, tmp_path: Path) -> None:
    """They get the interpreter's options, the arguments and the directory of the start."""
    words, file = STARTS[start]
    write(tmp_path, file)
    launcher = ("env", "-C", str(tmp_path), "python", *words, "--lr", "0.1")
    done = run_script(NO_SCRIPT, launcher=launcher)
    assert done.exit_code == 0, done.output
    found = starts(done.output)
    assert sorted(each.pop("rank") for each in found) == [0, 1]
    expected = {
        "arguments": ["--lr", "0.1", NO_SCRIPT],
        "directory": str(tmp_path),
        "optimize": 1,
        "utf8_mode": 1,
        "warnoptions": ["ignore::DeprecationWarning"],
        "world_size": 2,
    }
    assert found == [expected] * 2


def test_a_command_on_the_path_starts_its_ranks(tmp_path: Path) -> None:
    """A console script, such as pip installs, changes the directory before it trains."""
    write(tmp_path, "train-it")
    command = tmp_path / "train-it"
    command.write_text(f"#!{sys.executable}\n{command.read_text()}")
    command.chmod(0o755)
    done = run_script(NO_SCRIPT, launcher=("env", f"--chdir={tmp_path}", str(command)))
    assert done.exit_code == 0, done.output
    found = starts(done.output)
    assert sorted(each["rank"] for each in found) == [0, 1], done.output
    for each in found:
        assert each["directory"] == str(tmp_path)
        assert each["world_size"] == 2


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
    write(tmp_path, "train.py", EVALUATES)
    launcher = ("env", "-C", str(tmp_path), f"RANK_THAT_STARTS_IT={rank}", "python")
    done = run_script(tmp_path / "train.py", launcher=launcher)
    assert done.exit_code == 0, done.output
    again = [each for each in starts(done.output) if each["arguments"] == ["again"]]
    assert sorted(each["rank"] for each in again) == [0, 1], done.output
    assert [each["world_size"] for each in again] == [2, 2]
