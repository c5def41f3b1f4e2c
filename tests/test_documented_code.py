"""Code and commands on pages run, as do examples in docstrings."""

import doctest
import importlib
import os
import pkgutil
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import lightning_ddp_ext
from tests.harness.ranks import by_hand_env, free_port, run_ranks
from tests.harness.scripts import run_on_ranks, run_script
from tests.harness.training import Net

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


class Block(NamedTuple):
    """A block of code on a page. The title is a comment in its first line; a block with a
    title runs as a file, the others run in turn on each rank.
    """

    page: str
    title: str
    code: str


def blocks_of(page: str, text: str, language: str = "python") -> list[Block]:
    """Return the blocks of a page that are in this language."""
    pattern = rf"^```(?:{language})\n(?:# (\w+\.py|a cell of a notebook)\n)?(.*?)^```$"
    found = re.findall(pattern, text, re.DOTALL | re.MULTILINE)
    return [Block(page, title, code) for title, code in found]


FILES = [
    *DOCS.rglob("*.md"),
    *(ROOT / name for name in ("README.md", "examples/README.md", "benchmarks/README.md")),
]
TEXTS = {os.path.relpath(path, DOCS): path.read_text() for path in sorted(FILES)}
BLOCKS = [block for page, text in TEXTS.items() for block in blocks_of(page, text)]
SCRIPTS = [block for block in BLOCKS if block.title]
# Packages by a text in the scripts that need them; scripts whose package is missing are
# skipped.
OPTIONAL = {
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "optuna_integration": "optuna_integration",
    "import litdata": "litdata",
    "from datasets": "datasets",
    "import webdataset": "webdataset",
}


# Blocks of Python.

# The script of the README's terminal; rank 1 is killed in step 58 of the first run.
KILLED_ONCE = """
import os, signal
from pathlib import Path

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ddp_ext


class Kill(L.Callback):
    def on_before_backward(self, trainer, module, loss):
        marker = Path("killed")
        if trainer.global_step == 57 and trainer.global_rank == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer, module):
        if trainer.is_global_zero:
            print(trainer.global_step, "steps are done")


if __name__ == "__main__":
    options = {"devices": 2, "accelerator": "cpu", "max_epochs": 2}
    trainer = L.Trainer(strategy="ddp_ext", callbacks=[Kill()], **options)
    trainer.fit(BoringModel(), ckpt_path="last")
"""


def test_the_terminal_of_the_readme_shows_what_a_killed_run_prints(tmp_path: Path) -> None:
    """The command saves and names the dead rank, and resumes when it is typed again."""
    [terminal] = blocks_of("../README.md", TEXTS["../README.md"], "text")
    _, first, second = terminal.code.split("$ python train.py\n")
    (tmp_path / "train.py").write_text(KILLED_ONCE)
    for shown, exit_code in ((first, 1), (second, 0)):
        output = run_script(tmp_path / "train.py", cwd=tmp_path, exit_code=exit_code)
        for line in shown.splitlines():
            as_here = re.sub(r"host \w+, pid \d+", "…", line)
            pattern = ".*".join(re.escape(part) for part in as_here.split("…"))
            assert re.search(f"^{pattern}$", output, re.MULTILINE), (line, output)


def on_this_machine(code: str, directory: Path, port: int) -> str:
    """Return the code with a directory of the test and a port of this machine in the
    place of those on the pages, which another run of the tests may also use.
    """
    in_directory = re.sub("file:///(shared|tmp)", f"file://{directory}", code)
    return in_directory.replace("10.0.0.1:29500", f"127.0.0.1:{port}")


def run_blocks(rank: int, world_size: int, directory: Path, port: int) -> None:
    """Run all blocks on a rank in turn, each in a new namespace."""
    os.chdir(directory)
    for block in BLOCKS:
        if not block.title:
            code = compile(on_this_machine(block.code, directory, port), block.page, "exec")
            exec(code, {"__name__": "__main__"})


def test_blocks_of_pages_run(tmp_path: Path) -> None:
    """A copied block works on two ranks without the blocks around it."""
    defaults = {
        "accelerator": "cpu",
        "max_epochs": "1",
        "limit_train_batches": "2",
        "enable_progress_bar": "False",
    }
    # The Trainer reads its defaults from these variables.
    short = {f"PL_TRAINER_{flag.upper()}": value for flag, value in defaults.items()}
    env = {**by_hand_env(2, port=free_port()), **short}
    run_ranks(run_blocks, 2, tmp_path, free_port(), env=env)


def test_a_block_with_a_strategys_name_imports_the_package() -> None:
    """A copied block does not depend on the import in another block."""
    named = [block for block in BLOCKS if '"ddp_ext' in block.code and not block.title]
    assert [block for block in named if "lightning_ddp_ext" not in block.code] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.page for script in SCRIPTS])
def test_scripts_of_pages_run(script: Block, tmp_path: Path) -> None:
    """Each script of a page succeeds."""
    used = [package for name, package in OPTIONAL.items() if re.search(rf"\b{name}\b", script.code)]
    for package in used:
        pytest.importorskip(package)
    file = tmp_path / "script.py"
    file.write_text(on_this_machine(script.code, tmp_path, free_port()))
    if used:
        # As a user does: rank 0 creates a database before it starts the other rank.
        run_script(file, cwd=tmp_path, env={"WANDB_MODE": "offline"})
    else:
        run_on_ranks(file, cwd=tmp_path)


def test_scripts_have_a_main_guard() -> None:
    """Ranks may import a script without training. This includes blocks, which a user may
    copy as scripts, except those for a notebook.
    """
    scripts = [(block.page, block.code) for block in BLOCKS if "notebook" not in block.title]
    scripts += [(path.name, path.read_text()) for path in (ROOT / "examples").rglob("*.py")]
    call_at_the_top = re.compile(
        r"^(\w+ = )?(trainer|L\.Trainer\(.*\))\.(fit|validate|test|predict)\(", re.MULTILINE
    )
    assert [name for name, code in scripts if call_at_the_top.search(code)] == []


# Commands in a shell.

# Those that are not run, and why; all others are, with the page's first block as train.py.
NOT_RUN = {
    r"^pip install .*$": "needs the network; `make test-wheel` installs",
    r"^make .*$": "takes the machine; `make demo` is examples/digits.py, which test_examples runs",
    r"^srun .*$": "needs SLURM; tests/field has jobs",
    r"^export .*\nmpirun .*$": "needs MPI; tests/launchers has its variables",
    r"^(export .*\n)?torchrun --nnodes .*\\\n.*$": "needs two machines; tests/field has two agents",
    r"^export .*  # in both terminals\n(.*\n)*.*pdb train.py$": "needs two terminals",
}


def run_part_of(commands: str) -> str:
    """Return the commands of a block without those that are not run; empty if none is."""
    for left_out in NOT_RUN:
        commands = re.sub(left_out, "", commands, flags=re.MULTILINE)
    return commands if re.search(r"^(\$ )?\w", commands, re.MULTILINE) else ""


SHELLS = [
    Block(page, block.title, commands)
    for page, text in TEXTS.items()
    for block in blocks_of(page, text, "console")
    if (commands := run_part_of(block.code))
]


@pytest.mark.nightly
@pytest.mark.parametrize("shell", SHELLS, ids=[shell.page for shell in SHELLS])
def test_commands_of_pages_run(shell: Block, tmp_path: Path) -> None:
    """The commands succeed, and print the lines that the page shows after a command with
    a prompt.
    """
    commands = shell.code
    shown = ""
    if commands.startswith("$ "):
        commands, _, shown = commands.removeprefix("$ ").partition("\n")
    port = free_port()
    blocks = [block for block in BLOCKS if block.page == shell.page]
    for block in reversed(blocks):  # the first one without a title is train.py
        name = block.title or "train.py"
        (tmp_path / name).write_text(on_this_machine(block.code, tmp_path, port))
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    torch.save(Net().state_dict(), tmp_path / "last.ckpt")
    commands = f"set -e\n{on_this_machine(commands, tmp_path, port)}"
    env = {"PL_TRAINER_MAX_EPOCHS": "1", "PL_TRAINER_ACCELERATOR": "cpu"}
    output = run_script(commands, launcher=("bash",), cwd=tmp_path, env=env, time_limit=400)
    lines = [line for line in shown.splitlines() if line not in ("...", "…")]
    assert [line for line in lines if line not in output] == []


def test_examples_in_docstrings_are_right() -> None:
    """Each example prints the lines that the docstring shows."""
    names = [
        module.name
        for module in pkgutil.walk_packages(lightning_ddp_ext.__path__, "lightning_ddp_ext.")
    ]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    results = [doctest.testmod(module) for module in modules]
    assert sum(result.attempted for result in results) > 50
    assert sum(result.failed for result in results) == 0
