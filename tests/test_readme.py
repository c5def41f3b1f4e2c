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


def first_code_block() -> str:
    match = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert match is not None
    return match[1]


def test_code_by_line_20() -> None:
    """A reader finds code to run within the first 20 lines."""
    assert README[: README.index("```python")].count("\n") + first_code_block().count("\n") <= 20


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
