"""Find the file with which a run continues, and name the one that it saves if it ends early.

``ckpt_path="last"`` means the newest of the stop checkpoints in the fit's folder (see
``fit_folder``), or the one at the path that ``stop_checkpoint`` names, of the ``last``
files of ``ModelCheckpoint``, and of the file of ``OnExceptionCheckpoint``. A SLURM job
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
from typing import Any

from lightning_ddp_ext.checkpoint.location import (
    PathOrUrl,
    absolute,
    modification_times,
    names_in,
)
from lightning_ddp_ext.checkpoint.save import remove
from lightning_ddp_ext.checkpoint.save_lock import lock_of
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.runs import current_run

from ..cooperation import CooperatingRanks
from ..private.compat import chosen_directory_of
from ..private.lightning_tree import TrainerStatus, pl, rank_zero_info
from ..start.slurm import is_requeued
from .fit_folder import folder_of, folders_beside, stop_checkpoints_in

_PLACEHOLDER = "last.ckpt"  # never read
# The number of fits that this process has begun, without those that a signal stopped. It
# belongs to the process, since a script may train with several Trainers, one after another.
_fits_begun = 0


@dataclass(frozen=True)
class ChosenFiles:
    """The files that rank 0 chose at the start of a run, the same on every rank.

    Attributes:
        stop_checkpoint: the path of the stop checkpoint; ``None`` if none is saved.
        token: distinguishes the run from others that save to this path.
        resumed: the file with which the run continues; ``None`` if none was found, or if
            the user's argument or Lightning names the file, so that none was looked for.
        candidates: the stop checkpoints among which ``resumed`` was chosen, with their
            modification times.
    """

    stop_checkpoint: str | None = None
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    resumed: str | None = None
    candidates: dict[str, float] = field(default_factory=dict)


class RunFiles:
    """The stop checkpoint of a strategy's Trainer, and the file with which a run continues.

    In a run, the methods are called in this order:

    1. :meth:`begin`, before the ranks connect
    2. :meth:`choose`, once they are connected
    3. :meth:`file_to_restore`, on each rank, before the Trainer restores a file
    4. :meth:`remove_obsolete`, on each rank, at the end

    Args:
        stop_checkpoint: the name or path of the stop checkpoint; ``None`` if none is
            saved. A name is placed in the folder of the fit, and a path is used as it is.
        ranks: the strategy's ranks.

    Attributes:
        chosen: the result of :meth:`choose` in the current run, or in the last one.
    """

    def __init__(self, stop_checkpoint: PathOrUrl | None, ranks: CooperatingRanks) -> None:
        name = (
            os.path.basename(stop_checkpoint)
            if isinstance(stop_checkpoint, PathOrUrl)
            else stop_checkpoint
        )
        if name in ("", ".", "..") or not (name is None or isinstance(name, str)):
            raise ConfigurationError(
                "stop_checkpoint must be the name or path of a file, or None (got"
                f' {stop_checkpoint!r}); for example, write stop_checkpoint="last.ckpt"'
            )
        self._stop_checkpoint = None if stop_checkpoint is None else os.fspath(stop_checkpoint)
        # Whether the user chose a path, and not a name.
        self._is_path = self._stop_checkpoint is not None and name != self._stop_checkpoint
        self._ranks = ranks
        self.chosen = ChosenFiles()
        # The argument `ckpt_path` of the Trainer's function, in the current run or the last one.
        self._ckpt_path: PathOrUrl | None = None
        # The number of the last fit, which evaluations after it share. ``None`` before the
        # first fit, and for a fit in a hook of another run. That one is never resumed, so it
        # has no folder.
        self._fit_number: int | None = None

    @contextmanager
    def begin(self, trainer: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """Run the block as a run: number its fit, and note the file that the user names.

        A fit that a signal stops does not count, because the process may call it again.

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
        self.chosen = ChosenFiles()
        self._ckpt_path = _ckpt_path_among(args)
        is_fit = trainer.state.fn == "fit"
        counted = 1 if is_fit and current_run() is None else 0
        _fits_begun += counted
        if is_fit:
            self._fit_number = _fits_begun if counted else None
        try:
            yield tuple(_PLACEHOLDER if _is_last(each) else each for each in args)
        except SystemExit:  # also StoppedException
            _fits_begun -= counted
            raise

    # Resuming.

    def choose(self, trainer: Any) -> None:
        """Name the stop checkpoint and the file with which the run continues.

        Rank 0 searches for all ranks. Collective.

        Raises:
            CheckpointError: a directory or store cannot be searched.
        """
        self.chosen = self._ranks.on_rank_zero(
            lambda: self._choose_on_rank_zero(trainer), "finding the checkpoint"
        )

    def _choose_on_rank_zero(self, trainer: Any) -> ChosenFiles:
        """Choose the files; called on rank 0 only.

        Without a user's ``ckpt_path``, a requeued SLURM job continues with its own file.
        """
        folder = None if self._fit_number is None else folder_of(trainer, self._fit_number)
        path = self._path_in(folder)
        if _is_last(self._ckpt_path):
            candidates = modification_times(self._stop_checkpoints(path, or_of_other_jobs=True))
            resumed = _newest(candidates, modification_times(_files_of_callbacks(trainer)))
            rank_zero_info(
                f"ckpt_path='last' is {resumed}" if resumed else _none_found(folder, path)
            )
        elif trainer.state.fn == "fit" and self._ckpt_path is None and is_requeued():
            candidates = modification_times(self._stop_checkpoints(path, or_of_other_jobs=False))
            resumed = _newest(candidates, {})
        else:
            return ChosenFiles(path)
        return ChosenFiles(path, resumed=resumed, candidates=candidates)

    def _path_in(self, folder: str | None) -> str | None:
        """Return the path of the stop checkpoint of the fit with this folder, if it has one."""
        if self._stop_checkpoint is None:
            return None
        if self._is_path:
            return absolute(self._stop_checkpoint)
        return None if folder is None else os.path.join(folder, self._stop_checkpoint)

    def _stop_checkpoints(self, path: str | None, *, or_of_other_jobs: bool) -> set[str]:
        """Return the earlier stop checkpoints of the fit that saves at ``path``.

        They are all in the fit's folder, or only this path if the user chose it, where the
        file may be missing.

        Args:
            path: the path; ``None`` if none is saved.
            or_of_other_jobs: see :func:`stop_checkpoints_in`.
        """
        if path is None:
            return set()
        if self._is_path:
            return {path}
        return stop_checkpoints_in(os.path.dirname(path), or_of_other_jobs=or_of_other_jobs)

    def file_to_restore(self, path: PathOrUrl | None) -> PathOrUrl | None:
        """Return the file with which the run continues, if there is one.

        Args:
            path: the path that Lightning chose. For ``"last"`` this is only a placeholder,
                so even if rank 0 found no file, it is not used.
        """
        resumed = self.chosen.resumed
        return resumed if resumed is not None or _is_last(self._ckpt_path) else path

    # Finishing.

    def remove_obsolete(self, trainer: Any) -> None:
        """Remove the stop checkpoints of a fit that continued from one of them and finished.

        Otherwise the same command would resume from them every time. A file that changed
        meanwhile is kept. A fit that a callback stopped may be continued, and a trial run
        with ``fast_dev_run`` or without batches has not continued it.
        """
        if trainer is None or not trainer.is_global_zero or trainer.state.fn != "fit":
            return
        was_interrupted = trainer.state.status == TrainerStatus.INTERRUPTED
        is_trial = trainer.fast_dev_run or trainer.limit_train_batches == 0
        if was_interrupted or trainer.should_stop or is_trial:
            return
        for path, time in self.chosen.candidates.items():
            if modification_times([path]) == {path: time}:
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
                lock_of(path).unlink(missing_ok=True)
                if not self._is_path:
                    remove(os.path.dirname(path))


def _ckpt_path_among(args: tuple[Any, ...]) -> PathOrUrl | None:
    """Return the argument ``ckpt_path`` of the Trainer's function.

    No other argument of ``fit``, ``validate``, ``test`` and ``predict`` is a string or path.
    """
    return next((each for each in args if isinstance(each, PathOrUrl)), None)


def _is_last(argument: Any) -> bool:
    return isinstance(argument, str) and argument == "last"


def _newest(stop_checkpoints: dict[str, float], others: dict[str, float]) -> str | None:
    """Return the newest of the stop checkpoints and the other files, if there are any.

    Stores round times to seconds. Of files with the same time, a stop checkpoint is the
    newest, because a run saves it at its end.

    Args:
        stop_checkpoints, others: the modification times of the files, by path.
    """
    times = {**others, **stop_checkpoints}
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
            names = names_in(directory)
            files |= {os.path.join(directory, name) for name in names if last.fullmatch(name)}
    return files


def _none_found(folder: str | None, path: str | None) -> str:
    """Describe what the next run of this command will find, and what is left alone."""
    lines = ["ckpt_path='last': no checkpoint yet"]
    if path is not None:
        lines.append(f"if the run ends early, it saves {path}, which the same command then finds")
    others = [] if folder is None else folders_beside(folder)
    if folder is not None and others:
        lines.append(
            f"in {os.path.dirname(folder)}, {listed(others)} belong to other commands or fits; pass"
            " the path of a file in them to resume from it"
        )
    return "; ".join(lines)
