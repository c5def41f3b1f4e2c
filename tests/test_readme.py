"""What the README shows is what happens, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lightning_ddp_ext
from lightning_ddp_ext import errors
from tests.harness.scripts import run_script

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.lowest
def test_first_example_runs(tmp_path: Path) -> None:
    """The README's example, which the quickstart repeats, trains on two ranks."""
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert code in (ROOT / "docs/start/quickstart.md").read_text()
    completed = run_script(code, cwd=tmp_path)
    assert completed.returncode == 0, completed.output
    assert "process group: gloo, 2 ranks, env://" in completed.output
    assert "`Trainer.fit` stopped: `max_epochs=1` reached." in completed.output


def test_errors_in_readme_exist() -> None:
    """Every error that the README shows is one of the package's."""
    shown = set(re.findall(r"^(\w+Error): ", README, re.MULTILINE))
    assert shown
    assert all(issubclass(getattr(errors, name), lightning_ddp_ext.DDPExtError) for name in shown)


def test_links_lead_to_files_of_the_repository() -> None:
    """The site's links are checked by its build, those of the README here."""
    linked = re.findall(r"\]\(([^)#]+)", README)
    assert linked
    assert [name for name in linked if not (ROOT / name).is_file()] == []
