"""Name the folder of a fit, and list the stop checkpoints in it.

Each fit of a command has a folder in the ``dirpath`` of the Trainer's
``ModelCheckpoint``, or else in ``<default_root_dir>/checkpoints``::

    <directory>/<command>-<number of the fit>[-<number of the SLURM job>]

Ownership is this path: a fit whose folder has the same name continues the earlier one,
and folders of other commands and fits are left alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.location import absolute, names_in

from ..private.compat import chosen_directory_of
from ..private.lightning_tree import pl
from ..start.slurm import job_id

# Environment variables that number the tasks of a job array.
_TASKS = (
    "SLURM_ARRAY_TASK_ID",
    "PBS_ARRAY_INDEX",
    "LSB_JOBINDEX",
    "SGE_TASK_ID",
    "JOB_COMPLETION_INDEX",
)
# A folder's name, such as "train-3fa8b2c1-1", or "train-3fa8b2c1-1-12_3" in SLURM job 12_3.
# An interactive session has no script, so its name begins with the hyphen.
_NAME = re.compile(r"(?P<fit>.*-[0-9a-f]{8}-\d+)(-[\d_]+)?")


def folder_of(trainer: Any, number: int) -> str:
    """Return the path of a fit's folder, which may not exist yet.

    Args:
        trainer: the Trainer.
        number: the number of the fit in its script, from 1.
    """
    name = "-".join(filter(None, [_command(), str(number), job_id()]))
    return os.path.join(absolute(_directory_of(trainer)), name)


def stop_checkpoints_in(folder: str, *, or_of_other_jobs: bool) -> set[str]:
    """Return the paths of the stop checkpoints in the folder of a fit, which may be missing.

    Args:
        folder: its path.
        or_of_other_jobs: whether those of the same fit in other SLURM jobs are returned if
            there are none in this folder.

    Raises:
        CheckpointError: a folder cannot be searched.
    """
    directory, own = os.path.split(folder)
    of_jobs = {
        name: _visible_files_in(os.path.join(directory, name))
        for name in names_in(directory)
        if _fit_of(name) == _fit_of(own)
    }
    of_this_job = of_jobs.get(own, set())
    if of_this_job or not or_of_other_jobs:
        return of_this_job
    return set().union(*of_jobs.values())


def _visible_files_in(folder: str) -> set[str]:
    """Return the paths of the files in a folder, without locks and unfinished files."""
    return {os.path.join(folder, name) for name in names_in(folder) if not name.startswith(".")}


def folders_beside(folder: str) -> list[str]:
    """Return the names of all other folders of fits in the same directory.

    Raises:
        CheckpointError: the directory cannot be searched.
    """
    directory, own = os.path.split(folder)
    return sorted(name for name in names_in(directory) - {own} if _fit_of(name) is not None)


def _fit_of(folder: str) -> str | None:
    """Return the name of a fit's folder without the job's number; ``None`` for other folders.

    >>> _fit_of("train-3fa8b2c1-1-12_3"), _fit_of("-3fa8b2c1-1"), _fit_of("best")
    ('train-3fa8b2c1-1', '-3fa8b2c1-1', None)
    """
    name = _NAME.fullmatch(folder)
    return None if name is None else name["fit"]


def _command() -> str:
    """Return a readable name and a hash of the running command.

    They are the same from each working directory, and with and without the command's
    option to resume.
    """
    script, *options = sys.argv or [""]
    main = getattr(sys.modules["__main__"], "__file__", None) or ""
    if os.path.basename(main) == os.path.basename(script):
        script = main  # absolute, even if the program has changed its directory
    words = [os.path.realpath(script), *_identifying(map(str, options), os.environ)]
    text = repr(words).encode(errors="surrogateescape")
    return f"{Path(script).stem}-{hashlib.sha256(text).hexdigest()[:8]}"


def _identifying(options: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """Return the options and task numbers that distinguish a command from others.

    Each task of a job array has its own number, and trains something else.

    >>> array = {"SLURM_ARRAY_TASK_ID": "3"}
    >>> _identifying(["--lr=0.1", "--ckpt_path", "last"], array)
    ['--lr=0.1', '3', '', '', '', '']
    """
    # Each library writes an option to resume in its own way: `--ckpt_path last`,
    # `--fit.ckpt_path=last`, `trainer.ckpt_path=last`. The command is the same without it.
    others = [word for word in options if word != "last" and "ckpt_path" not in word]
    return others + [environ.get(variable, "") for variable in _TASKS]


def _directory_of(trainer: Any) -> str:
    """Return the directory of the Trainer's first checkpoint callback, if users chose it.

    Loggers choose a new one for each run, so without a user's choice, the directory is
    that of a Trainer without loggers.
    """
    callback = trainer.checkpoint_callback
    directory = getattr(callback, "dirpath", None)  # callbacks of users may have none
    # A ModelCheckpoint without a user's directory records its own choice in the same attribute.
    # A new one would choose the same directory in this Trainer.
    if (
        directory
        and isinstance(callback, pl.callbacks.ModelCheckpoint)
        and directory == chosen_directory_of(pl.callbacks.ModelCheckpoint(), trainer)
    ):
        directory = None
    return str(directory or os.path.join(trainer.default_root_dir, "checkpoints"))
