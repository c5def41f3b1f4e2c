"""Find the file with which a run continues, and name the one that it saves if it ends early.

``ckpt_path="last"`` means the newest of the stop checkpoints in the fit's folder (see
``fit_folder``) and of the files that the Trainer's own callbacks save. A SLURM job
without a file in its folder continues with that of an earlier job of the same command.

Lightning looks for ``"last"`` before the ranks are connected. It gets a placeholder, and
rank 0 searches for all ranks once they are connected.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.checkpoint.location import PathOrUrl
from lightning_ddp_ext.checkpoint.save import remove
from lightning_ddp_ext.checkpoint.save_lock import lock_of
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.runs import current_run

from ..private.compat import chosen_directory_of
from ..private.lightning_tree import TrainerStatus, pl, rank_zero_info
from ..start.slurm import is_requeued
from .fit_folder import Jobs, folder_of, folders_beside, stop_checkpoints_in
from .stored_files import absolute, modification_times, names_in

_PLACEHOLDER = "last.ckpt"  # never read
# The number of fits that this process has begun, without those that a signal stopped. It
# belongs to the process, since a script may train with several Trainers, one after another.
_fits_begun = 0


@dataclass(frozen=True)
class Found:
    """What rank 0 found at the start of a run, the same on every rank.

    Attributes:
        stop: the path of the stop checkpoint; ``None`` if none is saved.
        token: distinguishes the run from others that save to this path.
        last: the file with which the run continues; ``None`` if none was found, or if the
            user's argument or Lightning names the file, so that none was looked for.
        obsolete: the stop checkpoints among which ``last`` was chosen, with their
            modification times.
    """

    stop: str | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    last: str | None = None
    obsolete: dict[str, float] = field(default_factory=dict)


class RunFiles:
    """The stop checkpoint of a strategy's Trainer, and the file with which a run continues.

    In a run, the methods are called in this order:

    1. :meth:`begin`, before the ranks connect
    2. :meth:`find`, on rank 0, for all ranks
    3. :meth:`file_to_restore`, on each rank, before the Trainer restores a file
    4. :meth:`remove_obsolete`, on each rank, at the end

    Args:
        stop: the name or path of the stop checkpoint; ``None`` if none is saved. A name
            is placed in the folder of the fit, and a path is used as it is.

    Attributes:
        found: the result of :meth:`find` in the current run, or in the last one.
    """

    def __init__(self, stop: PathOrUrl | None) -> None:
        name = os.path.basename(stop) if isinstance(stop, PathOrUrl) else stop
        if name in ("", ".", "..") or not (name is None or isinstance(name, str)):
            raise ConfigurationError(
                "stop_checkpoint must be the name or path of a file, or None (got"
                f' {stop!r}); for example, write stop_checkpoint="last.ckpt"'
            )
        self._stop = None if stop is None else os.fspath(stop)
        self.found = Found()
        # The argument `ckpt_path` of the Trainer's function, in the current run or the last one.
        self._ckpt_path: PathOrUrl | None = None
        # The number of the last fit, which evaluations after it share. ``None`` before the
        # first fit, and for a fit in a hook of another run, which has no folder.
        self._fit_number: int | None = None

    @contextmanager
    def begin(self, trainer: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Run the block as a run: number its fit, and note the file that the user names.

        Args:
            trainer: the Trainer; ``None`` if a user starts ranks without one.
            args: the arguments of the Trainer's function.

        Yields:
            the arguments, with a placeholder instead of ``"last"``.
        """
        if trainer is None:
            yield args
            return
        self.found = Found()
        # Of the arguments of all these functions, only `ckpt_path` is a string or a path.
        self._ckpt_path = next((each for each in args if isinstance(each, PathOrUrl)), None)
        with self._numbering(trainer) as self._fit_number:
            yield tuple(_PLACEHOLDER if _is_last(each) else each for each in args)

    def _numbering(self, trainer: Any) -> AbstractContextManager[int | None]:
        """Return a context manager that yields the number of the run's fit."""
        if trainer.state.fn != "fit":
            return nullcontext(self._fit_number)
        return nullcontext() if current_run() is not None else _next_fit()

    # Resuming.

    def find(self, trainer: Any) -> Found:
        """Name the stop checkpoint, and find the file with which the run continues.

        Only rank 0 calls this, for all ranks. A requeued SLURM job continues with its own
        file, unless the user passes another one.

        Raises:
            CheckpointError: a directory or store cannot be searched.
        """
        # No run resumes a fit in a hook, so it has no folder.
        folder = None if self._fit_number is None else folder_of(trainer, self._fit_number)
        stop = self._stop_path(folder)
        if _is_last(self._ckpt_path):
            files = self._stop_checkpoints(folder, stop, "all jobs")
            last = _newest(files, trainer)
            rank_zero_info(f"ckpt_path='last' is {last}" if last else _none_found(folder, stop))
        elif trainer.state.fn == "fit" and self._ckpt_path is None and is_requeued():
            files = self._stop_checkpoints(folder, stop, "this job")
            times = modification_times(files)
            last = max(times, key=times.__getitem__, default=None)
        else:
            return Found(stop)
        return Found(stop, last=last, obsolete=modification_times(files))

    @property
    def _is_path(self) -> bool:
        """Whether the user chose a path for the stop checkpoint, and not a name."""
        return bool(self._stop and os.path.dirname(self._stop))

    def _stop_path(self, folder: str | None) -> str | None:
        """Return the path of the stop checkpoint, if one is saved."""
        if self._stop is None:
            return None
        if self._is_path:
            return absolute(self._stop)
        return None if folder is None else os.path.join(folder, self._stop)

    def _stop_checkpoints(self, folder: str | None, stop: str | None, jobs: Jobs) -> set[str]:
        """Return the stop checkpoints of the fit; the one at a path may be missing."""
        if stop is None:
            return set()
        if self._is_path or folder is None:
            return {stop}
        return stop_checkpoints_in(folder, jobs)

    def file_to_restore(self, path: PathOrUrl | None) -> PathOrUrl | None:
        """Return the file with which the run continues, if there is one.

        Args:
            path: the path that Lightning chose. For ``"last"`` this is only a placeholder,
                so even if rank 0 found no file, it is not used.
        """
        is_placeholder = _is_last(self._ckpt_path)
        return self.found.last if is_placeholder or self.found.last is not None else path

    # Finishing.

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
                lock_of(path).unlink(missing_ok=True)
                if not self._is_path:
                    remove(os.path.dirname(path))


@contextmanager
def _next_fit() -> Iterator[int]:
    """Yield the number of the fit in the block.

    A fit that a signal stops does not count, because the process may call it again.
    """
    global _fits_begun
    _fits_begun += 1
    try:
        yield _fits_begun
    except SystemExit:  # also StoppedException
        _fits_begun -= 1
        raise


def _is_last(argument: Any) -> bool:
    return isinstance(argument, str) and argument == "last"


def _newest(stop_checkpoints: set[str], trainer: Any) -> str | None:
    """Return the newest of the stop checkpoints and the files of the Trainer's callbacks.

    Stores round times to seconds. Of files with the same time, a stop checkpoint is the
    newest, because a run saves it at its end.
    """
    times = modification_times(stop_checkpoints | _files_of_callbacks(trainer))
    return max(times, key=lambda path: (times[path], path in stop_checkpoints), default=None)


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
    others = [] if folder is None else folders_beside(folder)
    if folder is not None and others:
        lines.append(
            f"in {os.path.dirname(folder)}, {listed(others)} belong to other commands or fits; pass"
            " the path of a file in them to resume from it"
        )
    return "; ".join(lines)
