"""The reference pages list all errors, arguments, variables and public names."""

import inspect
import pickle
import re
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

import lightning_ddp_ext

ROOT = Path(__file__).parents[1]
# Set by the package for the processes that it starts.
INTERNAL = ("DDPX_LAUNCHER_PID", "DDPX_PRIVATE_FILE")


def reference(page: str) -> str:
    return (ROOT / "docs" / "reference" / page).read_text()


def rows(text: str) -> Iterator[tuple[list[str], str]]:
    """Yield the names in the first cell of each row of a table, and the second cell."""
    for first, second in re.findall(r"^\| (.*?) \| (.*?) ?\|", text, re.MULTILINE):
        yield re.findall(r"`(\w+)`", first), second


def test_every_error_has_a_cause_and_a_fix_under_its_heading() -> None:
    """The page of errors has each class of error exactly once, with both parts."""
    section = r"^### (\w+)\n\n(.*?)(?=\n\n#|\Z)"
    sections = re.findall(section, reference("errors.md"), re.MULTILINE | re.DOTALL)
    public = [name for name in lightning_ddp_ext.__all__ if name.endswith("Error")]
    assert sorted(["DDPExtError", *(name for name, _ in sections)]) == sorted(public)
    for part in ("**Cause:**", "**Fix:**"):
        assert [name for name, text in sections if part not in text] == []


def test_a_traceback_ends_with_the_address_of_its_error() -> None:
    """The address leads to an existing heading, also after an error is pickled."""
    error = lightning_ddp_ext.RendezvousError("rank 3 is missing", missing=(3,))
    address, _, anchor = error.__notes__[0].split()[1].partition("#")
    # Code hosts and the site derive this anchor from the heading below.
    assert anchor == "rendezvouserror"
    assert "\n### RendezvousError\n" in (ROOT / address).read_text()
    assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__
    assert traceback.format_exception(error)[-1] == error.__notes__[0] + "\n"


OF_STRATEGY = inspect.signature(lightning_ddp_ext.DDPExtStrategy).parameters


def as_written(default: object) -> str:
    """Return a default as the page has it: a duration in seconds, or code."""
    if isinstance(default, timedelta):
        return f"{default.total_seconds():g} s"
    return repr(default).replace("'", '"')


def test_every_argument_of_the_strategy_is_described_with_its_default() -> None:
    """The defaults are those of the strategy and, for DDP's arguments, of the installed
    torch.
    """
    of_strategy, of_ddp = (
        {name: default.strip("`") for names, default in rows(section) for name in names}
        for section in reference("strategy.md").split("## DDP arguments")
    )
    assert of_strategy.keys() == OF_STRATEGY.keys() - {"ddp_kwargs"}
    parameters = {**inspect.signature(DistributedDataParallel).parameters, **OF_STRATEGY}
    described = {**of_strategy, **of_ddp}
    assert described == {name: as_written(parameters[name].default) for name in described}


def test_every_variable_of_ours_is_described() -> None:
    """The page has each `DDPX_` variable in the package's source, except internal ones."""
    sources = "".join(path.read_text() for path in (ROOT / "lightning_ddp_ext").rglob("*.py"))
    used = set(re.findall(r"DDPX_[A-Z_]+", sources))
    described = [name for names, _ in rows(reference("environment.md")) for name in names]
    documented = [name for name in described if name.startswith("DDPX_")]
    assert sorted([*documented, *INTERNAL]) == sorted(used)


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    """The page lists each public name once; of the errors, only the base class."""
    listed = [name for names, _ in rows(reference("api.md")) for name in names]
    public = {name for name in lightning_ddp_ext.__all__ if not name.endswith("Error")}
    assert sorted(listed) == sorted(public | {"DDPExtError"})
