"""The subcommands: what they print, and their exit status; `test` also starts ranks."""

import contextlib
import io
import os
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from lightning_ddp_ext.cli import main
from tests.checkpoint.content import WouldRun, flip, without_checksums
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


def save(path: Path, **entries: Any) -> Path:
    """Save a checkpoint like Lightning's: 3 epochs, 120 steps, a linear layer with its
    optimiser, and ``entries``.
    """
    content = {
        "pytorch-lightning_version": "2.6.6",
        "epoch": 3,
        "global_step": 120,
        "state_dict": {
            "out.weight": torch.arange(6000.0).reshape(60, 100),
            "out.bias": torch.zeros(60),
        },
        "optimizer_states": [
            {"state": {0: {"exp_avg": torch.ones(60, 100), "step": torch.tensor(120.0)}}}
        ],
    }
    torch.save({**content, **entries}, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "it.ckpt"


def test_files_are_verified(path: Path, tmp_path: Path) -> None:
    """Each file gets a sentence, which names damaged records, and none of its code runs.

    The status is 0 only if all files are intact.
    """
    good = save(path)
    bad = save(tmp_path / "bad.ckpt", it=WouldRun(tmp_path / "ran"))
    unknown = tmp_path / "u.ckpt"
    flip(flip(bad, "data/1"), "data.pkl")
    with without_checksums():
        save(unknown)
    ended = run("checkpoint", "verify", good, bad, unknown)
    assert ended.returncode == 1
    assert f"{good} is intact: " in ended.stdout
    assert (
        f"checkpoint {bad} is damaged: data.pkl, data/1 do not match the recorded CRC-32"
        in ended.stderr
    )
    assert f"{unknown} lacks checksums for some or all records, so not all damage" in ended.stdout
    assert run("checkpoint", "verify", good).returncode == 0
    assert run("checkpoint", "verify", good, unknown).returncode == 1
    assert not (tmp_path / "ran").exists()


def test_objects_of_a_store_are_verified(path: Path) -> None:
    """A URL that fsspec supports is fetched."""
    store = MemoryFileSystem()
    store.pipe_file("/cli/good.ckpt", save(path).read_bytes())
    store.pipe_file("/cli/bad.ckpt", flip(path, "data/0").read_bytes())
    ended = run("checkpoint", "verify", "memory://cli/good.ckpt", "memory://cli/bad.ckpt")
    assert "memory://cli/good.ckpt is intact" in ended.stdout
    assert "checkpoint memory://cli/bad.ckpt is damaged" in ended.stderr
    store.rm("/cli", recursive=True)


def archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("notes/today.txt", "nothing")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: os.truncate(path, 9000), "was probably truncated"),
        (archive, "is not a checkpoint: it is a zip archive without data.pkl"),
        (os.unlink, "it.ckpt does not exist"),
    ],
)
def test_an_unusable_file_gets_one_sentence(
    spoil: Callable[[Path], object], says: str, path: Path
) -> None:
    """The sentence is on stderr, and the status is 1."""
    spoil(save(path))
    ended = run("checkpoint", "verify", path)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert says in ended.stderr


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "/proc/self/mem",
            "could not be read, but may be intact: Input/output error; check its file system",
        ),
        (
            "nosuch://bucket/it.ckpt",
            "'nosuch://bucket/it.ckpt' is not a valid path or URL (ValueError: Protocol not known",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_not_called_damaged(path: str, says: str) -> None:
    """The sentence names the system's or the library's error, and the status is 1."""
    ended = run("checkpoint", "verify", path)
    assert ended.returncode == 1
    assert says in ended.stderr


def test_help_and_version() -> None:
    """Help names the commands; an unknown command exits with status 2."""
    assert "verify" in run("checkpoint", "--help").stdout
    assert run("--version").stdout == f"lightning-ddp-ext {metadata.version('lightning-ddp-ext')}\n"
    assert run("checkpoint", "fix").returncode == 2


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
    expected = ["connected and trained", "reduced", "saved", "verified", "restored"]
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
