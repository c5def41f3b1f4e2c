"""Choose the file that ``ckpt_path="last"`` means among the files of all runs.

1. The identity in each file states the fit that saved it.
2. A file of another fit has an owner, and is left to it. So has a file of another job
   or environment, if this job or environment also saved one.
3. The newest undamaged one of the others is chosen.

If a store does not answer a request, the search ends with an error, because each
further request might also take minutes. Any other error is an answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from lightning_ddp_ext.rank_lists import listed

from ..private.lightning_tree import rank_zero_info, rank_zero_warn
from .fit_identity import FitIdentity, identity_in
from .paths import modification_time, raise_if_unanswered

UNUSABLE = (DamagedCheckpointError, CheckpointNotFoundError)
_PASS_PATH = "pass its path to resume from it"


@dataclass
class Candidate:
    """A file that ``"last"`` may mean.

    Attributes:
        path: its path or URL.
        identity: the identity of the fit that saved it; empty if it is unknown.
        error: why the file, or the identity in it, cannot be read. Unless the file is
            damaged, it may be intact, and reading it later raises the reason.
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
    candidates = [read_candidate(path) for path in paths]
    _find_owners(candidates, only_ours, identity)
    chosen = _newest_intact([file for file in candidates if file.is_usable])
    if chosen is None:
        # Reading a damaged file raises the reason on every rank.
        chosen = next((file for file in candidates if file.is_damaged), None)
    return Choice(chosen, candidates)


def read_candidate(path: str) -> Candidate:
    """Read the identity in a file, and warn if the file is damaged.

    Raises:
        CheckpointError: the store does not answer.
    """
    try:
        return Candidate(path, identity_in(path) or {})
    except UNUSABLE as error:
        _warn_of_skipped(error)
        return Candidate(path, error=error)
    except CheckpointError as error:
        raise_if_unanswered(path, error.__cause__ or error)
        return Candidate(path, error=error)


def _find_owners(candidates: list[Candidate], only_ours: set[str], identity: FitIdentity) -> None:
    """Find the files that belong to others.

    These rules are applied one after another:

    - A file of another fit belongs to that fit. So does one without an identity at a
      path to which only this package saves.
    - If this SLURM job saved a file, those of other jobs belong to these.
    - If a run in this environment saved one of the files that are left, the others
      belong to the runs in other environments.
    """
    for file in candidates:
        if file.identity:
            file.owner = identity.difference(file.identity)
            file.is_of_fit = not file.owner
        elif file.error is None and file.path in only_ours:
            file.owner = "an unknown fit"
    of_fit = [file for file in candidates if file.is_of_fit]
    if any(identity.is_of_job(file.identity) for file in of_fit):
        for file in of_fit:
            if identity.is_of_other_job(file.identity):
                file.owner = f"SLURM job {file.identity['job']}"
    left = [file for file in of_fit if not file.owner]
    for file in left:
        file.changed = identity.changed_variables(file.identity)
    if not all(file.changed for file in left):
        # A run in this environment saved one, so the others belong to other runs.
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
