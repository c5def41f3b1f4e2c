"""Identify the fit that saves a stop checkpoint.

The file contains the :class:`FitIdentity` of the run that saved it. A later run compares
it with its own, and gets a :class:`SavingRun`, which tells whether the file is its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.structure import entry_of
from lightning_ddp_ext.rank_lists import listed

from ..private.lightning_tree import pl
from ..start.slurm import job_id

KEY = "lightning_ddp_ext_run"  # of the entry in a checkpoint
# The number of each fit in a hook of another run.
IN_A_HOOK = 0
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
_OF_SHELLS = (
    r"_|SHLVL|(OLD)?PWD|HOSTNAME|DISPLAY|TERM|TMP(DIR)?|TEMP|TMUX|STY|WINDOWID|INVOCATION_ID"
    r"|JOURNAL_STREAM|SYSTEMD_EXEC_PID|JOB_ID|LS_JOBPID"
)
_OF_PROGRAMS = (
    r"(COV|DBUS|DDPX|GNOME_TERMINAL|HYDRA|JPY|KMP|KUBERNETES|LSB|MASTER|MPI|OMPI|PALS|PBS|PL|PMI"
    r"|PMIX|PRTE|PYTEST|SGE|SLURM|SLURMD|SSH|TERM|TMUX|TORCHELASTIC|VSCODE|XDG)_\w+"
)
_OF_RANKS = r"(\w+_)?(RANK|WORLD_SIZE)|\w+_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
# Kubernetes sets variables such as REDIS_PORT_6379_TCP and REDIS_SERVICE_HOST.
_OF_SERVICES = r"\w+_(PORT|SERVICE_HOST)(_\w+)?"
_NOT_COMPARED = re.compile("|".join([_OF_SHELLS, _OF_PROGRAMS, _OF_RANKS, _OF_SERVICES]))
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class SavingRun:
    """The run that saved a file, compared with this run.

    Attributes:
        other_fit: how its fit differs from this one; empty for the same fit.
        changed_variables: the environment variables that it lacked or had differently.
        job: the number of its SLURM job; empty outside of SLURM.
        own_job: the number of this run's SLURM job.
        is_requeued: whether it was stopped so that SLURM requeues its job.
    """

    other_fit: str
    changed_variables: list[str]
    job: str
    own_job: str
    is_requeued: bool

    @property
    def is_of_this_job(self) -> bool:
        """Whether it belongs to this SLURM job, possibly before a requeue."""
        return bool(self.own_job) and self.job == self.own_job

    @property
    def other_job(self) -> str:
        """The number of the other SLURM job that it belongs to.

        Empty if one of the runs is outside of SLURM, or both are of the same job.
        """
        return self.job if self.own_job and not self.is_of_this_job else ""

    @property
    def is_this_run(self) -> bool:
        """Whether nothing differs, so that this run may replace the file."""
        return not (self.other_fit or self.other_job or self.changed_variables)

    @property
    def is_continued_by_requeue(self) -> bool:
        """Whether SLURM has requeued this job to continue the run."""
        return self.is_requeued and self.is_of_this_job and not self.other_fit


@dataclass(frozen=True)
class FitIdentity:
    """The identity of a fit, which its stop checkpoints contain.

    Words and values are hashed, because they may be secrets. Before the first fit it is
    empty.

    Attributes:
        facts: what has to be the same in a resumed run, by name.
        environment: the values of the environment variables, by name.
        job: the number of the SLURM job; empty outside of SLURM.
        is_in_a_hook: whether the fit runs in a hook of another run. No run resumes such a
            fit.
    """

    facts: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    job: str = ""
    is_in_a_hook: bool = True

    def to_entry(self, *, is_requeued: bool = False) -> dict[str, Any]:
        """Return the entry of a checkpoint that :meth:`saving_run` reads."""
        return {
            "facts": self.facts,
            "environment": sorted(self.environment.values()),
            "job": self.job,
            "is_requeued": is_requeued,
        }

    def saving_run(self, path: str) -> SavingRun | None:
        """Compare this run with the one that saved a file; ``None`` if it is unknown.

        Raises:
            CheckpointError: the file cannot be read.
        """
        saved = entry_of(locate(path), KEY)
        if not isinstance(saved, dict) or not {"facts", "environment"} <= saved.keys():
            return None
        return SavingRun(
            other_fit=self._difference(saved),
            changed_variables=self._changed_variables(saved),
            job=saved.get("job") or "",
            own_job=self.job,
            is_requeued=bool(saved.get("is_requeued")),
        )

    def _difference(self, saved: Mapping[str, Any]) -> str:
        """Describe a fit that differs from this one; empty for the same fit."""
        own = self.facts
        others = saved["facts"]
        changed = [fact for fact in {**own, **others} if own.get(fact) != others.get(fact)]
        if not changed and self.is_in_a_hook:
            return "a fit in a hook"
        return f"a fit with another {listed(changed)}" if changed else ""

    def _changed_variables(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the variables whose values were not saved.

        Of a variable that only the saving run had, the name is not known.
        """
        before = set(saved["environment"])
        changed = [name for name, value in self.environment.items() if value not in before]
        if not changed and before.difference(self.environment.values()):
            return ["a variable that is not set now"]
        return sorted(changed)


def identify(args: tuple[Any, ...], number: int) -> FitIdentity:
    """Return the identity of a fit.

    Args:
        args: the arguments of the Trainer's function.
        number: the number of the fit in its script, or ``IN_A_HOOK``.
    """
    facts = {"command": command(), "number in its script": str(number), **_hparams(args)}
    return FitIdentity(facts, _environment(), job_id(), is_in_a_hook=number == IN_A_HOOK)


def command() -> str:
    """Return a name for the running command.

    It is the same with and without the command's option to resume.
    """
    script, *options = sys.argv or [""]
    words = [os.path.realpath(script), *(word for word in options if not _asks_to_resume(word))]
    words += [os.environ.get(variable, "") for variable in _TASKS]
    return f"{Path(script).stem}-{_hashed(words)}"


def _asks_to_resume(word: Any) -> bool:
    return word == "last" or "ckpt_path" in str(word)


def _hparams(args: tuple[Any, ...]) -> dict[str, str]:
    """Return the hashed hyperparameters of the model and data module in a call.

    They are found among the call's arguments.
    """
    hashes: dict[str, str] = {}
    for owner in args:
        if not isinstance(owner, (pl.LightningModule, pl.LightningDataModule)):
            continue
        name = "module" if isinstance(owner, pl.LightningModule) else "datamodule"
        hparams = owner.hparams if isinstance(owner.hparams, dict) else {"hparams": owner.hparams}
        for key, value in hparams.items():
            if not _asks_to_resume(key):
                hashes[f"{name}.{key}"] = _hashed(value)
    return hashes


def _environment() -> dict[str, str]:
    """Return the hashed variables that are the same in each run of a command."""
    return {
        name: _hashed([name, value])
        for name, value in os.environ.items()
        if not _NOT_COMPARED.fullmatch(name)
    }


def _hashed(value: Any) -> str:
    """Return a hash of a value's text without addresses.

    It is the same in each run of a command.
    """
    try:
        text = _text_of(value)
    except Exception:  # a configuration may lack mandatory values
        text = type(value).__qualname__
    return hashlib.sha256(_ADDRESS.sub("", text).encode(errors="surrogateescape")).hexdigest()[:8]


def _text_of(value: Any) -> str:
    """Return the text of a value in which sets are sorted, also inside collections."""
    if isinstance(value, (set, frozenset)):
        return f"{sorted(map(_text_of, value))}"
    if isinstance(value, (list, tuple)):
        return f"{list(map(_text_of, value))}"
    if isinstance(value, dict):
        return f"{[(_text_of(key), _text_of(part)) for key, part in value.items()]}"
    return repr(value)
