"""The subcommands: what they print, and their exit status; `test` also starts ranks."""

import contextlib
import io
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.cli import main
from tests.harness.scripts import run_on_ranks


def run(*arguments: str | Path) -> CompletedProcess[str]:
    """Run `lightning-ddp-ext` with these arguments in this process."""
    stdout = io.StringIO()
    stderr = io.StringIO()
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as ended,
    ):
        main([str(argument) for argument in arguments])
    return CompletedProcess(arguments, ended.value.code, stdout.getvalue(), stderr.getvalue())


def test_help_and_version() -> None:
    """Help names the commands; an unknown command exits with status 2."""
    assert "test that ranks can connect" in run("--help").stdout
    assert run("--version").stdout == f"lightning-ddp-ext {metadata.version('lightning-ddp-ext')}\n"
    assert run("checkpoint").returncode == 2


LAUNCHED = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "r",
    "GROUP_WORLD_SIZE": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "MPI_LOCALNRANKS": "2",
}


def test_env_has_what_a_bug_report_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints one fact a line."""
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    ended = run("env")
    facts = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
    assert ended.returncode == 0
    assert facts["devices"] == "cuda:0 NVIDIA H100, cuda:1 NVIDIA H100"
    assert f"torch {metadata.version('torch')}" in facts["versions"]
    assert "gloo" in facts["backends"]
    assert (facts["nccl"] == "none") != dist.is_nccl_available()
    assert "lo 127.0.0.1" in facts["interfaces"]
    assert facts["world"] == "rank 1 of 4, torchrun"
    assert all(f"{name} {value}" in facts["variables"] for name, value in LAUNCHED.items())


def test_env_reports_contradictory_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is that of a run with these variables, and the status is 1."""
    for name, value in {**LAUNCHED, "RANK": "4"}.items():
        monkeypatch.setenv(name, value)
    ended = run("env")
    assert ended.returncode == 1
    assert "rank must be an integer from 0 to 3 (got 4)" in ended.stdout


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """Return a script that is the installed command."""
    path = tmp_path / "command.py"
    path.write_text(
        "from lightning_ddp_ext.cli import main\n\nif __name__ == '__main__':\n    main()\n"
    )
    return path


@pytest.mark.parametrize("world_size", [1, 2], ids=["alone", "as ranks"])
def test_ranks_connect_reduce_save_verify_and_restore(
    world_size: int, command: Path, tmp_path: Path
) -> None:
    """The command itself or a launcher starts two ranks; rank 0 prints what has passed."""
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
    expected = ["connected and trained", "reduced", "saved", "verified and restored"]
    assert parts == [*expected, "all tests passed (ranks: 2, nodes: 1)"], output


REFUSED = [
    ("--devices 0", "devices=0"),
    ("--devices -3", "should be an int > 0"),
    (
        "--init-method foo",
        "init_method must be env://, tcp://HOST:PORT or file:///PATH (got 'foo'); ",
    ),
    (
        "--init-method tcp://host",
        "init_method 'tcp://host' needs a port (got none); write tcp://host:29500",
    ),
    ("--init-method file:///no/such/run", "needs an existing directory that this user can write"),
    ("--accelerator foo", "invalid accelerator name: `accelerator='foo'`"),
    pytest.param(
        "--accelerator gpu",
        "No supported gpu backend found",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU"),
    ),
]


@pytest.mark.parametrize(("options", "reason"), REFUSED)
def test_an_option_that_cannot_be_used_is_an_error_in_one_line(
    options: str, reason: str, command: Path, tmp_path: Path
) -> None:
    """The status is that of wrong usage, and no traceback is printed."""
    [line] = run_on_ranks(
        command, "test", *options.split(), cwd=tmp_path, world_size=1, returncode=2
    ).splitlines()
    assert line.startswith("lightning-ddp-ext test: error: ")
    assert reason in line
