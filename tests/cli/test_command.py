"""The command as it is started: its name, its help, what is here, and whether ranks can work with it."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_ddp_ext.cli import main
from lightning_ddp_ext.cli.app import app
from tests.cli.command import save
from tests.harness.damage import flip
from tests.harness.scripts import run_on_ranks, run_script

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "r"}
COMMAND = "from lightning_ddp_ext.cli import main\n\nif __name__ == '__main__':\n    main()\n"


def test_as_a_module(tmp_path: Path) -> None:
    """`python -m lightning_ddp_ext` does what the installed command does, and its status says how it went."""
    [point] = metadata.entry_points(group="console_scripts", name="lightning-ddp-ext")
    assert point.load() is main
    path = flip(save(tmp_path / "it.ckpt"), "data/0")
    completed = run_script(path, "--json", launcher=("python", "-m", "lightning_ddp_ext", "checkpoint", "verify"))
    assert completed.returncode == 1
    assert json.loads(completed.output)["damaged"][0]["tensors"] == ["state_dict.out.weight"]


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_without_the_extra(library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence says what to install; status 2."""
    for name in [name for name in sys.modules if name.startswith(("lightning_ddp_ext.cli.", f"{library}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"lightning-ddp-ext needs {library}, which is not installed; run pip install 'lightning-ddp-ext[cli]'\n"
    )


def test_help_and_version() -> None:
    """Help names the commands, and completion can be installed for a shell."""
    invoke = CliRunner().invoke
    assert all(command in invoke(app, ["checkpoint", "--help"]).stdout for command in ("inspect", "verify", "clean"))
    assert "--install-completion" in invoke(app, ["--help"]).stdout
    version = metadata.version("lightning-ddp-ext")
    assert invoke(app, ["--version"]).stdout == f"lightning-ddp-ext {version}\n"


def test_env_has_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one document, with what this process would be."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["env", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["versions"]["torch"]
    assert "gloo" in found["backends"]
    assert "127.0.0.1" in found["interfaces"]["lo"]
    assert "rank 1" in found["world"]
    assert found["world"].endswith("torchrun")
    assert found["variables"].items() >= LAUNCHED.items()


def test_variables_that_contradict_one_another_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sentence as a run would end with, after everything else."""
    for name, value in (LAUNCHED | {"RANK": "4"}).items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["env"])
    assert result.exit_code == 1
    assert re.search(r"^this process is +unclear *$", result.stdout, re.MULTILINE)
    assert "rank must be in 0..3 for world_size 4 (got 4)" in result.stderr


@pytest.mark.parametrize("world_size", [1, 2], ids=["alone", "as ranks"])
def test_ranks_meet_reduce_save_verify_and_restore(world_size: int, tmp_path: Path) -> None:
    """Two ranks, started by the command itself or by a launcher; rank 0 reports, and nothing stays."""
    command = tmp_path / "command.py"
    command.write_text(COMMAND)
    output = run_on_ranks(command, "test", "--json", cwd=tmp_path, world_size=world_size)
    (line,) = (line for line in output.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert list(found["steps"]) == ["rendezvous", "all-reduce", "save", "verify", "restore"]
    assert found["steps"]["rendezvous"]["what"] == "2 ranks on 1 node"
    assert (found["passed"], found["error"]) == (True, None)
