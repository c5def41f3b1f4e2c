"""Choose the file that ``ckpt_path="last"`` means among the files of all runs.

Each file states the run that saved it. A file that belongs to another run is left to it,
and the newest undamaged one of the others is chosen. These rules find the owner:

===================  ===================================================================
Saved by             Rule, and what it is for
===================  ===================================================================
another fit          Left to that fit. Experiments and the folds of a cross-validation,
                     which share a directory, do not continue with each other's weights.
another SLURM job    Left to that job if this job has a file. Of several jobs with the
                     same command, each continues with its own file.
another environment  Left to that run if one in this environment has a file. Otherwise
                     it is used with a warning: it may be this run, in another shell.
unknown              Left alone at a path to which only this package saves. At the
                     others, Lightning saves such files.
===================  ===================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from lightning_ddp_ext.rank_lists import listed

from ..private.lightning_tree import rank_zero_info, rank_zero_warn
from .fit_identity import FitIdentity, SavingRun
from .stored_files import modification_time, raise_if_unanswered

UNUSABLE = (DamagedCheckpointError, CheckpointNotFoundError)
_PASS_PATH = "pass its path to resume from it"


@dataclass
class Candidate:
    """A file that ``"last"`` may mean.

    Attributes:
        path: its path or URL.
        saved_by: the run that saved it; ``None`` if it is unknown.
        error: why the file, or the identity in it, cannot be read. Unless the file is
            damaged, it may be intact, and reading it later raises the reason.
        owner: the other fit or run to which the file belongs; empty if it belongs to
            none, so that it may be used.
    """

    path: str
    saved_by: SavingRun | None = None
    error: CheckpointError | None = None
    owner: str = ""

    @property
    def is_of_fit(self) -> bool:
        """Whether the same fit saved it, possibly in another job or environment."""
        return self.saved_by is not None and not self.saved_by.other_fit

    @property
    def changed(self) -> list[str]:
        """The environment variables that the saving run had differently."""
        return [] if self.saved_by is None else self.saved_by.changed_variables

    @property
    def is_damaged(self) -> bool:
        """Whether the file cannot be used, now or later."""
        return isinstance(self.error, UNUSABLE)

    @property
    def is_usable(self) -> bool:
        """Whether the file may be chosen."""
        return not (self.owner or self.is_damaged)


@dataclass(frozen=True)
class Choice:
    """The result of a search.

    Attributes:
        chosen: the file that ``"last"`` means, if any.
        candidates: all files, newest first.
    """

    chosen: Candidate | None
    candidates: list[Candidate]

    def obsolete_paths(self) -> list[str]:
        """Return the fit's own files that are not newer than the chosen one.

        The list is empty if the saving run had another environment, because it may
        still need them.
        """
        if self.chosen is None or self.chosen.changed or not self.chosen.is_usable:
            return []
        not_newer = self.candidates[self.candidates.index(self.chosen) :]
        return [file.path for file in not_newer if file.is_of_fit and file.is_usable]

    def log(self, none_found: str) -> None:
        """Log the chosen file, or ``none_found``, and the owners of other files."""
        line = f"ckpt_path='last' is {self.chosen.path}" if self.chosen else none_found
        if self.chosen is not None and self.chosen.changed:
            rank_zero_warn(
                f"{line}, saved by {_run_with_other(self.chosen.changed)}; if that was another"
                " run, move the file away and start again"
            )
            return
        owned = [file for file in self.candidates if file.owner]
        others = [f"{file.path} belongs to {file.owner}; {_PASS_PATH}" for file in owned]
        rank_zero_info("; ".join([line, *others]))


def choose(paths: list[str], only_ours: set[str], identity: FitIdentity) -> Choice:
    """Choose the file with which a fit continues.

    Args:
        paths: the existing files, newest first.
        only_ours: the paths to which only this package saves.
        identity: the identity of the fit.

    Raises:
        CheckpointError: a store does not answer.
    """
    candidates = [read_candidate(path, identity) for path in paths]
    _find_owners(candidates, only_ours)
    chosen = _newest_intact([file for file in candidates if file.is_usable])
    if chosen is None:
        # Reading a damaged file raises the reason on every rank.
        chosen = next((file for file in candidates if file.is_damaged), None)
    return Choice(chosen, candidates)


def read_candidate(path: str, identity: FitIdentity) -> Candidate:
    """Read which run saved a file, and warn if the file is damaged.

    Raises:
        CheckpointError: the store does not answer.
    """
    try:
        return Candidate(path, identity.saving_run(path))
    except UNUSABLE as error:
        _warn_of_skipped(error)
        return Candidate(path, error=error)
    except CheckpointError as error:
        raise_if_unanswered(path, error.__cause__ or error)
        return Candidate(path, error=error)


def _find_owners(candidates: list[Candidate], only_ours: set[str]) -> None:
    """Find the other runs to which files belong, by the rules above, in their order."""
    for file in candidates:
        if file.saved_by is not None:
            file.owner = file.saved_by.other_fit
        elif file.error is None and file.path in only_ours:
            file.owner = "an unknown fit"
    runs = [(file, file.saved_by) for file in candidates if file.saved_by and file.is_of_fit]
    if any(run.is_of_this_job for _, run in runs):
        for file, run in runs:
            if run.other_job:
                file.owner = f"SLURM job {run.other_job}"
    left = [file for file, _ in runs if not file.owner]
    if not all(file.changed for file in left):
        for file in left:
            if file.changed:
                file.owner = _run_with_other(file.changed)


def newest_first(paths: Iterable[str], written_last: Collection[str] = ()) -> list[str]:
    """Return the files that exist, newest first.

    Stores round times to seconds. Of files with the same time, those in
    ``written_last`` come first: a run saves them at its end.

    Raises:
        CheckpointError: a store does not answer.
    """
    times = {path: modification_time(path) for path in paths}
    existing = {
        path: (time, path in written_last) for path, time in times.items() if time is not None
    }
    return sorted(existing, key=existing.__getitem__, reverse=True)


def _newest_intact(usable: list[Candidate]) -> Candidate | None:
    """Return the first of these files, newest first, that is not damaged.

    Warn of those that are. A file that cannot be read now may be intact, so no older
    file replaces it; reading it later raises the reason on every rank.
    """
    if len(usable) == 1:
        return usable[0]  # it is checked when it is read
    for file in usable:
        local = locate(file.path).local
        try:
            if local is not None:  # a remote store only shows complete files
                Archive.open(local, file.path).check()
        except UNUSABLE as error:
            _warn_of_skipped(error)
            file.error = error
        except CheckpointError:
            return file
        else:
            return file
    return None


def _warn_of_skipped(error: CheckpointError) -> None:
    rank_zero_warn(f"ckpt_path='last' skips a file that cannot be used: {error}")


def _run_with_other(variables: list[str]) -> str:
    return f"a run with other values of {listed(variables)}"
