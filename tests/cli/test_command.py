"""The command as it is started: by its name, as a module, and without the libraries that it needs."""

from __future__ import annotations

import doctest
import json
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_ddp_ext.cli import main, output
from lightning_ddp_ext.cli.app import app
from tests.cli.command import checkpoint, save
from tests.harness.damage import flip
from tests.harness.scripts import run_script


def test_the_command_is_installed() -> None:
    """`lightning-ddp-ext` is on the path of whoever installs the package (when it is not: `make venv`)."""
    [point] = metadata.entry_points(group="console_scripts", name="lightning-ddp-ext")
    assert point.load() is main


def test_as_a_module(tmp_path: Path) -> None:
    """`python -m lightning_ddp_ext` does the same, in a process of its own, and its status says how it went."""
    path = flip(save(tmp_path / "it.ckpt"), "data/0")
    completed = run_script(path, "--json", launcher=("python", "-m", "lightning_ddp_ext", "checkpoint", "verify"))
    assert completed.returncode == 1
    assert completed.stderr == ""
    assert json.loads(completed.stdout)["damaged"][0]["tensors"] == ["state_dict.out.weight"]


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


@pytest.mark.parametrize("command", ["inspect", "verify", "clean"])
def test_a_command_without_its_argument_is_refused(command: str) -> None:
    """Status 2, as for any command line that is not understood."""
    assert checkpoint(command).status == 2


def test_help_names_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with what it does."""
    monkeypatch.setattr(sys, "argv", ["lightning-ddp-ext", "checkpoint", "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("inspect", "verify", "clean"))


def test_the_version_is_printed() -> None:
    """By `--version`, and completion can be installed for a shell."""
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"lightning-ddp-ext {metadata.version('lightning-ddp-ext')}\n")
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout


def test_examples_in_docstrings_hold() -> None:
    """Sizes, ages and numbers are written as the docstrings show."""
    found = doctest.testmod(output)
    assert found.attempted > 0
    assert found.failed == 0
