"""Find a Trainer's checkpoints: their directories, the stop checkpoint, and the file that "last" refers to.

A launcher needs them before ``ModelCheckpoint`` chooses its directory and before the ranks connect, so each rank
searches its own disk, and later all ranks restore the file that rank 0 found.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.checkpoint.location import PathLike, locate
from lightning_ddp_ext.errors import CheckpointError, CheckpointNotFoundError, DamagedCheckpointError

from .lightning_tree import SLURMEnvironment, pl, rank_zero_info, rank_zero_warn, refuse_missing

# Both methods also work before the callback's setup.
refuse_missing(pl.callbacks.ModelCheckpoint, "_find_last_checkpoints", "_ModelCheckpoint__resolve_ckpt_dir")


def checkpoint_directory(trainer: Any) -> str:
    """Return the directory of the Trainer's first checkpoint callback, or the default root directory."""
    callback = trainer.checkpoint_callback
    if isinstance(callback, pl.callbacks.ModelCheckpoint):
        return str(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
    return str(getattr(callback, "dirpath", None) or trainer.default_root_dir)


def place_of(name: PathLike | None, trainer: Any) -> str | None:
    """Return a path for a checkpoint that no callback saves, at which the same command finds it again.

    A path is kept; a file name is placed next to the other checkpoints. If a logger chooses the directory of these,
    possibly a new one in each run, the file is placed in this command's directory under the default root directory.
    """
    path = None if name is None else os.fspath(name)
    if path is None or os.path.dirname(path):
        return path
    by_command = os.path.join(trainer.default_root_dir, "checkpoints", _command())
    return os.path.join(by_command if _follows_logger(trainer) else checkpoint_directory(trainer), path)


def _follows_logger(trainer: Any) -> bool:
    """Whether Lightning takes the checkpoint directory from a logger, or did so in an earlier run."""
    callback = trainer.checkpoint_callback
    if not trainer.loggers or not isinstance(callback, pl.callbacks.ModelCheckpoint):
        return False
    without = copy.copy(callback)
    without.dirpath = None
    return callback.dirpath in (None, without._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]


def _command() -> str:
    """Return a name for the running command, the same with and without its option to resume."""
    script, *options = sys.argv or [""]
    words = [os.path.abspath(script), *(word for word in options if word != "last" and "ckpt_path" not in word)]
    words.append(os.environ.get("SLURM_ARRAY_TASK_ID", ""))
    return f"{Path(script).stem}-{hashlib.sha256(repr(words).encode()).hexdigest()[:8]}"


def with_last_checkpoint(args: tuple[Any, ...], trainer: Any, *, is_rank_zero: bool) -> tuple[Any, ...]:
    """Replace ``ckpt_path="last"`` among the arguments of a Trainer's function by a path.

    If no intact file is found, the arguments stay unchanged: Lightning then warns, or reading raises the reason.
    """
    if trainer is None:
        return args
    strategy = trainer.strategy
    strategy.stops.resumed_from = None
    if "last" not in [arg for arg in args if isinstance(arg, str)]:
        if is_rank_zero and SLURMEnvironment.detect() and trainer.state.fn == "fit":
            rank_zero_info("after SIGTERM, a requeued job only resumes with trainer.fit(..., ckpt_path='last')")
        return args
    stop_checkpoint = place_of(strategy.stop_checkpoint, trainer)
    candidates = _candidates(trainer, stop_checkpoint)
    newest_first = sorted(candidates, key=candidates.__getitem__, reverse=True)
    found = _newest_intact(newest_first) if is_rank_zero else next(iter(newest_first), None)
    if is_rank_zero:  # rank_zero_info does not know a started rank's number yet, so all ranks would log
        rank_zero_info(f"ckpt_path='last' is {found}" if found else _none_found(trainer, stop_checkpoint))
    if found is None:
        return args
    if found == stop_checkpoint:
        strategy.stops.resumed_from = found
    return tuple(found if isinstance(arg, str) and arg == "last" else arg for arg in args)


def _none_found(trainer: Any, stop_checkpoint: str | None) -> str:
    """Describe where the next run of this command will look, and which files it will ignore."""
    parts = ["ckpt_path='last': no checkpoint yet"]
    if stop_checkpoint is not None:
        parts.append(f"if the ranks are stopped, they save {stop_checkpoint}, which the same command finds next time")
        name = os.path.basename(stop_checkpoint)
        others = map(str, Path(trainer.default_root_dir, "checkpoints").glob(f"*/{name}"))
        parts += [f"{other} belongs to another command; pass its path to resume from it" for other in others]
    if _follows_logger(trainer):
        found_only_there = f"only runs with the same directory find files in {checkpoint_directory(trainer)}"
        parts.append(f"{found_only_there}; set ModelCheckpoint(dirpath=...) to fix the directory")
    return "; ".join(parts)


def _candidates(trainer: Any, stop_checkpoint: str | None) -> dict[str, float]:
    """Return the last checkpoints, and those saved at a stop or a failure, with their modification times."""
    callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]
    found: set[str | None] = {path for callback in callbacks for path in callback._find_last_checkpoints(trainer)}
    found |= {getattr(callback, "ckpt_path", None) for callback in trainer.callbacks}  # OnExceptionCheckpoint has one
    found |= {stop_checkpoint, place_of(trainer.strategy.rescue.name, trainer)}
    if SLURMEnvironment.detect():
        found.add(trainer._checkpoint_connector._hpc_resume_path)
    times = {path: modified(path) for path in found if path}
    return {path: when for path, when in times.items() if when is not None}


def _newest_intact(newest_first: list[str]) -> str | None:
    """Return the first of these files that is not damaged. Only rank 0 calls this, and warns about damaged files.

    A file that cannot be read now may be intact, so no older file replaces it; reading it later raises the reason on
    every rank.
    """
    if len(newest_first) == 1:
        return newest_first[0]  # the only candidate is checked when it is read
    for path in newest_first:
        local = locate(path).local
        try:
            if local is not None:  # a remote store only shows complete files
                Archive.open(local, path).check()
        except (DamagedCheckpointError, CheckpointNotFoundError) as error:
            rank_zero_warn(f"ckpt_path='last' skips a file that cannot be used: {error}")
        except CheckpointError:
            return path
        else:
            return path
    return None


def modified(path: str) -> float | None:
    """Return a file's modification time; ``None`` if the file does not exist, infinity if the time is unknown."""
    location = locate(path)
    try:
        if location.local is not None:
            return location.local.stat().st_mtime
        return float(location.fs.modified(location.path).timestamp())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, NotImplementedError):
        return float("inf")
