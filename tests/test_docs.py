"""The documentation builds, its code runs, and its lists are complete."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import pickle
import pkgutil
import re
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_ext
from lightning_ddp_ext import DDPExtError
from tests.harness.environment import wait_until
from tests.harness.ranks import RankProcesses, by_hand_env, free_port, run_ranks
from tests.harness.scripts import be_the_script, run_on_ranks, run_script
from tests.harness.training import Net

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Set by the package for the processes that it starts.
INTERNAL = {
    "DDPX_RANK_PID",
    "DDPX_LAUNCHER_PID",
    "DDPX_PRIVATE_FILE",
}


def blocks(text: str, language: str = "python") -> list[tuple[str, str]]:
    """Return title and code of each block of a language in a page; a title is a comment
    in the first line.
    """
    block = rf"^```(?:{language})\n(?:# (\w+\.py|a cell of a notebook)\n)?(.*?)^```$"
    return re.findall(block, text, re.DOTALL | re.MULTILINE)


def page_of(name: str) -> str:
    return (DOCS / name).read_text()


FILES = [
    *DOCS.rglob("*.md"),
    *(ROOT / name for name in ("README.md", "examples/README.md", "benchmarks/README.md")),
]
TEXTS = {os.path.relpath(path, DOCS): path.read_text() for path in FILES}
README = TEXTS["../README.md"]
PAGES = {name: blocks(text) for name, text in TEXTS.items()}
# Run as files.
SCRIPTS = {code: name for name, found in PAGES.items() for title, code in found if title}
# Packages that only scripts of pages use; where one is missing, the script is not run.
OPTIONAL = {
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "optuna_integration": "optuna_integration",
    "import litdata": "litdata",
    "from datasets": "datasets",
    "import webdataset": "webdataset",
}
# Files of examples/ that a page shows in full.
SHOWN = {
    "slurm.sbatch": "guides/launchers.md",
    "kubernetes.yaml": "guides/launchers.md",
    "config.yaml": "guides/lightning-cli.md",
}


@pytest.mark.lowest
def test_first_example_runs(tmp_path: Path) -> None:
    """The README's example, which the quickstart repeats, trains on two ranks."""
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert code in TEXTS["start/quickstart.md"]
    (tmp_path / "train.py").write_text(code)
    output = run_on_ranks(tmp_path / "train.py", cwd=tmp_path)
    assert "process group: gloo, 2 ranks, env://" in output
    assert "`Trainer.fit` stopped: `max_epochs=1` reached." in output


def on_this_machine(code: str, directory: Path, port: int = 29500) -> str:
    """Return the code with a directory of the test and a port of this machine in place
    of the pages' own.
    """
    return code.replace("file:///shared", f"file://{directory}").replace(
        "10.0.0.1:29500", f"127.0.0.1:{port}"
    )


def run_blocks(rank: int, world_size: int, directory: Path) -> None:
    """Run each block on a rank, one after another, each with nothing but itself."""
    os.chdir(directory)
    for name, found in sorted(PAGES.items()):
        for title, code in found:
            if not title:
                assert '"ddp_ext' not in code or "lightning_ddp_ext" in code, (
                    f"{name} lacks it:\n{code}"
                )
                exec(
                    compile(on_this_machine(code, directory), name, "exec"),
                    {"__name__": "__main__"},
                )


def test_blocks_of_pages_run(tmp_path: Path) -> None:
    """Copied blocks work on two ranks; defaults of the Trainer keep the test short."""
    defaults = {
        "accelerator": "cpu",
        "max_epochs": "1",
        "limit_train_batches": "2",
        "enable_progress_bar": "False",
    }
    short = {f"PL_TRAINER_{flag.upper()}": value for flag, value in defaults.items()}
    run_ranks(run_blocks, 2, tmp_path, env={**by_hand_env(2, port=free_port()), **short})


@pytest.mark.parametrize("code", sorted(SCRIPTS, key=SCRIPTS.__getitem__), ids=SCRIPTS.__getitem__)
def test_scripts_of_pages_run(code: str, tmp_path: Path) -> None:
    """A page's script ends with success."""
    for name, package in OPTIONAL.items():
        if re.search(rf"\b{name}\b", code):
            pytest.importorskip(package)
    script = tmp_path / "script.py"
    script.write_text(on_this_machine(code, tmp_path, free_port()))
    run_on_ranks(script, cwd=tmp_path)


def test_scripts_have_a_main_guard() -> None:
    """Each rank runs or imports a script; a block that trains outside of a notebook can
    be copied as one.
    """
    scripts = [
        (name, code)
        for name, found in PAGES.items()
        for title, code in found
        if "notebook" not in title
    ]
    scripts += [(path.name, path.read_text()) for path in (ROOT / "examples").rglob("*.py")]
    calls = r"^(\w+ = )?(trainer|L\.Trainer\(.*\))\.(fit|validate|test|predict)\("
    assert [name for name, code in scripts if re.search(calls, code, re.MULTILINE)] == []


def has_saved(directory: Path, run: int) -> bool:
    """Whether a run in this directory, counted from 0, has saved an epoch."""
    return any(directory.glob(f"lightning_logs/version_{run}/checkpoints/*.ckpt"))


@pytest.mark.nightly
def test_a_page_that_is_stopped_continues_when_it_is_run_again(tmp_path: Path) -> None:
    """After SIGTERM to any rank the same command continues, as the page claims."""
    script = tmp_path / "train.py"
    has_resumed: list[bool] = []
    script.write_text(PAGES["guides/preemption.md"][0][1])
    for run in range(2):
        with RankProcesses(
            be_the_script, 2, script, (), tmp_path, env=by_hand_env(2, free_port())
        ) as ranks:
            begun = ranks.wait_for_output("Trainer(log_every_n_steps=", rank=0)
            resumed = re.search(r"ckpt_path='last' is \S+/last-preempted\.ckpt", begun)
            has_resumed.append(resumed is not None)
            wait_until(partial(has_saved, tmp_path, run), lambda: "no epoch is saved", 120.0)
            ranks.kill(1, signal.SIGTERM)
            assert {outcome.exit_code for outcome in ranks.wait()} == {143}
    assert has_resumed == [False, True]


# Commands that are not run, and why; all others of a page's shell are, with the page's
# first block as train.py.
NOT_RUN = {
    r"^pip install .*$": "needs the network; `make test-wheel` installs",
    r"^make .*$": "takes the machine; `make demo` is examples/digits.py, which test_examples runs",
    r"^srun .*$": "needs SLURM; tests/field has jobs",
    r"^export .*\nmpirun .*$": "needs MPI; tests/launchers has its variables",
    r"^(export .*\n)?torchrun --nnodes .*\\\n.*$": "needs two machines; tests/field has two agents",
    r"^export .*  # in both terminals\n(.*\n)*.*pdb train.py$": "needs two terminals",
}
SHELL = [(name, code) for name, text in TEXTS.items() for _, code in blocks(text, "console")]


def commands_of(code: str) -> str:
    for left_out in NOT_RUN:
        code = re.sub(left_out, "", code, flags=re.MULTILINE)
    return code


RUN = [
    (name, code) for name, code in SHELL if re.search(r"^(\$ )?\w", commands_of(code), re.MULTILINE)
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "code"), RUN, ids=[name for name, _ in RUN])
def test_commands_of_pages_run(name: str, code: str, tmp_path: Path) -> None:
    """The commands succeed and print what the page shows, with a directory and a free
    port of this machine.
    """
    commands = re.sub(r"^\$ ", "", commands_of(code), flags=re.MULTILINE)
    shown: list[str] = []
    if commands != commands_of(code):
        commands, *shown = commands.splitlines(keepends=True)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    scripts = {"train.py": PAGES[name][0][1]} | {
        title: script for title, script in PAGES[name] if title
    }
    torch.save(Net().state_dict(), tmp_path / "last.ckpt")
    env = {"PL_TRAINER_MAX_EPOCHS": "1", "PL_TRAINER_ACCELERATOR": "cpu"}
    port = free_port()
    for title, script in scripts.items():
        (tmp_path / title).write_text(on_this_machine(script, tmp_path, port))
    here = on_this_machine(commands, tmp_path, port)
    done = run_script(f"set -e\n{here}", launcher=("bash",), cwd=tmp_path, env=env, time_limit=400)
    assert done.exit_code == 0, done.output
    assert [
        line for line in shown if line not in ("...\n", "…\n") and line not in done.output
    ] == []


def test_site_builds_strictly_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    """No broken link or reference; scripts, styles, fonts and pictures are the site's
    own.
    """
    places = [str(tmp_path / "trees"), ".", str(tmp_path / "site")]
    command = [sys.executable, *["-m", "sphinx", "-c", "docs", "-W", "-q", "-d"], *places]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    loaded = (
        r'<(?:script|img|iframe)[^>]+src="?(?:https?:)?//[^>]+'
        r'|<link[^>]+rel="?(?:style|preconnect)[^>]+//[^>]+'
    )
    pages = list((tmp_path / "site").rglob("*.html"))
    missing = [
        path
        for path in FILES
        if not (tmp_path / "site" / path.relative_to(ROOT)).with_suffix(".html").is_file()
    ]
    assert missing == []
    assert (
        'id="lightning_ddp_ext.RankZeroCheckpointIO.wait"'
        in (tmp_path / "site/docs/reference/api.html").read_text()
    )
    assert [hit for page in pages for hit in re.findall(loaded, page.read_text())] == []
    styles = [style.read_text() for style in (tmp_path / "site").rglob("*.css")]
    assert [
        hit
        for style in styles
        for hit in re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//\S+", style)
    ] == []


def test_examples_in_docstrings_are_right() -> None:
    """Each example prints what the docstring shows."""
    names = [
        module.name
        for module in pkgutil.walk_packages(lightning_ddp_ext.__path__, "lightning_ddp_ext.")
    ]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    results = [doctest.testmod(module) for module in modules]
    assert sum(result.attempted for result in results) > 50
    assert sum(result.failed for result in results) == 0


def subclasses(cls: type[Exception]) -> Iterator[str]:
    for child in cls.__subclasses__():
        yield child.__name__
        yield from subclasses(child)


def test_pages_can_be_read_on_a_code_host() -> None:
    """Links lead to files, and no markup is only shown by a build, which checks linked
    headings.
    """
    for name, text in TEXTS.items():
        linked = re.findall(r"\]\((?!https?:)([^)#]+)", text)
        assert [link for link in linked if not ((DOCS / name).parent / link).is_file()] == [], name
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        assert (
            re.findall(r"^--8<--.*|^:::.*|^!!! .*|\{ ?[#:.].*|^```\{.*", prose, re.MULTILINE) == []
        ), name


@pytest.mark.parametrize(("name", "page"), SHOWN.items(), ids=SHOWN)
def test_a_file_that_a_page_shows_is_as_the_repository_has_it(name: str, page: str) -> None:
    """Pages repeat these files of ``examples/`` word for word."""
    assert f"\n{(ROOT / 'examples' / name).read_text()}```\n" in TEXTS[page]


def test_pictures_are_as_their_scripts_draw_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The charts show the tables of benchmarks/README.md: `python docs/charts.py`
    renews them.
    """
    monkeypatch.syspath_prepend(DOCS)
    charts = importlib.import_module("charts")
    ring = importlib.import_module("ring")
    drawn = {name: charts.draw(name) for name in charts.CHARTS} | {"ring": ring.draw(4)}
    assert {path.stem: path.read_text() for path in (DOCS / "images").iterdir()} == drawn
    assert drawn["ring"].count(">rank ") == 8


def test_the_page_of_benchmarks_shows_the_recorded_results() -> None:
    """`python benchmarks/tables.py` would change nothing, and every recorded table is on
    the page.
    """
    page = TEXTS["../benchmarks/README.md"]
    assert runpy.run_path(str(ROOT / "benchmarks/tables.py"))["renew"](page) == page
    recorded = {
        f"<!-- table: {path.stem} {table} -->"
        for path in (ROOT / "benchmarks/results").glob("*.json")
        for table in json.loads(path.read_text())["tables"]
    }
    assert {mark for mark in recorded if mark not in page} == set()


def test_every_error_has_a_cause_and_a_fix_under_its_heading() -> None:
    """The page of errors has each class once."""
    found = re.findall(
        r"^### (\w+)\n\n(.*?)(?=\n\n#|\Z)", page_of("reference/errors.md"), re.M | re.S
    )
    assert sorted(name for name, _ in found) == sorted(set(subclasses(DDPExtError)))
    assert [
        name for name, text in found if "**Cause:**" not in text or "**Fix:**" not in text
    ] == []


def test_a_traceback_ends_with_the_address_of_its_error() -> None:
    """The address leads to a heading that exists, also after pickling."""
    error = lightning_ddp_ext.MissingRanksError("rank 3 is missing", missing=(3,))
    address, _, anchor = error.__notes__[0].split()[1].partition("#")
    # As code hosts and the site write the address of a heading.
    assert anchor == "missingrankserror"
    assert "\n### MissingRanksError\n" in (ROOT / address).read_text()
    assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__
    assert traceback.format_exception(error)[-1] == error.__notes__[0] + "\n"


def test_every_argument_of_the_strategy_is_described_with_its_default() -> None:
    """DDP's own are those of the installed torch, and not all of them are described."""
    page = page_of("reference/strategy.md")
    strategy_section, _, ddp_section = page.partition("## DDP arguments")
    parameters = inspect.signature(lightning_ddp_ext.DDPExtStrategy).parameters
    of_strategy = documented_defaults(strategy_section)
    assert sorted(of_strategy) == sorted(parameters.keys() - {"ddp_kwargs"})
    all_parameters = {**inspect.signature(DistributedDataParallel).parameters, **parameters}
    for name, default in (of_strategy | documented_defaults(ddp_section)).items():
        if not default.endswith(" s"):  # the others are durations
            written = default.strip("`").replace('"', "'")
            assert written == repr(all_parameters[name].default), name


def documented_defaults(text: str) -> dict[str, str]:
    """Return the defaults of the arguments in a page's tables, by name."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", text, re.MULTILINE)
    return {name: default for names, default in rows for name in re.findall(r"\w+", names)}


def test_every_variable_of_ours_is_described() -> None:
    """`DDPX_*` as the package's source has them, without internal ones."""
    sources = "".join(path.read_text() for path in (ROOT / "lightning_ddp_ext").rglob("*.py"))
    page = page_of("reference/environment.md")
    documented = set(re.findall(r"^\| `(DDPX_\w+)`", page, re.MULTILINE))
    assert documented == set(re.findall(r"DDPX_[A-Z_]+", sources)) - INTERNAL


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    """Errors are on a page for themselves, but for their base class."""
    shown = re.findall(r"^\| \[`(\w+)`\]", page_of("reference/api.md"), re.MULTILINE)
    names = {name for name in lightning_ddp_ext.__all__ if not name.endswith("Error")}
    assert sorted(shown) == sorted(names | {"DDPExtError"})
