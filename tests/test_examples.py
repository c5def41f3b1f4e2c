"""Run each example as a user does, and check its output."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.harness.environment import by_srun, skip_because
from tests.harness.outcomes import output_of_all
from tests.harness.ranks import launch_ranks
from tests.harness.scripts import be_the_script, run_on_ranks, run_script, start_script

EXAMPLES = Path(__file__).parents[1] / "examples"

# A pattern for the line that each script prints if it works.
PRINTED = {
    "minimal.py": r"2 ranks found y = (2\.9|3\.0)\d x -(0\.9|1\.0)\d in 40 steps",
    "gan_manual_optimization.py": r"generated mean (3\.[5-9]|4\.[0-4])\d, of the data 4\.00",
    "gradient_accumulation.py": r"largest difference of a weight: (0e\+00|[1-9]e-0[678])",
    "iterable_uneven.py": r"rank 0 has 20 batches and made 10 steps",
    "predict_and_gather.py": r"predictions\.csv has 41 rows, in the dataset's order: True",
    "partial_sync_batchnorm.py": (
        r"(?s)encoder: running means [^\n]* the same\n.*head: running means [^\n]* different"
    ),
    "loggers_and_profiler.py": (
        r"logs/metrics/version_0/metrics\.csv: 6 rows, the last one is 1,[\d.e-]+,59"
    ),
    "bug_report.py": r"(?s)after 10 steps the weights sum to -?\d\.\d{6}\n.*lightning-ddp-ext +\d",
    "ring_all_reduce.py": (
        r"largest difference of a weight between ring and all-reduce: (0e\+00|[1-9]e-0[78])"
    ),
    "model_parallel.py": r" 1  +\d+ ms  1\.00 ×\n +2  +\d+ ms  .*\n +4  +\d+ ms",
}
LONG = ("gan_manual_optimization.py", "bug_report.py", "ring_all_reduce.py", "model_parallel.py")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.nightly] * (each in LONG)) for each in PRINTED]
)
def test_scripts(name: str, tmp_path: Path) -> None:
    """Each script succeeds and prints the expected line."""
    output = run_on_ranks(EXAMPLES / name, cwd=tmp_path)
    assert re.search(PRINTED[name], output), output


@pytest.mark.nightly
def test_hang_watchdog(tmp_path: Path) -> None:
    """Both ranks exit, and the report names the stuck rank, its function and its line."""
    output = run_on_ranks(EXAMPLES / "hang_watchdog.py", cwd=tmp_path, returncode=1)
    stuck = (
        r"rank 0 stopped: rank 1 .* never entered all_reduce .* training_step,"
        r" \S+/hang_watchdog\.py:\d+"
    )
    assert re.search(stuck, output), output
    assert "read_from_a_dead_disk" in "".join(
        path.read_text() for path in (tmp_path / "hang_reports").iterdir()
    )


@pytest.mark.parametrize(
    "argv", [(), pytest.param(("--strategy", "ddp"), marks=pytest.mark.nightly)], ids=" ".join
)
def test_make_demo(argv: tuple[str, ...], tmp_path: Path) -> None:
    """The demo needs no environment variables, starts its second rank, trains and
    resumes, also with stock `ddp`.
    """
    done = run_script(EXAMPLES / "digits.py", *argv, cwd=tmp_path)
    assert done.exit_code == 0, done.output
    assert done.output.count("test_accuracy 9") == 2, done.output
    assert "resumed from" in done.output


def test_adopted_project(tmp_path: Path) -> None:
    """The diff adds two lines.

    The project then has the same training loss, and validates each image once.
    """
    skip_because(None if shutil.which("git") else "git is not installed")
    project = shutil.copytree(EXAMPLES / "adopted_project", tmp_path / "project")
    stock = run_on_ranks(project / "train.py", cwd=project)
    subprocess.run(["git", "apply", "adopt.diff"], cwd=project, check=True)
    ours = run_on_ranks(project / "train.py", cwd=project)
    assert len(re.findall(r"^\+[^+]", (project / "adopt.diff").read_text(), re.MULTILINE)) == 2
    assert "process group: gloo, 2 ranks" in ours
    [before], [after] = (
        re.findall(r"train_loss ([\d.]+), val_loss ([\d.]+)", output) for output in (stock, ours)
    )
    assert after[0] == before[0]
    assert float(after[1]) == pytest.approx(float(before[1]), rel=0.02)


@pytest.mark.nightly
def test_resume_elsewhere(tmp_path: Path) -> None:
    """After two ranks are killed, their checkpoint is undamaged, and three ranks resume
    at the saved step.
    """
    output = run_on_ranks(EXAMPLES / "resume_elsewhere.py", cwd=tmp_path, world_size=1)
    assert "2 ranks begin at step 0" in output
    assert re.search(r"^killed; what is left: .*run\.ckpt", output, re.MULTILINE)
    begun = re.search(r"^3 ranks begin at step (\d+)$", output, re.MULTILINE)
    assert begun is not None, output
    assert int(begun[1]) % 30 == 0
    assert int(begun[1]) > 0


def test_exact_metrics(tmp_path: Path) -> None:
    """On four ranks, stock `ddp` counts 44 instead of 41 images.

    `ddp_ext` has the accuracies of one process.
    """
    output = run_on_ranks(EXAMPLES / "exact_metrics.py", cwd=tmp_path, world_size=1)
    rows = re.findall(r"^(.+?)  +(\d+) +([\d.]+)% +([\d.]+)%$", output, re.MULTILINE)
    alone, stock, unrepeated, ours = (tuple(map(float, row[1:])) for row in rows)
    assert ours == alone
    assert (ours[0], stock[0], unrepeated[0]) == (41, 44, 41)
    assert ours[1] == ours[2] != stock[1]
    assert unrepeated[1] == pytest.approx(ours[1] * 41 / 40, abs=0.01)


@pytest.mark.nightly
def test_torchrun(tmp_path: Path) -> None:
    """The example trains on the ranks that torchrun starts."""
    done = run_script(EXAMPLES / "torchrun.sh", cwd=tmp_path, launcher=("bash",))
    assert done.exit_code == 0, done.output
    assert re.search(PRINTED["minimal.py"], done.output), done.output


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)


SRUN = """
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    echo "task $rank is process $!"
done
status=0
for task in $(jobs -p); do wait $task || status=$?; done
exit $status
"""


@pytest.mark.nightly
def test_slurm(tmp_path: Path) -> None:
    """When one task receives the requested signal, both tasks save and stop.

    The requeued job resumes.
    """
    asked = re.findall(r"^#SBATCH (\S+)$", (EXAMPLES / "slurm.sbatch").read_text(), re.MULTILINE)
    assert {"--requeue", "--signal=SIGUSR1@120", "--ntasks-per-node=2"} <= set(asked)
    program(tmp_path / "bin/srun", SRUN)
    program(tmp_path / "bin/scontrol", f'echo "$@" >> {tmp_path}/requests\n')
    path = os.pathsep.join(
        [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    job = by_srun() | {"PATH": path, "SLURM_PROCID": None, "SLURM_LOCALID": None}
    argv = (EXAMPLES / "slurm.sbatch", str(EXAMPLES / "background_checkpoints.py"))
    with start_script(*argv, env=job, cwd=tmp_path, launcher=("bash",)) as script:
        [task] = re.findall(
            r"^task 1 is process (\d+)$", script.wait_for_output("2 ranks begin at step 0", 0), re.M
        )
        os.kill(int(task), signal.SIGUSR1)
        [done] = script.wait()
    assert done.exit_code == 138, done.output
    assert (tmp_path / "requests").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    again = output_of_all(
        launch_ranks(be_the_script, 2, Path(argv[1]), (), tmp_path, env=by_srun())
    )
    begun = re.search(r"2 ranks begin at step (\d+)", again)
    assert begun is not None, again
    assert 0 < int(begun[1]) < 320
    assert "ended at step 320" in again


def test_kubernetes() -> None:
    """The service, the job and torchrun use the same names, numbers and addresses."""
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    name = job["metadata"]["name"]
    spec = job["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    options = dict(re.findall(r"--(\S+) (\S+)", container["args"][0]))
    assert (service["kind"], service["spec"]) == (
        "Service",
        {"clusterIP": "None", "selector": {"job-name": name}},
    )
    assert (job["kind"], spec["completionMode"], pod["restartPolicy"]) == (
        "Job",
        "Indexed",
        "Never",
    )
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options["master-addr"] == f"{name}-0.{pod['subdomain']}"
    assert options["node-rank"] == "$JOB_COMPLETION_INDEX"
    assert spec["completions"] == spec["parallelism"] == int(options["nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options["nproc-per-node"])
    assert [mount["name"] for mount in container["volumeMounts"]] == [
        volume["name"] for volume in pod["volumes"]
    ]
    # Torchrun kills ranks that have not stopped 30 s after SIGTERM.
    assert pod["terminationGracePeriodSeconds"] > 30


def test_a_configuration_file_sets_every_option_and_is_printed_as_it_was_read(
    tmp_path: Path,
) -> None:
    """LightningCLI reads strategy, plugin and callbacks from YAML, and prints a
    configuration that it can read.
    """
    config = EXAMPLES / "config.yaml"
    printed = tmp_path / "printed.yaml"
    argv = ("fit", "--config", str(config), "--print_config")
    printed.write_text(run_on_ranks(EXAMPLES / "cli.py", *argv, cwd=tmp_path, world_size=1))
    strategy = "--trainer.strategy.init_args"
    options = (
        f"{strategy}.init_method",
        f"file://{tmp_path}/rank0",
        f"{strategy}.find_unused_parameters",
        "true",
    )
    output = run_on_ranks(
        EXAMPLES / "cli.py", "fit", "--config", str(printed), *options, cwd=tmp_path
    )
    assert f"process group: gloo, 2 ranks, file://{tmp_path}/rank0" in output
    assert "SyncBatchNorm: 1 of 1 layers, statistics over 2 ranks" in output
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
    ]
    assert "resume_data: exact" in (tmp_path / "config.yaml").read_text()
    assert "find_unused_parameters=True was specified in DDP constructor" in output


@pytest.mark.nightly
def test_a_notebook_trains_in_its_cells(tmp_path: Path) -> None:
    """In a kernel, the second cell that trains starts new ranks, and resumes from the
    first cell's checkpoint.
    """
    # Slow to import.
    nbclient, nbformat = (pytest.importorskip(name) for name in ("nbclient", "nbformat"))
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    said = "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.get("name") == "stdout"
    )
    losses = re.findall(
        r"^loss ([\d.]+), saved to \S+/(epoch=\d-step=\d+).ckpt$", said, re.MULTILINE
    )
    assert [file for _, file in losses] == ["epoch=2-step=24", "epoch=4-step=36"]
    assert float(losses[1][0]) < float(losses[0][0])
