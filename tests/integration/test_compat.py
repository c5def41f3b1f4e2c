"""What is private to Lightning is read and replaced in one place, which says what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_ddp_ext.integration import compat
from lightning_ddp_ext.integration.replaced_methods import ReplacedMethods


class Owner:
    """An object with a method."""

    def tell(self) -> int:
        return 1


def test_a_method_that_is_missing_is_named() -> None:
    """The error names the class, the method, the version of Lightning and the remedy, and nothing is replaced."""
    owner = Owner()
    with pytest.raises(ImportError, match=r"needs .*test_compat\.Owner\.forget, which \S+ \d\S* does not .*; install"):
        ReplacedMethods().replace(owner, "forget", lambda: None)
    assert not hasattr(owner, "forget")


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (compat.combined_loader_of, "_combined_loader"),
        (compat.mode_of, "_mode"),
        (compat.fetcher_of, "_data_fetcher"),
        (compat.active_loop_of, "_active_loop"),
        (compat.results_of, "_results"),
    ],
)
def test_a_private_attribute_that_is_missing_is_named(read: Any, name: str) -> None:
    """With a Lightning that has it no more, the error says what was needed."""
    with pytest.raises(ImportError, match=rf"needs .*test_compat\.Owner\.{name}, which"):
        read(Owner())


def test_a_lightning_without_timed_validation_has_no_interval() -> None:
    """Older versions validate by no clock, and nobody looks for one."""
    compat.TimedValidation().before_batch(Owner())
