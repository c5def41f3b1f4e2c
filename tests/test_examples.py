"""Run each example as a user does, and check its output."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import lightning as L
import pytest
from torch.utils.data import Sampler

import lightning_ddp_ext
from tests.harness.environment import skip_because
from tests.harness.scripts import run_on_ranks, run_script

EXAMPLES = Path(__file__).parents[1] / "examples"

# Patterns of the results that the scripts print if they work. Numbers that depend on the
# machine have a range.
PRINTED = {
    "four_tools.py": r"2 ranks are at step 24, saved to \S+/checkpoints/last\.ckpt",
    "samplers.py": r"epoch 1, rank 1: \[(\d+), \d+, \d+, \d+\]",
    # The data are y = 3 x - 1, with noise.
    "minimal.py": r"2 ranks found y = (2\.9|3\.0)\d x -(0\.9|1\.0)\d in 40 steps",
    "gan_manual_optimization.py": r"generated mean (3\.[5-9]|4\.[0-4])\d, of the data 4\.00",
    # Zero, or the rounding of single precision.
    "gradient_accumulation.py": r"largest difference of a weight: (0e\+00|[1-9]e-0[678])",
    "iterable_uneven.py": r"rank 0 has 20 batches and made 10 steps",
    "slow_ranks.py": r"rank 1 \(host .+, cpu\) is slow: .+ ms a step for data, ",
    "predict_and_gather.py": r"predictions\.csv has 41 rows, in the dataset's order: True",
    # Only the encoder is synchronised.
    "partial_sync_batchnorm.py": (
        r"(?s)encoder: running means [^\n]* the same\n.*head: running means [^\n]* different"
    ),
    "background_checkpoints.py": "ended at step 320; the last checkpoint is ",
    "loggers_and_profiler.py": (
        r"logs/metrics/version_0/metrics\.csv: 6 rows, the last one is 1,[\d.e-]+,59"
    ),
    # The sum differs between machines; versions of the packages follow.
    "bug_report.py": r"(?s)after 10 steps the weights sum to -?\d\.\d{6}\n.*lightning-ddp-ext +\d",
    # Zero, or the rounding of single precision.
    "ring_all_reduce.py": (
        r"largest difference of a weight between ring and all-reduce: (0e\+00|[1-9]e-0[78])"
    ),
    # A row each for 1, 2 and 4 ranks; the first one is the unit of the speed-up.
    "model_parallel.py": r" 1  +\d+ ms  1\.00 ×\n +2  +\d+ ms  .*\n +4  +\d+ ms",
    # The accuracy on four ranks equals that of one process, unlike with stock.
    "exact_metrics.py": (
        r"one process +41 +(\S+) +\1\nddp +44 +(?!\1)\S+ .*\nddp, unrepeated +41 +(?!\1)\S+ .*\n"
        r"ddp_ext +41 +\1 +\1\n"
    ),
    # The checkpoint that killed ranks leave is from the end of an epoch of 30 steps.
    "resume_elsewhere.py": (
        r"(?s)2 ranks begin at step 0\n.*killed; what is left: [^\n]*run\.ckpt.*"
        r"3 ranks begin at step [1-9]\d*0\n"
    ),
}
# Those that only ``make nightly`` runs.
LONG = (
    "exact_metrics.py",
    "gan_manual_optimization.py",
    "bug_report.py",
    "model_parallel.py",
    "resume_elsewhere.py",
    "ring_all_reduce.py",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if name in LONG else []) for name in PRINTED],
)
def test_an_example_succeeds_and_prints_its_result(name: str, tmp_path: Path) -> None:
    """Its output has the result that the script prints only if it works."""
    output = run_on_ranks(EXAMPLES / name, cwd=tmp_path)
    assert re.search(PRINTED[name], output), output


def test_each_callback_and_sampler_is_used_in_an_example() -> None:
    """A user can copy a use of each from a script that runs."""
    public = {name: getattr(lightning_ddp_ext, name) for name in lightning_ddp_ext.__all__}
    shown = [
        name
        for name, value in public.items()
        if isinstance(value, type) and issubclass(value, L.Callback | Sampler)
    ]
    scripts = "".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    assert len(shown) >= 9
    assert [name for name in shown if f"{name}(" not in scripts] == []


@pytest.mark.parametrize(
    "argv", [(), pytest.param(("--strategy", "ddp"), marks=pytest.mark.nightly)], ids=" ".join
)
def test_the_demo_trains_and_resumes(argv: tuple[str, ...], tmp_path: Path) -> None:
    """`make demo` needs no environment variables and starts its second rank, also with
    stock `ddp`.
    """
    output = run_script(EXAMPLES / "digits.py", *argv, cwd=tmp_path)
    # Both runs end with an accuracy of more than 90 %.
    assert len(re.findall(r"test_accuracy 9\d", output)) == 2, output
    assert "resumed from" in output


def losses_in(output: str) -> list[float]:
    """Return the training and the validation loss that the adopted project prints."""
    [losses] = re.findall(r"train_loss ([\d.]+), val_loss ([\d.]+)", output)
    return [*map(float, losses)]


def test_a_project_adopts_ddp_ext_with_two_lines(tmp_path: Path) -> None:
    """With the diff, the training loss is the same, and each image is validated once."""
    skip_because(None if shutil.which("git") else "git is not installed")
    project = shutil.copytree(EXAMPLES / "adopted_project", tmp_path / "project")
    trained, validated = losses_in(run_on_ranks(project / "train.py", cwd=project))
    subprocess.run(["git", "apply", "adopt.diff"], cwd=project, check=True)
    ours = run_on_ranks(project / "train.py", cwd=project)
    assert len(re.findall(r"^\+[^+]", (project / "adopt.diff").read_text(), re.MULTILINE)) == 2
    assert "process group: gloo, 2 ranks" in ours
    # Stock repeats some images, so that all ranks have the same number.
    assert losses_in(ours) == [trained, pytest.approx(validated, rel=0.02)]


@pytest.mark.nightly
def test_the_example_for_torchrun_trains(tmp_path: Path) -> None:
    """`torchrun.sh` has the result of `minimal.py` on the ranks that torchrun starts."""
    output = run_script(EXAMPLES / "torchrun.sh", cwd=tmp_path, launcher=("bash",))
    assert re.search(PRINTED["minimal.py"], output), output


class CliRun(NamedTuple):
    """A run of ``cli.py``: its directory, and the output of all ranks."""

    directory: Path
    output: str


@pytest.fixture(scope="module")
def cli_run(tmp_path_factory: pytest.TempPathFactory) -> CliRun:
    """Have LightningCLI print a configuration, and train with the printed one, and with two
    options of the command line.
    """
    directory = tmp_path_factory.mktemp("cli")
    script = EXAMPLES / "cli.py"
    to_print = ("fit", "--config", str(EXAMPLES / "config.yaml"), "--print_config")
    printed = directory / "printed.yaml"
    printed.write_text(run_on_ranks(script, *to_print, cwd=directory, world_size=1))
    strategy = "--trainer.strategy.init_args"
    options = (
        f"{strategy}.init_method",
        f"file://{directory}/rank0",
        f"{strategy}.find_unused_parameters",
        "true",
    )
    output = run_on_ranks(script, "fit", "--config", str(printed), *options, cwd=directory)
    return CliRun(directory, output)


def test_options_of_the_command_line_reach_the_strategy(cli_run: CliRun) -> None:
    """LightningCLI takes the strategy's own arguments and those of DDP."""
    assert f"process group: gloo, 2 ranks, file://{cli_run.directory}/rank0" in cli_run.output
    assert "find_unused_parameters=True was specified in DDP constructor" in cli_run.output


def test_a_configuration_file_sets_every_option_and_is_printed_as_it_was_read(
    cli_run: CliRun,
) -> None:
    """LightningCLI reads strategy, plugin and callbacks from YAML, and the configuration
    that it prints sets them as well.
    """
    assert "SyncBatchNorm: 1 of 1 layers, statistics over 2 ranks" in cli_run.output
    assert sorted(path.name for path in (cli_run.directory / "checkpoints").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
    ]
    assert "resume_data: exact" in (cli_run.directory / "config.yaml").read_text()


@pytest.mark.nightly
def test_a_notebook_trains_in_its_cells(tmp_path: Path) -> None:
    """In a kernel, the second cell that trains starts new ranks, and resumes from the
    first cell's checkpoint.
    """
    # Imported here because this takes long.
    nbclient, nbformat = (pytest.importorskip(name) for name in ("nbclient", "nbformat"))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    losses = re.findall(
        r"^loss ([\d.]+), saved to \S+/(epoch=\d-step=\d+).ckpt$", printed, re.MULTILINE
    )
    (first_loss, first_file), (second_loss, second_file) = losses
    assert first_file == "epoch=2-step=24"  # 3 epochs of 8 steps on two ranks
    assert second_file == "epoch=4-step=36"  # 2 more, of 6 steps on three ranks
    assert float(second_loss) < float(first_loss)
