"""What have killed saves left in this directory?"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from lightning_ddp_ext.checkpoint.atomic_file import Leftover, find_leftovers, remove_leftovers
from lightning_ddp_ext.cli.output import Report, add_row, count_text, size_text, table


def clean(directory: str, *, remove: bool) -> Report:
    """List temporary files that no process of this host is writing.

    Args:
        directory: of checkpoints, on this machine.
        remove: whether to remove those that are older than an hour, too.
    """
    try:
        removed = remove_leftovers(Path(directory)) if remove else []
        leftovers = [*removed, *find_leftovers(Path(directory))]
    except OSError as error:
        return Report({"directory": directory}, _sentence(directory, error))
    rows = [
        {"path": str(each.path), "size": each.size, "age": each.age, "removed": each in removed} for each in leftovers
    ]
    facts = {"directory": directory, "leftovers": rows, "removed": remove}
    if not leftovers:
        return Report(facts, parts=[f"nothing to clean in {directory}: no save was killed there"])
    listed = table("left by a killed save", "size", "age", numbers=["size", "age"])
    for leftover in leftovers:
        add_row(listed, str(leftover.path), size_text(leftover.size), str(timedelta(seconds=round(leftover.age))))
    return Report(facts, parts=[listed, _summary(leftovers, removed)])


def _sentence(directory: str, error: OSError) -> str:
    if "://" in directory:
        return f"{directory} is a URL, and only local directories have such files; give one"
    where = error.filename or directory
    if isinstance(error, NotADirectoryError):
        return f"{where} is not a directory; give the directory in which checkpoints are saved"
    if isinstance(error, FileNotFoundError):
        return f"directory {where} does not exist (working directory {Path.cwd()}); give one that does"
    return f"cannot clean {where}: {error.strerror or error}; run this as the user who saves checkpoints there"


def _summary(leftovers: Sequence[Leftover], removed: Sequence[Leftover]) -> str:
    old = [leftover for leftover in leftovers if leftover.is_left_behind]
    found = f"{count_text(len(old), 'file')}, {size_text(sum(leftover.size for leftover in old))}"
    young = count_text(len(leftovers) - len(old), "file")
    sentences = []
    if old:
        sentences.append(f"removed {found}" if removed else f"{found}; to remove, run this again with --yes")
    if len(old) < len(leftovers):
        sentences.append(f"left alone: {young} younger than an hour, which another host may be writing")
    return "; ".join(sentences)
