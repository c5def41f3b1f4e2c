"""Name the file that a fit saves when it ends early, and find the one that it continues.

Ownership is a path. Each fit of a command has a folder beside the Trainer's checkpoints::

    <directory>/<command>-<number of the fit>[-<number of the SLURM job>]/<stop_checkpoint>

``ckpt_path="last"`` means the newest file of this folder and of the places where the
Trainer's own callbacks save. A SLURM job without a file in its folder continues with
that of an earlier job of the same command. Other folders are left alone.

Lightning looks for ``"last"`` before the ranks are connected. It gets a placeholder, and
rank 0 searches for all ranks once they are connected.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.location import PathOrUrl
from lightning_ddp_ext.checkpoint.save import remove
from lightning_ddp_ext.checkpoint.save_lock import lock_of
from lightning_ddp_ext.data.proxy import copy_attributes
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.runs import current_run

from ..private.compat import chosen_directory_of
from ..private.lightning_tree import TrainerStatus, pl, rank_zero_info
from ..start.slurm import is_requeued, job_id
from .stored_files import absolute, modification_times, names_in

_PLACEHOLDER = "last.ckpt"  # never read
# Environment variables that number the tasks of a job array.
_TASKS = (
    "SLURM_ARRAY_TASK_ID",
    "PBS_ARRAY_INDEX",
    "LSB_JOBINDEX",
    "SGE_TASK_ID",
    "JOB_COMPLETION_INDEX",
)
_FOLDER = re.compile(r"(?P<fit>.+-[0-9a-f]{8}-\d+)(-[\d_]+)?")
_IN_A_HOOK = 0  # the number of each fit in a hook of another run
# The number of fits that this process has begun, without those that a signal stopped.
_fits_begun = 0


@dataclass(frozen=True)
class Found:
    """What rank 0 found at the start of a run, the same on every rank.

    Attributes:
        folder: the folder of the fit; ``None`` for one in a hook, which no run resumes.
        stop: the path of the stop checkpoint; ``None`` if none is saved.
        token: distinguishes the run from others that save to this path.
        last: the file with which the run continues, if it was searched and exists.
        obsolete: the modification times of the fit's stop checkpoints, by path.
    """

    folder: str | None = None
    stop: str | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    last: str | None = None
    obsolete: dict[str, float] = field(default_factory=dict)


class RunFiles:
    """The stop checkpoint of a strategy's Trainer.

    In a run, the methods are called in this order:

    1. :meth:`begin`, before the ranks connect
    2. :meth:`find`, on rank 0, for all ranks
    3. :meth:`chosen`, on each rank, when the Trainer restores a file
    4. :meth:`remove_obsolete`, on each rank, at the end

    Args:
        stop: the name or path of the stop checkpoint; ``None`` if none is saved. A name
            is placed in the folder of the fit, and a path is used as it is.

    Attributes:
        found: the result of :meth:`find`.
    """

    def __init__(self, stop: PathOrUrl | None) -> None:
        name = os.path.basename(stop) if isinstance(stop, PathOrUrl) else stop
        if name in ("", ".", "..") or not (name is None or isinstance(name, str)):
            raise ConfigurationError(
                "stop_checkpoint must be the name or path of a file, or None (got"
                f' {stop!r}); for example, write stop_checkpoint="last.ckpt"'
            )
        self._stop = None if stop is None else os.fspath(stop)
        self._is_path = bool(stop and os.path.dirname(stop))
        self._fit_number = _IN_A_HOOK
        self._asked: PathOrUrl | None = None  # the file that the user wants to resume from
        self.found = Found()

    @contextmanager
    def begin(self, trainer: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Number a fit in its script, and note whether it resumes.

        A fit that a signal stops does not count, as it may be called again.

        Args:
            trainer: the Trainer; ``None`` if a user starts ranks without one.
            args: the arguments of the Trainer's function.

        Yields:
            the arguments, with a placeholder instead of ``"last"``.
        """
        global _fits_begun
        if trainer is None:
            yield args
            return
        self.found = Found()
        self._asked = next((each for each in args if isinstance(each, PathOrUrl)), None)
        is_fit = trainer.state.fn == "fit"
        is_counted = is_fit and current_run() is None
        _fits_begun += is_counted
        if is_fit:
            self._fit_number = _fits_begun if is_counted else _IN_A_HOOK
        try:
            yield tuple(_PLACEHOLDER if _is_last(argument) else argument for argument in args)
        except SystemExit:
            _fits_begun -= is_counted
            raise

    # Resuming.

    def find(self, trainer: Any) -> Found:
        """Name the stop checkpoint, and find the file with which the run continues.

        Only rank 0 calls this, for all ranks. A requeued SLURM job continues with its own
        file, unless another one is asked for.

        Raises:
            CheckpointError: a directory or store cannot be searched.
        """
        folder = self._folder(trainer)
        stop = self._stop_path(folder)
        if _is_last(self._asked):
            own = self._own_files(folder, stop)
            last = _newest(own, trainer)
            rank_zero_info(f"ckpt_path='last' is {last}" if last else _none_found(folder, stop))
        elif trainer.state.fn == "fit" and self._asked is None and is_requeued():
            own = self._own_files(folder, stop)
            own = {path for path in own if path == stop or os.path.dirname(path) == folder}
            last = next(iter(modification_times(own)), None)
        else:
            return Found(folder, stop)
        return Found(folder, stop, last=last, obsolete=modification_times(own))

    def _folder(self, trainer: Any) -> str | None:
        """Return the folder of the fit."""
        if self._fit_number == _IN_A_HOOK:
            return None
        name = "-".join(filter(None, [_command(), str(self._fit_number), job_id()]))
        return os.path.join(absolute(_directory_of(trainer)), name)

    def _stop_path(self, folder: str | None) -> str | None:
        if self._stop is None:
            return None
        if self._is_path:
            return absolute(self._stop)
        return None if folder is None else os.path.join(folder, self._stop)

    def _own_files(self, folder: str | None, stop: str | None) -> set[str]:
        """Return the stop checkpoints of the fit, of which some may be missing.

        Without any in its folder, these are those of other SLURM jobs.
        """
        if self._is_path and stop is not None:
            return {stop}
        if folder is None or stop is None:
            return set()
        directory, own = os.path.split(folder)
        names = names_in(directory)
        folders = [os.path.join(directory, name) for name in names if _fit_of(name) == _fit_of(own)]
        files = {
            os.path.join(each, name)
            for each in folders
            for name in names_in(each)
            if not name.startswith(".")  # locks and unfinished files
        }
        return {path for path in files if os.path.dirname(path) == folder} or files

    def chosen(self, path: PathOrUrl | None) -> PathOrUrl | None:
        """Return the file to restore, given the one that Lightning chose."""
        is_ours = _is_last(self._asked) or self.found.last is not None
        return self.found.last if is_ours else path

    # Ending early, and finishing.

    def remove_obsolete(self, trainer: Any) -> None:
        """Remove the stop checkpoints of a fit that continued from ``"last"`` and finished.

        Otherwise the same command would resume from them every time. A file that changed
        meanwhile is kept. A fit that a callback stopped may be continued, and a trial run
        with ``fast_dev_run`` or without batches has not continued it.
        """
        if trainer is None or not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        was_interrupted = trainer.state.status == TrainerStatus.INTERRUPTED
        is_trial = trainer.fast_dev_run or trainer.limit_train_batches == 0
        has_resumed = self.found.last is not None
        if was_interrupted or trainer.should_stop or is_trial or not has_resumed:
            return
        for path, time in self.found.obsolete.items():
            if modification_times([path]) == {path: time}:
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
                Path(lock_of(path)).unlink(missing_ok=True)
                if not self._is_path:
                    remove(os.path.dirname(path))


def _is_last(argument: Any) -> bool:
    return isinstance(argument, str) and argument == "last"


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


def _fit_of(name: str) -> str:
    """Return the name of a folder without the job's number; empty for other names."""
    folder = _FOLDER.fullmatch(name)
    return "" if folder is None else folder["fit"]


def _directory_of(trainer: Any) -> str:
    """Return the directory of the Trainer's first checkpoint callback, if users chose it.

    Loggers choose a new one for each run, so without a user's choice, the directory is
    that of a Trainer without loggers.
    """
    callback = trainer.checkpoint_callback
    chosen = getattr(callback, "dirpath", None)
    if isinstance(callback, pl.callbacks.ModelCheckpoint):
        undirected = copy_attributes(callback)
        undirected.dirpath = None
        if chosen and chosen == chosen_directory_of(undirected, trainer):  # in an earlier run
            chosen = None
    return str(chosen or os.path.join(trainer.default_root_dir, "checkpoints"))


def _newest(own: set[str], trainer: Any) -> str | None:
    """Return the newest of a fit's own files and those of the Trainer's callbacks.

    Stores round times to seconds. Of files with the same time, a stop checkpoint is the
    newest, because a run saves it at its end.
    """
    times = modification_times(own | _files_of_callbacks(trainer))
    return max(times, key=lambda path: (times[path], path in own), default=None)


def _files_of_callbacks(trainer: Any) -> set[str]:
    """Return the files that Lightning takes for ``"last"``.

    Lightning itself loses the protocol of a URL.
    """
    files = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, pl.callbacks.OnExceptionCheckpoint):
            files.add(absolute(callback.ckpt_path))
        elif isinstance(callback, pl.callbacks.ModelCheckpoint):
            directory = absolute(chosen_directory_of(callback, trainer))
            suffix = re.escape(callback.FILE_EXTENSION)
            last = re.compile(rf"{callback.CHECKPOINT_NAME_LAST}.*{suffix}")
            names = filter(last.fullmatch, names_in(directory))
            files |= {os.path.join(directory, name) for name in names}
    return files


def _none_found(folder: str | None, stop: str | None) -> str:
    """Describe what the next run of this command will find, and what is left alone."""
    lines = ["ckpt_path='last': no checkpoint yet"]
    if stop is not None:
        lines.append(f"if the run ends early, it saves {stop}, which the same command then finds")
    if folder is not None:
        directory, own = os.path.split(folder)
        others = sorted(filter(_fit_of, names_in(directory) - {own}))
        if others:
            lines.append(
                f"in {directory}, {listed(others)} belong to other commands or fits; pass the path"
                " of a file in them to resume from it"
            )
    return "; ".join(lines)
