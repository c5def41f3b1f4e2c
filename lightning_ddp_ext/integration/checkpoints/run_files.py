"""Find the file that ``ckpt_path="last"`` means, and remove files no longer needed.

The removed files are stop and rescue checkpoints. A launcher needs the file before the
ranks connect, so each rank searches its own disk, and later all ranks restore the file
that rank 0 found.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.checkpoint.location import PathOrUrl, locate
from lightning_ddp_ext.checkpoint.save_lock import lock_of
from lightning_ddp_ext.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.peers import current_run

from ..private.lightning_tree import (
    SLURMEnvironment,
    TrainerStatus,
    rank_zero_info,
    rank_zero_warn,
)
from .fit_identity import FitIdentity, command, identify, identity_in
from .paths import (
    change_token,
    files_that_last_means,
    modification_time,
    path_of_run_file,
    versioned,
    versions_of,
)

_UNUSABLE = (DamagedCheckpointError, CheckpointNotFoundError)
_PASS_PATH = "pass its path to resume from it"
# Lightning also saves a file for it, whatever the settings.
_OF_REQUEUED_JOB = "last-preempted.ckpt"
_fits = 0  # the number of fits that this process has begun, without those that a signal stopped


@dataclass
class _Candidate:
    """A file that ``"last"`` may mean.

    Attributes:
        path: its path or URL.
        identity: the identity of the fit that saved it; empty if it is unknown.
        error: why the identity cannot be read. Unless the file is damaged, it may be
            intact, and reading it later raises the reason.
        is_of_fit: whether the same fit saved it, possibly in another job or
            environment.
        changed: the environment variables that the saving run had differently.
        owner: the other fit or run to which the file belongs; empty if it belongs to
            none, so that it may be used.
    """

    path: str
    identity: Mapping[str, Any] = field(default_factory=dict)
    error: CheckpointError | None = None
    is_of_fit: bool = False
    changed: list[str] = field(default_factory=list)
    owner: str = ""

    @property
    def is_damaged(self) -> bool:
        """Whether the file cannot be used, now or later."""
        return isinstance(self.error, _UNUSABLE)


class RunFiles:
    """The stop and rescue checkpoints of a strategy's Trainer.

    Args:
        stop: the name or path of the stop checkpoint; ``None`` if none is saved.
        rescue: the name or path of the rescue checkpoint; ``None`` if none is saved.

    Attributes:
        stop_name: the argument ``stop``.
        requeue_name: the name or path of the file from which a requeued SLURM job
            continues.
        identity: the identity of the Trainer's fit.
        stop_path: the path at which the ranks save the stop checkpoint, after a stop.
    """

    def __init__(self, stop: PathOrUrl | None, rescue: PathOrUrl | None) -> None:
        self.stop_name = stop
        self.requeue_name: PathOrUrl = _OF_REQUEUED_JOB if stop is None else stop
        of_stop = self.requeue_name if SLURMEnvironment.detect() else stop
        self._names = [name for name in (of_stop, rescue) if name is not None]
        self._fit = 0  # for a fit in a hook of another run
        self.identity = FitIdentity()
        self.stop_path: str | None = None
        self._has_searched = False
        self._found: str | None = None
        # Own files not newer than the one found, and their states.
        self._obsolete: dict[str, str] = {}

    @contextmanager
    def count_fit(self, trainer: Any) -> Iterator[None]:
        """Number a fit in its script.

        One that a signal stops does not count, as it may be called again.
        """
        global _fits
        if trainer is None or trainer.state.fn != "fit" or current_run() is not None:
            yield
            return
        _fits += 1
        self._fit = _fits
        try:
            yield
        except SystemExit:
            _fits -= 1
            raise

    def place(self, name: PathOrUrl | None, trainer: Any) -> str | None:
        """Return a path for a file at which no file of another fit is replaced.

        A SLURM job's number is part of it, because jobs that SLURM stops together may
        share a directory.
        """
        path = path_of_run_file(name, command(), trainer)
        if path is None:
            return None
        path = versioned(path, int(os.environ.get("SLURM_JOB_ID", 0)))
        return next(
            each
            for each in (versioned(path, number) for number in count())
            if self._may_replace(each)
        )

    def _may_replace(self, path: str) -> bool:
        time = modification_time(path)
        if path == self._found or time is None:
            return True
        try:
            saved = identity_in(path)
        except CheckpointError as error:
            # In a store that cannot be reached, no name is known to be free.
            return isinstance(error, _UNUSABLE) or math.isinf(time)
        if saved is None:
            return True
        return not (
            self.identity.difference(saved)
            or self.identity.is_of_other_job(saved)
            or self.identity.changed_variables(saved)
        )

    # Resuming.

    def resolve_last(
        self, args: tuple[Any, ...], trainer: Any, *, is_rank_zero: bool
    ) -> tuple[Any, ...]:
        """Replace ``ckpt_path="last"`` in a Trainer function's arguments by a path."""
        if trainer is None:
            return args
        self.identity = identify(args, self._fit)
        self._has_searched = False
        self._found = None
        self._obsolete = {}
        if "last" not in [arg for arg in args if isinstance(arg, str)]:
            has_path = any(isinstance(arg, PathOrUrl) for arg in args)
            may_be_requeued = trainer.state.fn == "fit" and SLURMEnvironment.detect()
            if is_rank_zero and may_be_requeued and not has_path:
                self._find_requeued(trainer)
            return args
        own = {
            each
            for name in self._names
            for each in versions_of(path_of_run_file(name, command(), trainer))
        }
        of_lightning = files_that_last_means(trainer)
        newest_first = _newest_first(own | of_lightning)
        found = next(iter(newest_first), None)
        if is_rank_zero:
            # All ranks would log: rank_zero_info does not know a rank's number yet.
            self._has_searched = True
            found = self._found = self._search(newest_first, own - of_lightning, trainer)
        if found is None:
            return args
        return tuple(found if isinstance(arg, str) and arg == "last" else arg for arg in args)

    def chosen(self, path: PathOrUrl | None) -> PathOrUrl | None:
        """Return the file that rank 0 restores, given the one that Lightning chose.

        If no file is found for ``"last"``, Lightning may choose a file that belongs to
        another fit.
        """
        return self._found if self._has_searched else path

    def _find_requeued(self, trainer: Any) -> None:
        """Find the newest file that this job saved before it was requeued.

        As with stock, no argument has to ask for it.
        """
        versions = versions_of(path_of_run_file(self.requeue_name, command(), trainer))
        requeued = [
            each.path
            for each in map(_candidate, _newest_first(versions))
            if self._is_for_requeue(each.identity)
        ]
        if not requeued:
            rank_zero_info(
                "after SIGTERM, a requeued job only resumes with trainer.fit(..., ckpt_path='last')"
            )
            return
        self._has_searched = True
        self._found = requeued[0]
        self._obsolete = {path: change_token(path) for path in requeued}

    def _is_for_requeue(self, saved: Mapping[str, Any]) -> bool:
        """Whether this fit saved a file before this job was requeued."""
        return (
            bool(saved.get("is_requeued"))
            and self.identity.is_of_job(saved)
            and not self.identity.difference(saved)
        )

    def _search(self, newest_first: list[str], only_ours: set[str], trainer: Any) -> str | None:
        """Return the newest usable file, and log it and the owners of the others."""
        candidates = [_candidate(path) for path in newest_first]
        self._find_owners(candidates, only_ours)
        damaged = [each for each in candidates if each.is_damaged]
        usable = [each for each in candidates if not (each.owner or each.is_damaged)]
        found = _newest_intact(usable)
        if found is not None and not found.changed:  # a run with changes may still need its files
            not_newer = usable[usable.index(found) :]
            self._obsolete = {
                each.path: change_token(each.path) for each in not_newer if each.is_of_fit
            }
        if found is None and damaged:
            found = damaged[0]  # reading it raises the reason on every rank
        self._log(found, candidates, trainer)
        return None if found is None else found.path

    def _find_owners(self, candidates: list[_Candidate], only_ours: set[str]) -> None:
        """Find the files that belong to other fits or runs.

        ``only_ours`` has the paths to which only this package saves.
        """
        for each in candidates:
            if each.identity:
                each.owner = self.identity.difference(each.identity)
                each.is_of_fit = not each.owner
            elif each.error is None and each.path in only_ours:
                each.owner = "an unknown fit"
        of_fit = [each for each in candidates if each.is_of_fit]
        if any(self.identity.is_of_job(each.identity) for each in of_fit):
            for each in of_fit:
                if self.identity.is_of_other_job(each.identity):
                    each.owner = f"SLURM job {each.identity['job']}"
        for each in of_fit:
            each.changed = self.identity.changed_variables(each.identity)
        if not all(each.changed for each in of_fit):
            # A run in this environment saved one, so the others belong to other runs.
            for each in of_fit:
                if each.changed:
                    each.owner = _in_words(each.changed)

    def _log(self, found: _Candidate | None, candidates: list[_Candidate], trainer: Any) -> None:
        line = f"ckpt_path='last' is {found.path}" if found else self._none_found(trainer)
        if found is not None and found.changed:
            remedy = "if that was another run, move the file away and start again"
            rank_zero_warn(f"{line}, saved by {_in_words(found.changed)}; {remedy}")
            return
        others = [
            f"{each.path} belongs to {each.owner}; {_PASS_PATH}"
            for each in candidates
            if each.owner
        ]
        rank_zero_info("; ".join([line, *others]))

    def _none_found(self, trainer: Any) -> str:
        """Describe what the next run of this command will find."""
        line = "ckpt_path='last': no checkpoint yet"
        if self.stop_name is None:
            return line
        path = self.place(self.stop_name, trainer)
        return (
            f"{line}; if the ranks are stopped, they save {path}, which the same command finds next"
            " time"
        )

    def remove_obsolete(self, trainer: Any) -> None:
        """Remove the file that a finished fit resumed from, and its older ones.

        Otherwise the same command would resume from them every time. Files that changed
        since then are kept. A fit that a callback stopped may be continued.
        """
        if trainer is None:
            return  # in a process that starts ranks
        is_finished = trainer.state.status != TrainerStatus.INTERRUPTED and not trainer.should_stop
        if not is_finished or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        obsolete = self._obsolete
        self._obsolete = {}
        for path, state in obsolete.items():
            if state and change_token(path) == state:
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
                Path(lock_of(path)).unlink(missing_ok=True)


def _newest_first(paths: set[str]) -> list[str]:
    """Return the files that exist."""
    times = {path: modification_time(path) for path in paths}
    existing = {path: time for path, time in times.items() if time is not None}
    return sorted(existing, key=existing.__getitem__, reverse=True)


def _candidate(path: str) -> _Candidate:
    """Read the identity in a file, and warn if the file is damaged."""
    try:
        return _Candidate(path, identity_in(path) or {})
    except CheckpointError as error:
        candidate = _Candidate(path, error=error)
        if candidate.is_damaged:
            _skip(error)
        return candidate


def _newest_intact(newest_first: list[_Candidate]) -> _Candidate | None:
    """Return the first of these files that is not damaged.

    Warn of those that are. A file that cannot be read now may be intact, so no older
    file replaces it; reading it later raises the reason on every rank.
    """
    if len(newest_first) == 1:
        return newest_first[0]  # it is checked when it is read
    for each in newest_first:
        local = locate(each.path).local
        try:
            if local is not None:  # a remote store only shows complete files
                Archive.open(local, each.path).check()
        except CheckpointError as error:
            if isinstance(error, _UNUSABLE):
                _skip(error)
                continue
        return each
    return None


def _skip(error: CheckpointError) -> None:
    rank_zero_warn(f"ckpt_path='last' skips a file that cannot be used: {error}")


def _in_words(variables: list[str]) -> str:
    return f"a run with other values of {listed(variables)}"
