"""The version and the files of the package agree with its promises."""

import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import lightning_ddp_ext
from tests.harness.scripts import run_script

ROOT = Path(__file__).parent.parent


@pytest.mark.lowest
def test_version_follows_the_newest_section_of_the_changelog() -> None:
    """Before its release, the version is a development version of it, and then also one of
    the next minor release; ``CITATION.cff`` names it as well.
    """
    newest = re.search(
        r"^## \[(\d+)\.(\d+)\.(\d+)\] - (unreleased|\d{4}-\d{2}-\d{2})$",
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert newest is not None, "no line such as '## [0.1.0] - unreleased' in CHANGELOG.md"
    *numbers, date = newest.groups()
    major, minor, _ = map(int, numbers)
    version = ".".join(numbers)
    released = rf"{re.escape(version)}(\+dirty)?|{major}\.{minor + 1}\.0\.dev.*"
    allowed = rf"{re.escape(version)}\.dev.*" if date == "unreleased" else released
    assert re.fullmatch(allowed, lightning_ddp_ext.__version__)
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


@pytest.mark.lowest  # an import of the package already uses much of Lightning
def test_types_are_shipped() -> None:
    """A user's type checker reads the annotations, because the package has `py.typed`;
    ``make test-wheel`` runs this test on the wheel.
    """
    assert resources.files("lightning_ddp_ext").joinpath("py.typed").is_file()


@pytest.mark.nightly
def test_the_demo_runs_from_the_wheel(tmp_path: Path) -> None:
    """`make demo`'s script trains and resumes with what `pip install` makes of the wheel."""
    installed = tmp_path / "installed"
    build = [*("-m", "build", "--wheel", "--outdir"), str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, *build], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    install = [*("-m", "pip", "install", "--no-deps", "--target"), str(installed), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    # Found before the clone's, so that a file that the wheel lacks is missing.
    assert (installed / "lightning_ddp_ext/__init__.py").is_file()
    env = {"PYTHONPATH": str(installed)}
    assert "resumed from" in run_script(ROOT / "examples/digits.py", cwd=tmp_path, env=env)
