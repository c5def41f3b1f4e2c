"""What the README and the example show is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightning_ddp_ext
from lightning_ddp_ext import errors
from tests.scripts import run_script

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DIGITS = ROOT / "examples" / "digits.py"
RESUME = ROOT / "examples" / "resume_elsewhere.py"
METRICS = ROOT / "examples" / "exact_metrics.py"


def first_code_block() -> str:
    match = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert match is not None
    return match[1]


def test_code_by_line_20() -> None:
    """A reader finds code to run within the first 20 lines, and the whole page is short."""
    assert README[: README.index("```python")].count("\n") + first_code_block().count("\n") <= 20
    assert README.count("\n") < 200


@pytest.mark.lowest
def test_first_example_runs(tmp_path: Path) -> None:
    """The README's first example trains on two ranks, which meet where it says, and leaves nothing there."""
    code = first_code_block().replace("file:///tmp/", f"file://{tmp_path}/meet/")
    (tmp_path / "meet").mkdir()
    completed = run_script(code, cwd=tmp_path)
    assert completed.returncode == 0, completed.output
    assert f"process group: gloo, 2 ranks, file://{tmp_path}/meet/" in completed.output
    assert "`Trainer.fit` stopped: `max_epochs=1` reached." in completed.output
    assert list((tmp_path / "meet").iterdir()) == []


def test_errors_in_readme_exist() -> None:
    """Every error that the README shows is one of the package's."""
    shown = set(re.findall(r"^(\w+Error): ", README, re.MULTILINE))
    assert shown
    assert all(issubclass(getattr(errors, name), lightning_ddp_ext.DDPExtError) for name in shown)


@pytest.mark.parametrize("strategy", ["ddp_ext", "ddp"])
def test_digits(strategy: str, tmp_path: Path) -> None:
    """The example learns the digits with ours and, unchanged, with stock Lightning's strategy, and resumes."""
    completed = run_script(
        DIGITS, "--strategy", strategy, "--init-method", f"file://{tmp_path}/", "--epochs", "2", cwd=tmp_path
    )
    assert completed.returncode == 0, completed.output
    accuracies = [float(figure) for figure in re.findall(r"test_accuracy ([\d.]+)%", completed.output)]
    assert len(accuracies) == 2
    assert min(accuracies) > 90, completed.output
    assert "resumed from" in completed.output


def test_resume_elsewhere(tmp_path: Path) -> None:
    """A run on two ranks is killed, its file is found whole, and three ranks go on at the step that was saved."""
    completed = run_script(RESUME, "--directory", str(tmp_path / "run"), cwd=tmp_path, time_limit=110)
    assert completed.returncode == 0, completed.output
    assert "2 ranks begin at step 0" in completed.output
    assert "killed; what is left: " in completed.output
    begun = re.search(r"^3 ranks begin at step (\d+)$", completed.output, re.MULTILINE)
    assert begun is not None, completed.output
    assert int(begun[1]) % 30 == 0
    assert int(begun[1]) > 0
    assert len(re.findall(r"^epoch \d+ ends", completed.output.partition("3 ranks begin")[2], re.MULTILINE)) == 2


def test_exact_metrics(tmp_path: Path) -> None:
    """Four ranks with stock count 44 of 41 images or divide by 40; ours gives the accuracies of one process."""
    completed = run_script(METRICS, cwd=tmp_path, time_limit=60)
    assert completed.returncode == 0, completed.output
    rows = re.findall(r"^│ (.+?) +│ (\d+) +│ ([\d.]+)% +│ ([\d.]+)% +│$", completed.output, re.MULTILINE)
    alone, stock, unrepeated, ours = (tuple(map(float, row[1:])) for row in rows)
    assert ours == alone
    assert (ours[0], stock[0], unrepeated[0]) == (41, 44, 41)
    assert ours[1] == ours[2] != stock[1]
    assert unrepeated[1] == pytest.approx(ours[1] * 41 / 40, abs=0.01)
