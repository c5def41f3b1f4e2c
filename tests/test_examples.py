"""Each example runs, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.harness.scripts import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *argv: str, directory: Path, time_limit: float = 60.0) -> str:
    """The output of an example that has ended with status 0."""
    completed = run_script(EXAMPLES / name, *argv, cwd=directory, time_limit=time_limit)
    assert completed.returncode == 0, completed.output
    return completed.output


@pytest.mark.parametrize("strategy", ["ddp_ext", "ddp"])
def test_digits(strategy: str, tmp_path: Path) -> None:
    """The example learns the digits with ours and, unchanged, with stock Lightning's strategy, and resumes."""
    output = run(
        "digits.py", "--strategy", strategy, "--init-method", f"file://{tmp_path}/", "--epochs", "2", directory=tmp_path
    )
    accuracies = [float(figure) for figure in re.findall(r"test_accuracy ([\d.]+)%", output)]
    assert len(accuracies) == 2
    assert min(accuracies) > 90, output
    assert "resumed from" in output


def test_resume_elsewhere(tmp_path: Path) -> None:
    """A run on two ranks is killed, its file is found whole, and three ranks go on at the step that was saved."""
    output = run("resume_elsewhere.py", "--directory", str(tmp_path / "run"), directory=tmp_path, time_limit=110)
    assert "2 ranks begin at step 0" in output
    assert "killed; what is left: " in output
    begun = re.search(r"^3 ranks begin at step (\d+)$", output, re.MULTILINE)
    assert begun is not None, output
    assert int(begun[1]) % 30 == 0
    assert int(begun[1]) > 0
    assert len(re.findall(r"^epoch \d+ ends", output.partition("3 ranks begin")[2], re.MULTILINE)) == 2


def test_exact_metrics(tmp_path: Path) -> None:
    """Four ranks with stock count 44 of 41 images or divide by 40; ours gives the accuracies of one process."""
    output = run("exact_metrics.py", directory=tmp_path)
    rows = re.findall(r"^│ (.+?) +│ (\d+) +│ ([\d.]+)% +│ ([\d.]+)% +│$", output, re.MULTILINE)
    alone, stock, unrepeated, ours = (tuple(map(float, row[1:])) for row in rows)
    assert ours == alone
    assert (ours[0], stock[0], unrepeated[0]) == (41, 44, 41)
    assert ours[1] == ours[2] != stock[1]
    assert unrepeated[1] == pytest.approx(ours[1] * 41 / 40, abs=0.01)


def test_a_configuration_file_sets_every_option_and_is_printed_as_it_was_read(tmp_path: Path) -> None:
    """LightningCLI takes strategy, plugin and callbacks from YAML, prints all their options, and takes those."""
    config, printed = EXAMPLES / "config.yaml", tmp_path / "printed.yaml"
    printed.write_text(run("cli.py", "fit", "--config", str(config), "--print_config", directory=tmp_path))
    options = ("--trainer.strategy.init_args.init_method", f"file://{tmp_path}/meet")
    output = run("cli.py", "fit", "--config", str(printed), *options, directory=tmp_path)
    assert f"process group: gloo, 2 ranks, file://{tmp_path}/meet" in output
    assert "SyncBatchNorm: 1 of 1 layers, statistics over 2 ranks" in output
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert "idle_ranks: repeat" in (tmp_path / "config.yaml").read_text()


def test_a_notebook_trains_in_its_cells(tmp_path: Path) -> None:
    """In a real kernel: the second cell that trains has other ranks, and goes on from the first one's checkpoint."""
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    said = "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.get("name") == "stdout"
    )
    losses = re.findall(r"^loss ([\d.]+), saved to \S+/(epoch=\d-step=\d+).ckpt$", said, re.MULTILINE)
    assert [file for _, file in losses] == ["epoch=2-step=24", "epoch=4-step=36"]
    assert float(losses[1][0]) < float(losses[0][0])


def test_model_parallel(tmp_path: Path) -> None:
    """Two ranks of two devices each, with and without a pipeline; the table says on what it was measured."""
    output = run("model_parallel.py", directory=tmp_path, time_limit=100)
    assert "on the CPU, as there are no four GPUs" in output or "on two GPUs" in output
    assert re.findall(r"^ +(\d+) +\d+ ms +[\d.]+ ×$", output, re.MULTILINE) == ["1", "2", "4"]
