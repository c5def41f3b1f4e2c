"""The version, the public names and the files of the package agree with its promises."""

import re
from importlib import resources
from pathlib import Path

import pytest

import lightning_ddp_ext

pytestmark = pytest.mark.lowest  # an import of the package already uses much of Lightning

ROOT = Path(__file__).parent.parent


def test_version_follows_the_newest_release_of_the_changelog() -> None:
    """A development version is one of the next minor release; ``CITATION.cff`` names the
    newest release as well.
    """
    newest = re.search(
        r"^## \[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d{2}-\d{2}$",
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert newest is not None, "no line such as '## [0.1.0] - 2026-11-23' in CHANGELOG.md"
    major, minor, patch = map(int, newest.groups())
    release = f"{major}.{minor}.{patch}"
    allowed = rf"{re.escape(release)}(\+dirty)?|{major}\.{minor + 1}\.0\.dev.*"
    assert re.fullmatch(allowed, lightning_ddp_ext.__version__)
    assert f"\nversion: {release}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_public_names_exist_once() -> None:
    """`__all__`, which three modules contribute to, has no name twice and none in vain."""
    assert len(set(lightning_ddp_ext.__all__)) == len(lightning_ddp_ext.__all__)
    assert all(hasattr(lightning_ddp_ext, name) for name in lightning_ddp_ext.__all__)


def test_types_are_shipped() -> None:
    """A user's type checker reads the annotations, because the package has `py.typed`;
    ``make test-wheel`` runs this test on the wheel.
    """
    assert resources.files("lightning_ddp_ext").joinpath("py.typed").is_file()
