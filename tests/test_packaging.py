"""The version, the public names and the files of the package agree with its promises."""

import re
from importlib import resources
from pathlib import Path

import pytest

import lightning_ddp_ext

pytestmark = pytest.mark.lowest  # an import of the package already uses much of Lightning

ROOT = Path(__file__).parent.parent


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


def test_public_names_exist_once() -> None:
    """`__all__`, which three modules contribute to, has no name twice and none in vain."""
    assert len(set(lightning_ddp_ext.__all__)) == len(lightning_ddp_ext.__all__)
    assert all(hasattr(lightning_ddp_ext, name) for name in lightning_ddp_ext.__all__)


def test_types_are_shipped() -> None:
    """A user's type checker reads the annotations, because the package has `py.typed`;
    ``make test-wheel`` runs this test on the wheel.
    """
    assert resources.files("lightning_ddp_ext").joinpath("py.typed").is_file()
