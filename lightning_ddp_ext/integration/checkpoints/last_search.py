"""Choose the file that ``ckpt_path="last"`` means among the files of all runs.

Each file states the run that saved it. A file that belongs to another run is left to it,
and the newest one of the others is chosen. One that is truncated, or whose structure is
damaged, is skipped; tensors are checked when the file is read. The first rule that
applies finds the owner:

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

from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError
from lightning_ddp_ext.rank_lists import listed

from ..private.lightning_tree import rank_zero_info, rank_zero_warn
from .fit_identity import FitIdentity, SavingRun
from .stored_files import modification_time, raise_if_unanswered

UNUSABLE = (DamagedCheckpointError,)


@dataclass(frozen=True)
class Candidate:
    """A file that ``"last"`` may mean.

    Attributes:
        path: its path or URL.
        saved_by: the run that saved it; ``None`` if it is unknown.
        error: why the file, or the identity in it, cannot be read. Unless the file is
            damaged, it may be intact, and reading it later raises the reason.
    """

    path: str
    saved_by: SavingRun | None = None
    error: CheckpointError | None = None

    @property
    def is_of_fit(self) -> bool:
        """Whether the same fit saved it, possibly in another job or environment."""
        return self.saved_by is not None and not self.saved_by.other_fit

    @property
    def changed(self) -> list[str]:
        """The environment variables that the saving run had differently."""
        return [] if self.saved_by is None else self.saved_by.changed_variables


@dataclass(frozen=True)
class Choice:
    """The result of a search.

    Attributes:
        chosen: the file that ``"last"`` means, if any.
        obsolete: the paths of the fit's own files that are not newer.
        owners: the other run to which each file belongs, by path; empty for none.
    """

    chosen: Candidate | None
    obsolete: list[str]
    owners: dict[str, str]

    def log(self, none_found: str) -> None:
        """Log the chosen file, or ``none_found``, and the owners of other files."""
        line = f"ckpt_path='last' is {self.chosen.path}" if self.chosen else none_found
        if self.chosen is not None and self.chosen.changed:
            rank_zero_warn(
                f"{line}, saved by {_run_with_other(self.chosen.changed)}; if that was another"
                " run, move the file away and start again"
            )
            return
        others = [
            f"{path} belongs to {owner}; pass its path to resume from it"
            for path, owner in self.owners.items()
            if owner
        ]
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
    owners = _find_owners(candidates, only_ours)
    free = [file for file in candidates if not owners[file.path]]
    usable = [file for file in free if not isinstance(file.error, UNUSABLE)]
    # If all are damaged, reading the newest one raises the reason on every rank.
    chosen = next(iter(usable or free), None)
    if chosen is None or chosen.changed:
        # A run in another environment may still need its files.
        return Choice(chosen, [], owners)
    return Choice(chosen, [file.path for file in usable if file.is_of_fit], owners)


def read_candidate(path: str, identity: FitIdentity) -> Candidate:
    """Read which run saved a file, and warn if the file is damaged.

    Raises:
        CheckpointError: the store does not answer.
    """
    try:
        return Candidate(path, identity.saving_run(path))
    except UNUSABLE as error:
        rank_zero_warn(f"ckpt_path='last' skips a file that cannot be used: {error}")
        return Candidate(path, error=error)
    except CheckpointError as error:
        raise_if_unanswered(path, error.__cause__ or error)
        return Candidate(path, error=error)


def _find_owners(candidates: list[Candidate], only_ours: set[str]) -> dict[str, str]:
    """Return the other run to which each file belongs, by the rules above; empty for none."""
    of_fit = [file.saved_by for file in candidates if file.saved_by and file.is_of_fit]
    job_has_file = any(run.is_of_this_job for run in of_fit)
    of_job = [run for run in of_fit if not (job_has_file and run.other_job)]
    environment_has_file = any(not run.changed_variables for run in of_job)

    def owner_of(file: Candidate) -> str:
        run = file.saved_by
        if run is None:
            is_unknown = file.error is None and file.path in only_ours
            return "an unknown fit" if is_unknown else ""
        if run.other_fit:
            return run.other_fit
        if job_has_file and run.other_job:
            return f"SLURM job {run.other_job}"
        if environment_has_file and run.changed_variables:
            return _run_with_other(run.changed_variables)
        return ""

    return {file.path: owner_of(file) for file in candidates}


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


def _run_with_other(variables: list[str]) -> str:
    return f"a run with other values of {listed(variables)}"
