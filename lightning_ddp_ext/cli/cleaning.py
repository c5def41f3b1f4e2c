"""What have killed saves left in this directory?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from lightning_ddp_ext.checkpoint.atomic_file import Leftover, find_leftovers, remove_leftovers
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.cli.output import Report, add_row, age_text, count_text, size_text, table
from lightning_ddp_ext.errors import CheckpointError


def clean(directory: str, *, remove: bool) -> Report:
    """List temporary files that no process of this host is writing.

    Args:
        directory: of checkpoints, on this machine.
        remove: whether to remove those that are older than an hour, too.
    """
    try:
        if locate(directory).local is None:
            raise CheckpointError(f"{directory} is a URL, and only local directories have such files; give one")
        removed = remove_leftovers(Path(directory)) if remove else []
        leftovers = [*removed, *find_leftovers(Path(directory))]
    except CheckpointError as error:
        return Report({"directory": directory}, str(error))
    except OSError as error:
        return Report({"directory": directory}, _sentence(directory, error))
    facts = {
        "directory": directory,
        "leftovers": [
            {"path": str(each.path), "size": each.size, "age": each.age, "removed": each in removed}
            for each in leftovers
        ],
        "removed": remove,
    }
    if not leftovers:
        return Report(facts, parts=[f"nothing to clean in {directory}: no save was killed there"])
    return Report(facts, parts=[_table(leftovers), _summary(leftovers, removed)])


def _sentence(directory: str, error: OSError) -> str:
    where = error.filename or directory
    if isinstance(error, NotADirectoryError):
        return f"{where} is not a directory; give the directory in which checkpoints are saved"
    if isinstance(error, FileNotFoundError):
        return f"directory {where} does not exist (working directory {Path.cwd()}); give one that does"
    return f"cannot clean {where}: {error.strerror or error}; run this as the user who saves checkpoints there"


def _table(leftovers: Sequence[Leftover]) -> Table:
    result = table("left by a killed save", "size", "age", numbers=["size", "age"])
    for leftover in leftovers:
        add_row(result, str(leftover.path), size_text(leftover.size), age_text(leftover.age))
    return result


def _summary(leftovers: Sequence[Leftover], removed: Sequence[Leftover]) -> str:
    old = [leftover for leftover in leftovers if leftover.is_left_behind]
    young = len(leftovers) - len(old)
    sentences = []
    if removed:
        sentences.append(f"removed {_described(removed)}")
    elif old:
        sentences.append(f"{_described(old)}; to remove, run this again with --yes")
    if young:
        sentences.append(
            f"left alone: {count_text(young, 'file')} younger than an hour, which another host may be writing"
        )
    return "; ".join(sentences)


def _described(leftovers: Sequence[Leftover]) -> str:
    return f"{count_text(len(leftovers), 'file')}, {size_text(sum(leftover.size for leftover in leftovers))}"
