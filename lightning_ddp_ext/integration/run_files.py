"""Find the file that ``ckpt_path="last"`` means, and recognise stop and rescue
checkpoints by their content.

These checkpoints state who saved them, so that only the same fit of the same command
finds them. A launcher needs the file before the ranks connect, so each rank searches
its own disk, and later all ranks restore the file that rank 0 found.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.checkpoint.location import PathLike, locate
from lightning_ddp_ext.checkpoint.rank_notes import lock_of
from lightning_ddp_ext.checkpoint.structure import entry_of
from lightning_ddp_ext.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.run import current_run

from .checkpoint_paths import (
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
from .slurm import job_number

KEY = "lightning_ddp_ext_run"
_UNUSABLE = (DamagedCheckpointError, CheckpointNotFoundError)
_PASS_PATH = "pass its path to resume from it"
# Environment variables that number the tasks of a job array.
_TASKS = (
    "SLURM_ARRAY_TASK_ID",
    "PBS_ARRAY_INDEX",
    "LSB_JOBINDEX",
    "SGE_TASK_ID",
    "JOB_COMPLETION_INDEX",
)
# Other variables that launchers, schedulers, shells and Lightning set, possibly
# differently in each run of the same command. They are not compared.
_NOT_COMPARED = re.compile(
    r"_|SHLVL|(OLD)?PWD|HOSTNAME|DISPLAY|TERM|TMPDIR|TMUX|STY|WINDOWID|INVOCATION_ID|JOURNAL_STREAM"
    r"|CUDA_VISIBLE_DEVICES|(\w+_)?(RANK|WORLD_SIZE)|\w+_(PORT|SERVICE_HOST)(_\w+)?"
    r"|(COV|DBUS|DDPX|HYDRA|JPY|KMP|KUBERNETES|LSB|MASTER|MPI|OMPI|PALS|PBS|PL|PMI|PMIX|PRTE|PYTEST"
    r"|SGE|SLURM|SLURMD|SSH|TERM|TMUX|TORCHELASTIC|VSCODE|XDG)_\w+"
)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

_OF_REQUEUED_JOB = (  # Lightning also saves a file for it, whatever the settings
    "last-preempted.ckpt"
)
_fits = 0  # the number of fits that this process has begun, without those that a signal stopped


class RunFiles:
    """The stop and rescue checkpoints of a strategy's Trainer.

    Args:
        stop: the name or path of the stop checkpoint; ``None`` if none is saved.
        rescue: the name or path of the rescue checkpoint; ``None`` if none is saved.

    Attributes:
        stop_name: the argument ``stop``.
        requeue_name: the name or path of the file from which a requeued SLURM job
            continues.
        identity: what the Trainer's files state about the fit that saves them: facts
            that have to be the same in a resumed run, and the environment. Words and
            values are hashed, because they may be secrets.
        stop_path: the path at which the ranks save the stop checkpoint, after a stop.
    """

    def __init__(self, stop: PathLike | None, rescue: PathLike | None) -> None:
        self.stop_name = stop
        self.requeue_name: PathLike = _OF_REQUEUED_JOB if stop is None else stop
        self._names = [name for name in (stop, rescue) if name is not None]
        self._fit = 0  # for a fit in a hook of another run
        self._environment: dict[str, str] = {}
        self.identity: dict[str, Any] = {}
        self.stop_path: str | None = None
        self._has_searched = False
        self._found: str | None = None
        self._obsolete: dict[
            str, str
        ] = {}  # own files not newer than the one found, and their states

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

    def place(self, name: PathLike | None, trainer: Any) -> str | None:
        """Return the path at which a file is saved, so that it replaces no file of
        another fit.

        A SLURM job's number is part of it, because jobs that SLURM stops together may
        share a directory.
        """
        path = place_of(name, _command(), trainer)
        if path is None:
            return None
        path = versioned(path, int(os.environ.get("SLURM_JOB_ID", 0)))
        return next(
            each
            for each in (versioned(path, number) for number in count())
            if self._may_replace(each)
        )

    def _may_replace(self, path: str) -> bool:
        time = modified(path)
        if path == self._found or time is None:
            return True
        try:
            saved = _identity_in(path)
        except CheckpointError as error:
            # In a store that cannot be reached, no name is known to be free.
            return isinstance(error, _UNUSABLE) or math.isinf(time)
        if saved is None:
            return True
        return not (
            self._difference(saved)
            or self._is_of_other_job(saved)
            or self._changed_variables(saved)
        )

    def _difference(self, saved: Mapping[str, Any]) -> str:
        """Describe how the fit that saved a file differs from this one; empty for the
        same fit.
        """
        own = self.identity["facts"]
        others = saved["facts"]
        changed = [each for each in {**own, **others} if own.get(each) != others.get(each)]
        if not changed and not self._fit:
            return "a fit in a hook"
        return f"a fit with another {listed(changed)}" if changed else ""

    def _changed_variables(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of environment variables that the saving run lacked or had
        differently.
        """
        before = set(saved["environment"])
        changed = [name for name, value in self._environment.items() if value not in before]
        if not changed and before.difference(self._environment.values()):
            return ["a variable that is not set now"]
        return sorted(changed)

    # Resuming.

    def resolve_last(
        self, args: tuple[Any, ...], trainer: Any, *, is_rank_zero: bool
    ) -> tuple[Any, ...]:
        """Replace ``ckpt_path="last"`` among the arguments of a Trainer's function by a
        path.
        """
        if trainer is None:
            return args
        self._environment = _environment()
        facts = {"command": _command(), "number in its script": str(self._fit), **_hparams(args)}
        variables = sorted(self._environment.values())
        self.identity = {
            "facts": facts,
            "environment": variables,
            "job": job_number(),
            "is_requeued": False,
        }
        self._has_searched = False
        self._found = None
        self._obsolete = {}
        if "last" not in [arg for arg in args if isinstance(arg, str)]:
            has_path = any(isinstance(arg, PathLike) for arg in args)
            if (
                is_rank_zero
                and not has_path
                and trainer.state.fn == "fit"
                and SLURMEnvironment.detect()
            ):
                self._find_requeued(trainer)
            return args
        own = {
            each
            for name in self._names
            for each in versions_of(place_of(name, _command(), trainer))
        }
        of_lightning = last_of_lightning(trainer)
        times = {path: modified(path) for path in own | of_lightning}
        existing = {path: time for path, time in times.items() if time is not None}
        newest_first = sorted(existing, key=existing.__getitem__, reverse=True)
        found = next(iter(newest_first), None)
        if is_rank_zero:
            # rank_zero_info does not know a started rank's number yet, so all ranks
            # would log.
            self._has_searched = True
            found = self._found = self._search(newest_first, own - of_lightning, trainer)
        if found is None and not (self._hides_hint(trainer) and of_lightning.isdisjoint(existing)):
            return args
        return tuple(found if isinstance(arg, str) and arg == "last" else arg for arg in args)

    def _hides_hint(self, trainer: Any) -> bool:
        """Whether ``None`` in place of ``"last"`` starts the same run, without a hint
        that repeats our line.
        """
        is_used = any(
            isinstance(each, pl.callbacks.OnExceptionCheckpoint)
            for each in trainer.checkpoint_callbacks
        )
        return trainer.state.fn == "fit" and self.stop_name is not None and not is_used

    def chosen(self, path: PathLike | None) -> PathLike | None:
        """Return the file that rank 0 restores, given the one that Lightning chose.

        If no file is found for ``"last"``, Lightning may choose a file that belongs to
        another fit.
        """
        return self._found if self._has_searched else path

    def _find_requeued(self, trainer: Any) -> None:
        """Find the file that this job saved before it was requeued; as with stock, no
        argument has to ask for it.
        """
        rank_zero_info(
            "after SIGTERM, a requeued job only resumes with trainer.fit(..., ckpt_path='last')"
        )
        versions = versions_of(place_of(self.requeue_name, _command(), trainer))
        for path, saved in _readable(
            [each for each in versions if modified(each) is not None]
        ).items():
            if (
                saved
                and saved.get("is_requeued")
                and self._is_of_job(saved)
                and not self._difference(saved)
            ):
                self._has_searched = True
                self._found = path
                self._obsolete = {path: state_of(path)}

    def _is_of_job(self, saved: Mapping[str, Any]) -> bool:
        """Whether this job saved the file, possibly before it was requeued."""
        return bool(self.identity["job"]) and saved.get("job") == self.identity["job"]

    def _is_of_other_job(self, saved: Mapping[str, Any]) -> bool:
        return bool(self.identity["job"] and saved.get("job")) and not self._is_of_job(saved)

    def _search(self, newest_first: list[str], only_ours: set[str], trainer: Any) -> str | None:
        """Return the newest usable file, and log it and the owners of the others."""
        saved = _readable(newest_first)
        unknown = {
            path: "an unknown fit"
            for path, each in saved.items()
            if each is None and path in only_ours
        }
        owners = {
            path: self._difference(each) if each else "" for path, each in saved.items()
        } | unknown
        own = {path: each for path, each in saved.items() if each and not owners[path]}
        if any(map(self._is_of_job, own.values())):
            owners |= {
                path: f"SLURM job {each['job']}"
                for path, each in own.items()
                if self._is_of_other_job(each)
            }
        changed = {path: self._changed_variables(each) for path, each in own.items()}
        if [] in changed.values():  # then files of other environments belong to other runs
            owners |= {path: _in_words(names) for path, names in changed.items() if names}
        usable = [path for path, owner in owners.items() if not owner]
        found = _newest_intact(usable)
        if found is None:  # reading a damaged file raises the reason on every rank
            found = next((path for path in newest_first if path not in saved), None)
        else:
            not_newer = usable[usable.index(found) :]
            self._obsolete = {path: state_of(path) for path in not_newer if path in own}
        line = f"ckpt_path='last' is {found}" if found else self._none_found(trainer)
        others = [
            f"{path} belongs to {owner}; {_PASS_PATH}" for path, owner in owners.items() if owner
        ]
        if found and changed.get(found):
            self._obsolete = {}  # the other run may still need them
            remedy = "if that was another run, move the file away and start again"
            rank_zero_warn(f"{line}, saved by {_in_words(changed[found])}; {remedy}")
        else:
            rank_zero_info("; ".join([line, *others]))
        return found

    def _none_found(self, trainer: Any) -> str:
        """Describe where the next run of this command will look, and which files it
        will ignore.
        """
        parts = ["ckpt_path='last': no checkpoint yet"]
        if self.stop_name is not None:
            path = str(self.place(self.stop_name, trainer))
            parts.append(
                f"if the ranks are stopped, they save {path}, which the same command finds next"
                " time"
            )
            of_commands = (
                Path(trainer.default_root_dir, "checkpoints")
                .resolve()
                .glob(f"*/{os.path.basename(path)}")
            )
            parts += [
                f"{each} belongs to another command; {_PASS_PATH}"
                for each in of_commands
                if str(each) != path
            ]
        if follows_logger(trainer):
            found_only_there = (
                f"only runs with the same directory find files in {checkpoint_directory(trainer)}"
            )
            parts.append(
                f"{found_only_there}; set ModelCheckpoint(dirpath=...) to fix the directory"
            )
        return "; ".join(parts)

    def remove_obsolete(self, trainer: Any) -> None:
        """Remove the file that a finished fit resumed from, and its older ones, unless
        they changed.

        Otherwise the same command would resume from them every time. A fit that a
        callback stopped may be continued.
        """
        if trainer is None:
            return  # in a process that starts ranks
        is_finished = trainer.state.status != TrainerStatus.INTERRUPTED and not trainer.should_stop
        if not is_finished or trainer.state.fn != "fit" or not trainer.is_global_zero:
            return
        obsolete = self._obsolete
        self._obsolete = {}
        for path, state in obsolete.items():
            if state and state_of(path) == state:
                trainer.strategy.checkpoint_io.remove_checkpoint(path)
                Path(lock_of(path)).unlink(missing_ok=True)


def _readable(newest_first: list[str]) -> dict[str, Mapping[str, Any] | None]:
    """Return what files state about the fits that saved them, or ``None``; warn about
    damaged ones.

    A file that cannot be read now may be intact. It gets an empty value; reading it
    later raises the reason on every rank.
    """
    found: dict[str, Mapping[str, Any] | None] = {}
    for path in newest_first:
        try:
            found[path] = _identity_in(path)
        except _UNUSABLE as error:
            _skip(error)
        except CheckpointError:
            found[path] = {}
    return found


def _identity_in(path: str) -> Mapping[str, Any] | None:
    saved = entry_of(locate(path), KEY)
    return saved if isinstance(saved, dict) and {"facts", "environment"} <= saved.keys() else None


def _newest_intact(newest_first: list[str]) -> str | None:
    """Return the first of these files that is not damaged, with a warning about those
    that are.

    A file that cannot be read now may be intact, so no older file replaces it; reading
    it later raises the reason on every rank.
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


def _skip(error: CheckpointError) -> None:
    rank_zero_warn(f"ckpt_path='last' skips a file that cannot be used: {error}")


def _in_words(variables: list[str]) -> str:
    return f"a run with other values of {listed(variables)}"


# What identifies a fit.


def _command() -> str:
    """Return a name for the running command, the same with and without its option to
    resume.
    """
    script, *options = sys.argv or [""]
    words = [os.path.realpath(script), *(word for word in options if not _asks_to_resume(word))]
    words += [os.environ.get(each, "") for each in _TASKS]
    return f"{Path(script).stem}-{_hashed(words)}"


def _asks_to_resume(word: Any) -> bool:
    return word == "last" or "ckpt_path" in str(word)


def _hparams(args: tuple[Any, ...]) -> dict[str, str]:
    """Return the hashed hyperparameters of the model and the data module among a call's
    arguments.
    """
    found: dict[str, str] = {}
    for each in args:
        if isinstance(each, (pl.LightningModule, pl.LightningDataModule)):
            name = "module" if isinstance(each, pl.LightningModule) else "datamodule"
            hparams = each.hparams if isinstance(each.hparams, dict) else {"hparams": each.hparams}
            found |= {
                f"{name}.{key}": _hashed(value)
                for key, value in hparams.items()
                if not _asks_to_resume(key)
            }
    return found


def _environment() -> dict[str, str]:
    variables = {
        name: value for name, value in os.environ.items() if not _NOT_COMPARED.fullmatch(name)
    }
    return {name: _hashed([name, value]) for name, value in variables.items()}


def _hashed(value: Any) -> str:
    """Return a hash of a value's text, without addresses, so that it is the same in
    each run of a command.
    """
    try:
        text = repr(sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value)
    except Exception:  # a configuration may lack mandatory values
        text = type(value).__qualname__
    return hashlib.sha256(_ADDRESS.sub("", text).encode(errors="surrogateescape")).hexdigest()[:8]
