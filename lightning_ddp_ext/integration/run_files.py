"""Find the file that ``ckpt_path="last"`` means, and recognise stop and rescue checkpoints by their content.

These checkpoints state who saved them, so that only the same fit of the same command finds them.
A launcher needs the file before the ranks connect, so each rank searches its own disk, and later
all ranks restore the file that rank 0 found.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.checkpoint.location import PathLike, locate
from lightning_ddp_ext.checkpoint.rank_notes import lock_of
from lightning_ddp_ext.checkpoint.structure import entry_of
from lightning_ddp_ext.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.run import current_run

from .checkpoint_paths import (
    canonical,
    checkpoint_directory,
    follows_logger,
    last_of_lightning,
    modified,
    place_of,
    state_of,
    versioned,
    versions_of,
)
from .lightning_tree import SLURMEnvironment, TrainerStatus, pl, rank_zero_info, rank_zero_warn

KEY = "lightning_ddp_ext_run"
_VERSION = 1
_UNUSABLE = (DamagedCheckpointError, CheckpointNotFoundError)
_PASS_PATH = "pass its path to resume from it"
# Environment variables that number the tasks of a job array.
_TASKS = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "LSB_JOBINDEX", "SGE_TASK_ID", "JOB_COMPLETION_INDEX")
# Other variables that launchers, schedulers, shells and Lightning set, possibly differently in each
# run of the same command. They are not compared.
_NOT_COMPARED = re.compile(
    r"_|SHLVL|(OLD)?PWD|HOSTNAME|DISPLAY|TERM|TMPDIR|TMUX|STY|WINDOWID|INVOCATION_ID|JOURNAL_STREAM"
    r"|CUDA_VISIBLE_DEVICES|(\w+_)?(RANK|WORLD_SIZE)|\w+_(PORT|SERVICE_HOST)(_\w+)?"
    r"|(COV|DBUS|DDPX|HYDRA|JPY|KMP|KUBERNETES|LSB|MASTER|MPI|OMPI|PALS|PBS|PL|PMI|PMIX|PRTE|PYTEST"
    r"|SGE|SLURM|SLURMD|SSH|TERM|TMUX|TORCHELASTIC|VSCODE|XDG)_\w+"
)

_fits = 0  # the number of fits that this process has begun, without those that a signal stopped


@dataclass(frozen=True)
class Identity:
    """The fit that saves a checkpoint. Words and values are hashed, because they may be secrets.

    Attributes:
        command: the script and its arguments, and the task of a job array.
        fit: the number of the fit in its script, from 1; 0 for a fit in a hook of another run.
        hparams: the class and hyperparameters of the model and the data module, by name.
        environment: the environment variables, each hashed together with its value, by name.
    """

    command: str
    fit: int
    hparams: Mapping[str, str]
    environment: Mapping[str, str]

    def saved(self) -> dict[str, Any]:
        """Return the entry for a checkpoint, without the names of environment variables."""
        return {"version": _VERSION, **vars(self), "environment": sorted(self.environment.values())}

    def other_owner(self, saved: Mapping[str, Any]) -> str:
        """Describe the owner of a checkpoint, unless it is the same fit of the same command."""
        if saved["command"] != self.command:
            return "another command"
        if saved["fit"] != self.fit or not self.fit:
            return f"fit {saved['fit']} of this script, and this is fit {self.fit}"
        names = sorted({*self.hparams, *saved["hparams"]})
        changed = [each for each in names if self.hparams.get(each) != saved["hparams"].get(each)]
        return f"a model with other hyperparameters ({listed(changed)})" if changed else ""

    def changed_variables(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of environment variables that the saving run lacked or had differently."""
        before = set(saved["environment"])
        changed = [name for name, value in self.environment.items() if value not in before]
        was_unset = bool(before - set(self.environment.values())) and not changed
        return ["a variable that is not set now"] if was_unset else sorted(changed)


class RunFiles:
    """The stop and rescue checkpoints of a strategy's Trainer.

    Args:
        stop: the name or path of the stop checkpoint; ``None`` if none is saved.
        rescue: the name or path of the rescue checkpoint; ``None`` if none is saved.

    Attributes:
        identity: what the Trainer's files state about the fit that saves them.
    """

    def __init__(self, stop: PathLike | None, rescue: PathLike | None) -> None:
        self._stop = stop
        self._names = [name for name in (stop, rescue) if name is not None]
        self._fit = 0
        self.identity: Identity | None = None
        self._saving: str | None = None
        self._has_searched = False
        self._found: str | None = None
        self._obsolete: dict[str, str] = {}  # own files not newer than the one found, and their states

    @contextmanager
    def count_fit(self, trainer: Any) -> Iterator[None]:
        """Number a fit in its script. One that a signal stops does not count, as it may be called again."""
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

    # Saving.

    @contextmanager
    def saving(self, path: str) -> Iterator[None]:
        """Mark the block as one that saves the stop checkpoint at this path."""
        self._saving = path
        try:
            yield
        finally:
            self._saving = None

    def is_saving(self, path: PathLike) -> bool:
        """Whether the checkpoint that is being saved at a path is the stop checkpoint."""
        return os.fspath(path) == self._saving

    def identify(self, checkpoint: dict[str, Any]) -> None:
        """Record in a checkpoint which fit saves it."""
        if self.identity is not None:
            checkpoint[KEY] = self.identity.saved()

    def place(self, name: PathLike | None, trainer: Any) -> str | None:
        """Return the path at which a file is saved, so that it replaces no file of another fit."""
        path = place_of(name, _command(), trainer)
        if path is None:
            return None
        return next(each for each in (versioned(path, number) for number in count()) if self._may_replace(each))

    def _may_replace(self, path: str) -> bool:
        if modified(path) is None or path == self._found:
            return True
        try:
            saved = _identity_in(path)
        except CheckpointError as error:
            return isinstance(error, _UNUSABLE)
        if saved is None or self.identity is None:
            return True
        return not (self.identity.other_owner(saved) or self.identity.changed_variables(saved))

    # Resuming.

    def resolve_last(self, args: tuple[Any, ...], trainer: Any, *, is_rank_zero: bool) -> tuple[Any, ...]:
        """Replace ``ckpt_path="last"`` among the arguments of a Trainer's function by a path."""
        if trainer is None:
            return args
        self.identity = Identity(_command(), self._fit, _hparams(args), _environment())
        self._has_searched, self._found, self._obsolete = False, None, {}
        if "last" not in [arg for arg in args if isinstance(arg, str)]:
            if is_rank_zero and SLURMEnvironment.detect() and trainer.state.fn == "fit":
                rank_zero_info("after SIGTERM, a requeued job only resumes with trainer.fit(..., ckpt_path='last')")
            return args
        own = {each for name in self._names for each in versions_of(place_of(name, _command(), trainer))}
        of_lightning = last_of_lightning(trainer)
        times = {path: modified(path) for path in own | of_lightning}
        existing = {path: time for path, time in times.items() if time is not None}
        newest_first = sorted(existing, key=existing.__getitem__, reverse=True)
        found = next(iter(newest_first), None)
        if is_rank_zero:  # rank_zero_info does not know a started rank's number yet, so all ranks would log
            found = self._search(newest_first, own - of_lightning, trainer)
        if found is None:
            return args
        return tuple(found if isinstance(arg, str) and arg == "last" else arg for arg in args)

    def chosen(self, path: PathLike | None) -> PathLike | None:
        """Return the file that rank 0 restores, given the one that Lightning chose.

        If no file is found for ``"last"``, Lightning may choose a file that belongs to another fit.
        """
        if not self._has_searched:
            self._found = None if path is None else canonical(os.fspath(path))
            return path
        return self._found

    def _search(self, newest_first: list[str], only_ours: set[str], trainer: Any) -> str | None:
        """Return the newest usable file, and log it and the owners of the others."""
        assert self.identity is not None
        candidates = [_look_at(path) for path in newest_first]
        damaged = [each for each in candidates if isinstance(each.error, _UNUSABLE)]
        for each in damaged:
            _skip(each.error)
        others = {each.path: self._other_owner(each, only_ours) for each in candidates if each not in damaged}
        saved = {each.path: each.saved for each in candidates if each.saved and not others[each.path]}
        changed = {path: self.identity.changed_variables(each) for path, each in saved.items()}
        if [] in changed.values():  # then files of other environments belong to other runs
            others |= {path: _in_words(names) for path, names in changed.items() if names}
        usable = [path for path, owner in others.items() if not owner]
        found = _newest_intact(usable)
        if found is not None:
            older = [path for path in usable[usable.index(found) :] if path in saved]
            self._obsolete = {path: state_of(path) for path in older if path == found or not changed[path]}
        elif damaged:
            found = damaged[0].path  # reading it raises the reason on every rank
        self._has_searched = True
        self._found = found
        notes = [self._none_found(trainer)] if found is None else [f"ckpt_path='last' is {found}"]
        if found is not None and changed.get(found):
            notes.append(f"it was saved by {_in_words(changed[found])}")
        notes += [f"{path} belongs to {owner}; {_PASS_PATH}" for path, owner in others.items() if owner]
        rank_zero_info("; ".join(notes))
        return found

    def _other_owner(self, candidate: _Candidate, only_ours: set[str]) -> str:
        assert self.identity is not None
        if candidate.saved is not None:
            return self.identity.other_owner(candidate.saved)
        is_unknown = candidate.path in only_ours and candidate.error is None
        return "an unknown run" if is_unknown else ""

    def _none_found(self, trainer: Any) -> str:
        """Describe where the next run of this command will look, and which files it will ignore."""
        parts = ["ckpt_path='last': no checkpoint yet"]
        if self._stop is not None:
            path = str(place_of(self._stop, _command(), trainer))
            parts.append(f"if the ranks are stopped, they save {path}, which the same command finds next time")
            of_commands = Path(trainer.default_root_dir, "checkpoints").resolve().glob(f"*/{os.path.basename(path)}")
            parts += [f"{each} belongs to another command; {_PASS_PATH}" for each in of_commands if str(each) != path]
        if follows_logger(trainer):
            found_only_there = f"only runs with the same directory find files in {checkpoint_directory(trainer)}"
            parts.append(f"{found_only_there}; set ModelCheckpoint(dirpath=...) to fix the directory")
        return "; ".join(parts)

    # The end of a run.

    def remove_obsolete(self, trainer: Any) -> None:
        """Remove the file that a finished fit resumed from, and its older ones, unless they changed.

        Otherwise the same command would resume from them every time. A fit that a callback stopped
        may be continued.
        """
        is_finished = trainer.state.status != TrainerStatus.INTERRUPTED and not trainer.should_stop
        if not is_finished or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        obsolete, self._obsolete = self._obsolete, {}
        for path, state in obsolete.items():
            if state and state_of(path) == state:
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
                Path(lock_of(path)).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Candidate:
    """A file that ``"last"`` may mean, and what it says about the fit that saved it."""

    path: str
    saved: Mapping[str, Any] | None = None
    error: CheckpointError | None = None


def _look_at(path: str) -> _Candidate:
    try:
        return _Candidate(path, _identity_in(path))
    except CheckpointError as error:
        return _Candidate(path, error=error)


def _identity_in(path: str) -> Mapping[str, Any] | None:
    """Return what a file says about the fit that saved it; ``None`` if it says nothing."""
    saved = entry_of(locate(path), KEY)
    is_known = isinstance(saved, dict) and saved.get("version") == _VERSION
    return saved if is_known else None


def _newest_intact(newest_first: list[str]) -> str | None:
    """Return the first of these files that is not damaged, with a warning about those that are.

    A file that cannot be read now may be intact, so no older file replaces it; reading it later
    raises the reason on every rank.
    """
    if len(newest_first) == 1:
        return newest_first[0]  # it is checked when it is read
    for path in newest_first:
        local = locate(path).local
        try:
            if local is not None:  # a remote store only shows complete files
                Archive.open(local, path).check()
        except _UNUSABLE as error:
            _skip(error)
        except CheckpointError:
            return path
        else:
            return path
    return None


def _skip(error: CheckpointError | None) -> None:
    rank_zero_warn(f"ckpt_path='last' skips a file that cannot be used: {error}")


def _in_words(variables: list[str]) -> str:
    return f"a run with other values of {listed(variables)}"


# What identifies a fit.


def _command() -> str:
    """Return a name for the running command, the same with and without its option to resume."""
    script, *options = sys.argv or [""]
    words = [os.path.realpath(script), *(word for word in options if not _asks_to_resume(word))]
    words += [os.environ.get(each, "") for each in _TASKS]
    return f"{Path(script).stem}-{_hashed(words)}"


def _asks_to_resume(word: Any) -> bool:
    return word == "last" or "ckpt_path" in str(word)


def _hparams(args: tuple[Any, ...]) -> dict[str, str]:
    """Return the hashed hyperparameters of the model and the data module among a call's arguments."""
    found: dict[str, str] = {}
    for each in args:
        if isinstance(each, (pl.LightningModule, pl.LightningDataModule)):
            name = type(each).__qualname__
            found[name] = ""
            found |= {
                f"{name}.{key}": _hashed(_plain(value))
                for key, value in dict(each.hparams).items()
                if not _asks_to_resume(key) and not _asks_to_resume(value)
            }
    return found


def _plain(value: Any) -> Any:
    """Return a value whose text is the same in each run of a command."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if type(value) is dict:
        return [(str(name), _plain(each)) for name, each in value.items()]
    return type(value).__qualname__


def _environment() -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if not _NOT_COMPARED.fullmatch(name)}
    return {name: _hashed([name, value]) for name, value in variables.items()}


def _hashed(value: Any) -> str:
    return hashlib.sha256(repr(value).encode(errors="surrogateescape")).hexdigest()[:8]
