"""Name a run's stop checkpoint, resume from them, and remove obsolete ones.

A launcher needs the file that ``ckpt_path="last"`` means before the ranks connect, so
each rank searches its own disk (:meth:`RunFiles.resolve_last`). Once the ranks have
connected, all of them raise rank 0's search error, if any, and later restore the file
that rank 0 found (:meth:`RunFiles.chosen`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.location import PathOrUrl
from lightning_ddp_ext.checkpoint.save_lock import lock_of
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.rendezvous.runs import current_run

from ..private.lightning_tree import SLURMEnvironment, TrainerStatus, rank_zero_info
from .fit_identity import IN_A_HOOK, KEY, FitIdentity, identify
from .last_search import UNUSABLE, choose, newest_first, read_candidate
from .paths import (
    check_file_name,
    files_that_last_means,
    path_of_run_file,
    versioned,
    versions_of,
)
from .stored_files import change_token, modification_time

# Lightning also saves a file for it, whatever the settings.
_OF_REQUEUED_JOB = "last-preempted.ckpt"
_UNKNOWN_FILE = "last.ckpt"  # never read: all ranks restore rank 0's file, or raise its error
# The number of fits that this process has begun, without those that a signal stopped.
_fits_begun = 0


@dataclass(frozen=True)
class _Found:
    """The result of rank 0's search.

    Attributes:
        path: the file with which the run continues; ``None`` if the run starts anew.
        obsolete: the fit's own files that are not newer, with their change tokens.
    """

    path: str | None
    obsolete: dict[str, str]


class RunFiles:
    """The stop checkpoints of a strategy's Trainer.

    In a run, the methods are called in this order:

    1. :meth:`count_fit` and :meth:`resolve_last`, on each rank, before the ranks connect
    2. :meth:`raise_search_error`, on rank 0, when they have connected
    3. :meth:`chosen`, on each rank, when the Trainer restores a file
    4. :meth:`place` on rank 0, at the start and if the ranks are stopped; then
       :meth:`identify_stop` and, for each checkpoint, :meth:`add_identity` on each rank
    5. :meth:`remove_obsolete`, on each rank, at the end

    Args:
        stop: the name or path of the stop checkpoint; ``None`` if none is saved.

    Attributes:
        stop_name: the argument ``stop``.
        requeue_name: the name or path of the file from which a requeued SLURM job
            continues.
        identity: the identity of the Trainer's fit.
    """

    def __init__(self, stop: PathOrUrl | None) -> None:
        check_file_name("stop_checkpoint", stop)
        self.stop_name = stop
        self.requeue_name: PathOrUrl = _OF_REQUEUED_JOB if stop is None else stop
        self._searched_name = self.requeue_name if SLURMEnvironment.detect() else stop
        self._fit_number = IN_A_HOOK
        self.identity = FitIdentity()
        self._is_requeued: dict[str, bool] = {}  # by the path of a stop checkpoint
        # The result of the last search: a file or none on rank 0, or an error.
        self._found: _Found | None = None
        self._search_error: CheckpointError | None = None

    @contextmanager
    def count_fit(self, trainer: Any) -> Iterator[None]:
        """Number a fit in its script, if the block is one.

        One that a signal stops does not count, as it may be called again.
        """
        global _fits_begun
        is_in_a_hook = current_run() is not None
        is_counted = not is_in_a_hook and trainer is not None and trainer.state.fn == "fit"
        if is_in_a_hook:
            self._fit_number = IN_A_HOOK
        if is_counted:
            _fits_begun += 1
            self._fit_number = _fits_begun
        try:
            yield
        except SystemExit:
            if is_counted:
                _fits_begun -= 1
            raise

    def place(self, name: PathOrUrl | None, trainer: Any) -> str | None:
        """Return a path for a file at which no file of another fit is replaced.

        Rank 0 calls this for all ranks. A SLURM job's number is part of it, because jobs
        that SLURM stops together may share a directory. Without a name, return ``None``.
        """
        if name is None:
            return None
        path = path_of_run_file(name, trainer)
        path = versioned(path, int(os.environ.get("SLURM_JOB_ID") or 0))
        versions = (versioned(path, number) for number in count())
        return next(version for version in versions if self._may_replace(version))

    def _may_replace(self, path: str) -> bool:
        """Whether a path is free, has a file of this run, or cannot be checked."""
        if self._found is not None and path == self._found.path:
            return True
        try:
            time = modification_time(path)
        except CheckpointError:
            return True
        if time is None:
            return True
        try:
            saved_by = self.identity.saving_run(path)
        except UNUSABLE:
            return True
        except CheckpointError:
            certainly_exists = time < math.inf
            return not certainly_exists
        return saved_by is None or saved_by.is_this_run

    def identify_stop(self, path: str, *, is_requeued: bool) -> None:
        """Let the checkpoint that is saved to ``path`` contain the identity of the fit.

        Args:
            path: the path of the stop checkpoint.
            is_requeued: whether SLURM requeues the job, which then continues from it.
        """
        self._is_requeued[path] = is_requeued

    def add_identity(self, checkpoint: dict[str, Any], path: str) -> None:
        """Add the identity of the fit to a checkpoint, if it is the stop checkpoint."""
        if path in self._is_requeued:
            checkpoint[KEY] = self.identity.to_entry(is_requeued=self._is_requeued[path])

    # Resuming.

    def resolve_last(
        self, args: tuple[Any, ...], trainer: Any, *, is_rank_zero: bool
    ) -> tuple[Any, ...]:
        """Replace ``ckpt_path="last"`` in a Trainer function's arguments by a path.

        Without a file the arguments are unchanged. In a requeued SLURM job, rank 0 also
        looks for the job's file if no argument asks for one. An error is kept for
        :meth:`raise_search_error`: the other ranks may already be connecting.

        Args:
            args: the arguments of the Trainer's function.
            trainer: the Trainer; ``None`` if a user starts ranks without one.
            is_rank_zero: whether this rank's search counts.
        """
        if trainer is None:
            return args
        self.identity = identify(args, self._fit_number)
        self._found = None
        self._search_error = None
        try:
            if any(map(_is_last, args)):
                found = self._search(trainer, is_rank_zero=is_rank_zero)
                return _with_last_as(found, args) if found else args
            has_path = any(isinstance(arg, PathOrUrl) for arg in args)
            is_on_slurm = SLURMEnvironment.detect()
            if is_rank_zero and is_on_slurm and trainer.state.fn == "fit" and not has_path:
                self._find_requeued(trainer)
        except CheckpointError as error:
            self._search_error = error
            return _with_last_as(_UNKNOWN_FILE, args)  # Lightning would search for "last" itself
        return args

    def raise_search_error(self) -> None:
        """Raise the error that ended this rank's search, if any.

        Raises:
            CheckpointError: a store did not answer, or a URL is invalid.
        """
        if self._search_error is not None:
            raise self._search_error

    def chosen(self, path: PathOrUrl | None) -> PathOrUrl | None:
        """Return the file that rank 0 restores, given the one that Lightning chose.

        If no file is found for ``"last"``, Lightning may choose a file that belongs to
        another fit.
        """
        return path if self._found is None else self._found.path

    def _search(self, trainer: Any, *, is_rank_zero: bool) -> str | None:
        """Return the file that ``"last"`` means on this rank.

        Rank 0 also reads the identities of the files, and logs and records its choice.
        """
        own = self._own_files(trainer)
        of_lightning = files_that_last_means(trainer)
        paths = newest_first(own | of_lightning, written_last=own)
        if not is_rank_zero:
            # It would log, because rank_zero_info does not know a rank's number yet.
            return next(iter(paths), None)
        choice = choose(paths, own - of_lightning, self.identity)
        found = None if choice.chosen is None else choice.chosen.path
        choice.log("" if found else self._none_found(trainer))
        self._continue_from(found, choice.obsolete)
        return found

    def _own_files(self, trainer: Any) -> set[str]:
        """Return the existing files to which only this package saves."""
        name = self._searched_name
        return set() if name is None else versions_of(path_of_run_file(name, trainer))

    def newest(self, trainer: Any) -> str | None:
        """Return the newest file that ``"last"`` may mean, if any.

        Raises:
            CheckpointError: a store does not answer.
        """
        own = self._own_files(trainer)
        return next(iter(newest_first(own | files_that_last_means(trainer), own)), None)

    def _continue_from(self, path: str | None, obsolete: list[str]) -> None:
        self._found = _Found(path, {each: change_token(each) for each in obsolete})

    def _find_requeued(self, trainer: Any) -> None:
        """Find the newest file that this job saved before it was requeued.

        As with stock, no argument has to ask for it.
        """
        versions = versions_of(path_of_run_file(self.requeue_name, trainer))
        files = [read_candidate(path, self.identity) for path in newest_first(versions)]
        requeued = [
            file.path
            for file in files
            if file.saved_by is not None and file.saved_by.is_continued_by_requeue
        ]
        if requeued:
            self._continue_from(requeued[0], requeued)
        else:
            rank_zero_info(
                "after SIGTERM, a requeued job only resumes with trainer.fit(..., ckpt_path='last')"
            )

    def _none_found(self, trainer: Any) -> str:
        """Describe what the next run of this command will find."""
        line = "ckpt_path='last': no checkpoint yet"
        if self.stop_name is None:
            return line
        path = self.place(self.stop_name, trainer)
        return f"{line}; if the run ends early, it saves {path}, which the same command then finds"

    def remove_obsolete(self, trainer: Any) -> None:
        """Remove the file that a finished fit resumed from, and its older ones.

        Otherwise the same command would resume from them every time. Files that changed
        since then are kept. A fit that a callback stopped may be continued, and a trial run
        with ``fast_dev_run`` or without batches has not continued it. Only rank 0, which
        has searched, removes anything.
        """
        if trainer is None:
            return  # in a process that starts ranks
        was_interrupted = trainer.state.status == TrainerStatus.INTERRUPTED
        is_finished_fit = (
            trainer.state.fn == "fit" and not was_interrupted and not trainer.should_stop
        )
        is_trial = trainer.fast_dev_run or trainer.limit_train_batches == 0
        if not is_finished_fit or is_trial or self._found is None:
            return
        for path, token in self._found.obsolete.items():
            if token and change_token(path) == token:
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
                Path(lock_of(path)).unlink(missing_ok=True)


def _is_last(argument: Any) -> bool:
    return isinstance(argument, str) and argument == "last"


def _with_last_as(path: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with a path in place of ``"last"``."""
    return tuple(path if _is_last(arg) else arg for arg in args)
