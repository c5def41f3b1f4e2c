"""Restore the state after the last finished optimiser step, on a surviving rank.

The state of the loops is changed as if all ranks had stopped after that step, and the
values that may have changed since are restored from what this host's ranks recorded.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.rank_records import Kind, RankRecords
from lightning_ddp_ext.checkpoint.saved_parameters import SavedParameters
from lightning_ddp_ext.data.random_state import mix, random_state_in, record_random_state, seeded

from ..data.loop_state import Restart, Stopped, complete_batch, find_restart
from ..data.resume import Resume
from ..private.compat import dump_checkpoint, fetcher_of, is_read_in_step, validates_next
from ..private.lightning_tree import pl
from .recorder import RecordedRun

# The last kind of record whose random states a restart may use, by its ``at``; at the
# start or end of an epoch, this is ``VALIDATED``.
_LATEST_KIND = {"batch_end": Kind.WINDOW, "validation": Kind.BATCH}


class Refused(Exception):
    """Raised with the reason why nothing is saved."""


@dataclass(frozen=True)
class LastStep:
    """The point after the last finished step.

    Attributes:
        loops: the state of the loops at this point.
        stopped: where all ranks would have stopped.
        restart: where training continues.
        batches: the number of batches that were trained on.
    """

    loops: dict[str, Any]
    stopped: Stopped | None
    restart: Restart
    batches: int


@dataclass(frozen=True)
class RankStates:
    """The data positions and random states of all ranks.

    Attributes:
        states: the states, by rank.
        derived: the ranks whose random states are derived from the seed.
    """

    states: list[dict[str, Any]]
    derived: list[int]


def find_last_step(trainer: Any, recorded: RecordedRun) -> LastStep:
    """Find the point after the last finished step, without changing the Trainer."""
    loops = copy.deepcopy(trainer.fit_loop.state_dict())
    batch = loops["epoch_loop.batch_progress"]
    validated = recorded.own.find(batch["total"]["ready"], Kind.VALIDATED)
    stopped = complete_batch(
        loops,
        accumulated=trainer.accumulate_grad_batches,
        stepped=recorded.stepped,
        validates=validates_next(trainer),
        has_validated=validated is not None,
    )
    restart = find_restart(
        loops,
        accumulated=trainer.accumulate_grad_batches,
        stopped=stopped,
        has_ended=fetcher_of(trainer.fit_loop).done,
    )
    batches = batch["total"]["processed"] - restart.dropped_of(batch["current"]["processed"])
    return LastStep(loops, stopped, restart, batches)


def checkpoint_of(step: LastStep, trainer: Any, recorded: RecordedRun) -> dict[str, Any]:
    """Restore the recorded values, and return the Trainer's checkpoint after the step.

    Raises:
        Refused: another saved value may have changed.
    """
    _restore_parameters(trainer, recorded.parameters)
    _restore_buffers(step.batches, recorded)
    checkpoint = dump_checkpoint(trainer)
    checkpoint["loops"]["fit_loop"] = step.loops
    states = checkpoint["callbacks"]
    for callback in trainer.checkpoint_callbacks:
        is_stock = isinstance(callback, pl.callbacks.ModelCheckpoint)
        if is_stock and callback.state_key in states:
            _forget_missing_files(states[callback.state_key], callback.mode)
    return checkpoint


def _restore_parameters(trainer: Any, parameters: SavedParameters) -> None:
    is_step_lost = parameters.is_in_step and trainer.lightning_module.automatic_optimization
    if is_step_lost and parameters.changes_outside_optimiser and is_read_in_step(trainer.fit_loop):
        raise Refused(
            "parameters may have changed before the step fetched its batch (dataloader_iter)"
        )
    lost = parameters.find_lost(in_step=is_step_lost)
    if lost is not None:
        raise Refused(
            f"{lost} may have changed since the last step, and its earlier value is not recorded"
        )
    if is_step_lost:
        parameters.undo_step()


def _restore_buffers(batches: int, recorded: RecordedRun) -> None:
    """Restore the recorded buffers, if no value that is not recorded has changed."""
    changed = recorded.fixed.find_changed()
    if changed is not None:
        raise Refused(
            f"{changed} has changed since the start, and its value after the last step is not"
            " recorded: it is too large a buffer, or neither a parameter nor a buffer"
        )
    content = recorded.buffer_records.find(batches, Kind.BUFFERS) or b""
    if not recorded.buffers.restore(content):
        raise Refused("the buffers of this step are not recorded")


def states_of_ranks(
    step: LastStep, trainer: Any, recorded: RecordedRun, resume: Resume
) -> RankStates:
    """Return the data positions and random states of all ranks after the step.

    The random states of ranks without records are derived from the seed.
    """
    own = resume.state_at(step.restart, None)
    states = []
    derived = []
    for rank in range(trainer.world_size):
        random = _random_states(step, recorded.records.get(rank))
        if random is None:
            derived.append(rank)
            with seeded(mix(resume.known_seed or 0, rank, step.restart.epoch, step.batches)):
                random = record_random_state()
        states.append({**own, "rank": rank, "random": random})
    return RankStates(states, derived)


def _random_states(step: LastStep, records: RankRecords | None) -> Any:
    """Return a rank's recorded random states after the step; ``None`` if there are none."""
    if records is None:
        return None
    restart = step.restart
    random = records.find(step.batches, Kind.EPOCH) if restart.has_started else None
    if random is None:
        latest = _LATEST_KIND.get(restart.at, Kind.VALIDATED)
        random = records.find(step.batches, *Kind.up_to(latest))
    return None if random is None else random_state_in(random)


def _forget_missing_files(state: dict[str, Any], mode: str) -> None:
    """Drop missing files from a ``ModelCheckpoint``'s state.

    Rank 0 may have been writing such a file when it died.
    """
    scores = state.get("best_k_models", {})
    existing = {path: score for path, score in scores.items() if not _is_missing(path)}
    if len(existing) < len(scores):
        # The callback finds the worst file once it has `save_top_k` of them.
        best_of = min if mode == "min" else max
        best = best_of(existing, key=existing.__getitem__, default="")
        state["best_k_models"] = existing
        state["best_model_path"] = best
        state["best_model_score"] = existing.get(best)
    for name in ("best_model_path", "last_model_path"):
        if _is_missing(state.get(name, "")):
            state[name] = ""


def _is_missing(path: str) -> bool:
    return Path(path).parent.is_dir() and not Path(path).exists()
