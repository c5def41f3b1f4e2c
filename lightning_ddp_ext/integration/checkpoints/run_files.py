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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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
from .fit_folder import folder_of, folders_beside, stop_checkpoints_in
from .stored_files import absolute, modification_times, names_in

_PLACEHOLDER = "last.ckpt"  # never read
_IN_A_HOOK = 0  # the number of each fit in a hook of another run
# The number of fits that this process has begun, without those that a signal stopped.
_fits_begun = 0


@dataclass(frozen=True)
class Found:
    """What rank 0 found at the start of a run, the same on every rank.

    Attributes:
        stop: the path of the stop checkpoint; ``None`` if none is saved.
        token: distinguishes the run from others that save to this path.
        last: the file with which the run continues, if it was searched and exists.
        obsolete: the modification times of the fit's stop checkpoints, by path.
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
        # The number of the last fit, which evaluations after it share.
        self._fit_number = _IN_A_HOOK

    @contextmanager
    def begin(self, trainer: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Number a fit in its script, and note whether the run resumes; the run is the block.

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
        arguments = tuple(_PLACEHOLDER if _is_last(each) else each for each in args)
        is_fit = trainer.state.fn == "fit"
        if is_fit and current_run() is None:
            with _next_fit() as self._fit_number:
                yield arguments
            return
        if is_fit:
            self._fit_number = _IN_A_HOOK
        yield arguments

    # Resuming.

    def find(self, trainer: Any) -> Found:
        """Name the stop checkpoint, and find the file with which the run continues.

        Only rank 0 calls this, for all ranks. A requeued SLURM job continues with its own
        file, unless the user passes another one.

        Raises:
            CheckpointError: a directory or store cannot be searched.
        """
        # No run resumes a fit in a hook, so it has no folder.
        folder = None if self._fit_number == _IN_A_HOOK else folder_of(trainer, self._fit_number)
        stop = self._stop_path(folder)
        if _is_last(self._ckpt_path):
            own = self._stop_checkpoints(folder, stop, or_of_other_jobs=True)
            last = _newest(own, trainer)
            rank_zero_info(f"ckpt_path='last' is {last}" if last else _none_found(folder, stop))
        elif trainer.state.fn == "fit" and self._ckpt_path is None and is_requeued():
            own = self._stop_checkpoints(folder, stop, or_of_other_jobs=False)
            last = next(iter(modification_times(own)), None)
        else:
            return Found(stop)
        return Found(stop, last=last, obsolete=modification_times(own))

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

    def _stop_checkpoints(
        self, folder: str | None, stop: str | None, *, or_of_other_jobs: bool
    ) -> set[str]:
        """Return the stop checkpoints of the fit; the one at a path may be missing."""
        if stop is None:
            return set()
        if self._is_path or folder is None:
            return {stop}
        return stop_checkpoints_in(folder, or_of_other_jobs=or_of_other_jobs)

    def file_to_restore(self, path: PathOrUrl | None) -> PathOrUrl | None:
        """Return the file that rank 0 found, or the path that Lightning chose."""
        is_searched = _is_last(self._ckpt_path) or self.found.last is not None
        return self.found.last if is_searched else path

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
                Path(lock_of(path)).unlink(missing_ok=True)
                if not self._is_path:
                    remove(os.path.dirname(path))


@contextmanager
def _next_fit() -> Iterator[int]:
    """Number the fit in the block; one that a signal stops does not count.

    The process may call it again.
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
    others = [] if folder is None else folders_beside(folder)
    if folder is not None and others:
        lines.append(
            f"in {os.path.dirname(folder)}, {listed(others)} belong to other commands or fits; pass"
            " the path of a file in them to resume from it"
        )
    return "; ".join(lines)
