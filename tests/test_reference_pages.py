"""The reference pages list all errors, arguments, variables and public names."""

from __future__ import annotations

import inspect
import pickle
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_ext
from lightning_ddp_ext import DDPExtError

ROOT = Path(__file__).parents[1]
# Set by the package for the processes that it starts.
INTERNAL = {
    "DDPX_RANK_PID",
    "DDPX_LAUNCHER_PID",
    "DDPX_PRIVATE_FILE",
}


def reference(page: str) -> str:
    return (ROOT / "docs" / "reference" / page).read_text()


def subclasses(cls: type[Exception]) -> Iterator[str]:
    for child in cls.__subclasses__():
        yield child.__name__
        yield from subclasses(child)


def test_every_error_has_a_cause_and_a_fix_under_its_heading() -> None:
    """The page of errors has each class once."""
    found = re.findall(r"^### (\w+)\n\n(.*?)(?=\n\n#|\Z)", reference("errors.md"), re.M | re.S)
    assert sorted(name for name, _ in found) == sorted(set(subclasses(DDPExtError)))
    assert [
        name for name, text in found if "**Cause:**" not in text or "**Fix:**" not in text
    ] == []


def test_a_traceback_ends_with_the_address_of_its_error() -> None:
    """The address leads to a heading that exists, also after pickling."""
    error = lightning_ddp_ext.MissingRanksError("rank 3 is missing", missing=(3,))
    address, _, anchor = error.__notes__[0].split()[1].partition("#")
    # As code hosts and the site write the address of a heading.
    assert anchor == "missingrankserror"
    assert "\n### MissingRanksError\n" in (ROOT / address).read_text()
    assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__
    assert traceback.format_exception(error)[-1] == error.__notes__[0] + "\n"


def test_every_argument_of_the_strategy_is_described_with_its_default() -> None:
    """DDP's own are those of the installed torch, and not all of them are described."""
    page = reference("strategy.md")
    strategy_section, _, ddp_section = page.partition("## DDP arguments")
    parameters = inspect.signature(lightning_ddp_ext.DDPExtStrategy).parameters
    of_strategy = documented_defaults(strategy_section)
    assert sorted(of_strategy) == sorted(parameters.keys() - {"ddp_kwargs"})
    all_parameters = {**inspect.signature(DistributedDataParallel).parameters, **parameters}
    for name, default in (of_strategy | documented_defaults(ddp_section)).items():
        if not default.endswith(" s"):  # the others are durations
            written = default.strip("`").replace('"', "'")
            assert written == repr(all_parameters[name].default), name


def documented_defaults(text: str) -> dict[str, str]:
    """Return the defaults of the arguments in a page's tables, by name."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", text, re.MULTILINE)
    return {name: default for names, default in rows for name in re.findall(r"\w+", names)}


def test_every_variable_of_ours_is_described() -> None:
    """`DDPX_*` as the package's source has them, without internal ones."""
    sources = "".join(path.read_text() for path in (ROOT / "lightning_ddp_ext").rglob("*.py"))
    page = reference("environment.md")
    documented = set(re.findall(r"^\| `(DDPX_\w+)`", page, re.MULTILINE))
    assert documented == set(re.findall(r"DDPX_[A-Z_]+", sources)) - INTERNAL


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    """Errors are on a page for themselves, but for their base class."""
    shown = re.findall(r"^\| \[`(\w+)`\]", reference("api.md"), re.MULTILINE)
    names = {name for name in lightning_ddp_ext.__all__ if not name.endswith("Error")}
    assert sorted(shown) == sorted(names | {"DDPExtError"})
