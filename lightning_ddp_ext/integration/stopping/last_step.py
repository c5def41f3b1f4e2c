"""Restore the state after the last finished optimiser step, on a surviving rank.

The state of the loops is changed as if all ranks had stopped after that step, and the
values that may have changed since are restored from what this host's ranks recorded.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.rank_records import Kind, RankRecords
from lightning_ddp_ext.checkpoint.saved_parameters import SavedParameters
from lightning_ddp_ext.data.random_state import random_state_in, record_random_state
from lightning_ddp_ext.data.seeding import mix, seeded

from ..data.loop_state import Restart, Stopped, complete_batch, find_restart
from ..data.positions import positions_of
from ..data.saved_epoch import shared_state, without_random_state
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
    step: LastStep,
    trainer: Any,
    recorded: RecordedRun,
    *,
    seed: int | None,
    has_seeded_validation: bool,
) -> RankStates:
    """Return the data positions and random states of all ranks after the step.

    Args:
        step: the last finished step.
        trainer: the Trainer.
        recorded: what this host's ranks recorded.
        seed: the user's seed, if known, from which the random states of ranks without
            records are derived.
        has_seeded_validation: whether workers for validation persist and were seeded.

    Raises:
        Refused: the positions of the other ranks' loaders are not recorded.
    """
    restart = step.restart
    positions = positions_of(trainer) if restart.is_within else []
    if any(position.kind == "state" for position in positions):
        raise Refused("the training loaders have states that only their own ranks can save")
    # When the random states were recorded, the loaders had not given these batches.
    batches_of_next_step = trainer.fit_loop.epoch_loop.batch_progress.current.ready - restart.done
    loaders = [
        each.state_dict(restart.done, each.batches_given - batches_of_next_step)
        for each in positions
    ]
    own = {"loaders": loaders, "has_seeded_validation": has_seeded_validation}
    states = []
    derived = []
    for rank in range(trainer.world_size):
        known = without_random_state(own) if rank == trainer.global_rank else shared_state(own)
        state = _with_random_states(known, step, recorded.records.get(rank))
        if state is None and any(position.is_by_rank for position in positions):
            raise Refused(
                f"the order in which rank {rank} reads its samples is not recorded on this host"
            )
        if state is None:
            derived.append(rank)
            with seeded(mix(seed or 0, rank, restart.epoch, step.batches)):
                state = {**shared_state(own), "random": record_random_state()}
        states.append(state)
    return RankStates(states, derived)


def _with_random_states(
    known: dict[str, Any], step: LastStep, records: RankRecords | None
) -> dict[str, Any] | None:
    """Return a rank's state with its recorded random states; ``None`` if one is missing.

    Args:
        known: the rest of the rank's state.
        step: the step after which the rank continues.
        records: the rank's records; ``None`` on another host.
    """
    if records is None:
        return None
    restart = step.restart
    random = records.find(step.batches, Kind.EPOCH) if restart.has_started else None
    # A rank that died in a start hook of the epoch has not created iterators.
    has_drawn_seeds = random is not None
    if random is None:
        latest = _LATEST_KIND.get(restart.at, Kind.VALIDATED)
        random = records.find(step.batches, *Kind.up_to(latest))
    starts = records.find(restart.epoch, Kind.LOADERS) if known["loaders"] else pickle.dumps([])
    if random is None or starts is None:
        return None
    pairs = list(zip(known["loaders"], pickle.loads(starts), strict=True))
    if any(loader["number"] not in iterators for loader, iterators in pairs):
        return None
    loaders = [{**loader, "random": iterators[loader["number"]]} for loader, iterators in pairs]
    return {
        **known,
        "loaders": loaders,
        "random": random_state_in(random),
        "has_drawn_seeds": has_drawn_seeds,
    }


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
