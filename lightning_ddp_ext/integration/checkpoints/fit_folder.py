"""Name the folder of a fit, and list the stop checkpoints in it.

Each fit of a command has a folder beside the Trainer's checkpoints::

    <directory>/<command>-<number of the fit>[-<number of the SLURM job>]

Ownership is this path: a fit whose folder has the same name continues the earlier one,
and folders of other commands and fits are left alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from lightning_ddp_ext.data.proxy import copy_attributes

from ..private.compat import chosen_directory_of
from ..private.lightning_tree import pl
from ..start.slurm import job_id
from .stored_files import absolute, names_in

# Environment variables that number the tasks of a job array.
_TASKS = (
    "SLURM_ARRAY_TASK_ID",
    "PBS_ARRAY_INDEX",
    "LSB_JOBINDEX",
    "SGE_TASK_ID",
    "JOB_COMPLETION_INDEX",
)
# A folder's name, such as "train-3fa8b2c1-1", or "train-3fa8b2c1-1-12_3" in SLURM job 12_3.
_NAME = re.compile(r"(?P<fit>.+-[0-9a-f]{8}-\d+)(-[\d_]+)?")


def folder_of(trainer: Any, number: int) -> str:
    """Return the path of a fit's folder, which may not exist yet.

    Args:
        trainer: the Trainer.
        number: the number of the fit in its script, from 1.
    """
    name = "-".join(filter(None, [_command(), str(number), job_id()]))
    return os.path.join(absolute(_directory_of(trainer)), name)


def stop_checkpoints_in(folder: str, *, or_of_other_jobs: bool) -> set[str]:
    """Return the paths of the stop checkpoints in the folder of a fit.

    Args:
        folder: its path.
        or_of_other_jobs: whether to return those of the same fit in other SLURM jobs, if
            there are none in this folder.

    Raises:
        CheckpointError: a folder cannot be searched.
    """
    directory, own = os.path.split(folder)
    names = names_in(directory)
    folders = [os.path.join(directory, name) for name in names if _fit_of(name) == _fit_of(own)]
    files = {
        os.path.join(each, name)
        for each in folders
        for name in names_in(each)
        if not name.startswith(".")  # locks and unfinished files
    }
    in_this_folder = {path for path in files if os.path.dirname(path) == folder}
    return files if or_of_other_jobs and not in_this_folder else in_this_folder


def folders_beside(folder: str) -> list[str]:
    """Return the names of all other folders of fits in the same directory.

    Raises:
        CheckpointError: the directory cannot be searched.
    """
    directory, own = os.path.split(folder)
    return sorted(filter(_fit_of, names_in(directory) - {own}))


def _fit_of(folder: str) -> str:
    """Return the name of a folder without the job's number; empty for other names."""
    name = _NAME.fullmatch(folder)
    return "" if name is None else name["fit"]


def _command() -> str:
    """Return a readable name and a hash of the running command.

    They are the same from each working directory, and with and without the command's
    option to resume.
    """
    script, *options = sys.argv or [""]
    main = getattr(sys.modules["__main__"], "__file__", None) or ""
    if os.path.basename(main) == os.path.basename(script):
        script = main  # absolute, even if the program has changed its directory
    words = [word for word in map(str, options) if word != "last" and "ckpt_path" not in word]
    words += [os.environ.get(variable, "") for variable in _TASKS]
    text = repr([os.path.realpath(script), *words]).encode(errors="surrogateescape")
    return f"{Path(script).stem}-{hashlib.sha256(text).hexdigest()[:8]}"


def _directory_of(trainer: Any) -> str:
    """Return the directory of the Trainer's first checkpoint callback, if users chose it.

    Loggers choose a new one for each run, so without a user's choice, the directory is
    that of a Trainer without loggers.
    """
    callback = trainer.checkpoint_callback
    chosen = getattr(callback, "dirpath", None)  # callbacks of users may have none
    if isinstance(callback, pl.callbacks.ModelCheckpoint):
        undirected = copy_attributes(callback)
        undirected.dirpath = None
        if chosen and chosen == chosen_directory_of(undirected, trainer):
            chosen = None  # the callback itself chose it, in an earlier run
    return str(chosen or os.path.join(trainer.default_root_dir, "checkpoints"))
