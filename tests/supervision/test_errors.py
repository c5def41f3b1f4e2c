"""An exception on one rank, on real Trainers: every other rank is told, and nobody waits for those who are gone."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner

from lightning_ddp_ext.errors import RankFailedError
from lightning_ddp_ext.rendezvous.peer_event import RemoteTraceback
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, announce, hold, launch_ranks, run_ranks
from tests.supervision.model import (
    BATCHES,
    BoomError,
    Fault,
    Model,
    Witness,
    by_hand,
    collapse,
    interrupt,
    leave,
    make_trainer,
    stay,
    stay_and_fail,
    wait_for_ever,
)

STEPS_BEFORE = {
    "setup": 0,
    "configure_optimizers": 0,
    "training_step": 1,
    "on_train_batch_end": 2,
    "validation_step": BATCHES,
}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def fit(rank: int, world_size: int, url: str, *faults: Fault, **options: Any) -> None:
    make_trainer(world_size, strategy=by_hand(rank, world_size, url, **options)).fit(Model(faults))


def expect_told(told: Outcome, culprit: int, pid: int, reason: str) -> RankFailedError:
    """The rank has raised what names the culprit, with the culprit's traceback; returns it."""
    assert told.error is not None, told.story()
    error = told.error.exception
    assert type(error) is RankFailedError, told.story()
    assert (error.rank, error.host, error.pid) == (culprit, socket.gethostname(), pid)
    who = f"rank {culprit} (host {socket.gethostname()}, pid {pid})"
    assert str(error) == f"{who} failed, so this rank stops: {reason}"
    assert error.traceback_text.startswith("Traceback (most recent call last):\n")
    assert error.traceback_text.rstrip().endswith(reason)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert error.traceback_text in str(error.__cause__)
    assert told.exit_code == 1
    return error


# --- one rank raises ------------------------------------------------------------------------------


def catch_and_stay(rank: int, world_size: int, url: str, fault: Fault, directory: Path | None) -> list[BaseException]:
    """The rank that fails catches its exception and lives on, and returns what ``on_exception`` has seen."""
    witness = Witness()
    saver = [] if directory is None else [OnExceptionCheckpoint(directory)]
    strategy = by_hand(rank, world_size, url)
    callbacks = [*saver, witness]
    trainer = make_trainer(world_size, strategy=strategy, callbacks=callbacks, enable_checkpointing=bool(saver))
    try:
        trainer.fit(Model([fault]))
    except BoomError:
        hold("caught")
    except RankFailedError as error:
        announce("told", witness.seen == [error])
        raise
    return witness.seen


@pytest.mark.parametrize("saves", [False, True], ids=["", "saves"])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("place", STEPS_BEFORE)
def test_others_are_told_while_the_rank_lives_on(
    place: str, culprit: int, saves: bool, url: str, tmp_path: Path
) -> None:
    """Wherever a rank fails, the other one ends and names the cause, though the first lives on; rank 0 can save."""
    directory = tmp_path if saves else None
    with RankProcesses(catch_and_stay, 2, url, Fault(place).on(culprit), directory) as ranks:
        ranks.wait_for("caught", culprit)
        assert ranks.wait_for("told", 1 - culprit), "on_exception has seen another error"
        (told,) = ranks.wait(1 - culprit)
        ranks.release(culprit)
        (failed,) = ranks.wait(culprit)
    error = expect_told(told, culprit, failed.pid, "BoomError: no such layer")
    assert "in boom\n" in error.traceback_text
    assert failed.exit_code == 0, failed.story()
    assert [str(seen) for seen in failed.result] == ["no such layer"]
    if saves:
        saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
        assert set(saved["state_dict"]) == {"layer.weight", "layer.bias"}
        assert saved["global_step"] == STEPS_BEFORE[place]


def test_a_busy_rank_is_told_at_its_next_collective(url: str) -> None:
    """A rank that computes is not disturbed, but as soon as it needs the others."""
    with RankProcesses(fit, 2, url, Fault("training_step").on(0), Fault("training_step", stay).on(1)) as ranks:
        ranks.wait_for("in step", 1)
        (failed,) = ranks.wait(0)
        ranks.release(1)
        (told,) = ranks.wait(1)
    expect_told(told, 0, failed.pid, "BoomError: no such layer")


def fit_with_little_patience(rank: int, world_size: int, url: str, *faults: Fault) -> None:
    fit(rank, world_size, url, *faults, grace={"failed": 0.1})


def test_a_rank_that_nothing_can_wake_is_ended_after_a_failure(url: str) -> None:
    """As in a group that the user has made: nothing of it is ours to end, so the process is."""
    faults = Fault("training_step").on(0), Fault("training_step", wait_for_ever).on(1)
    with RankProcesses(fit_with_little_patience, 2, url, *faults) as ranks:
        failed, ended = ranks.wait()
    who = f"rank 0 (host {socket.gethostname()}, pid {failed.pid})"
    assert f"[rank 1] RankFailedError: {who} failed, so this rank stops: BoomError: no such layer" in ended.output
    assert ended.exit_code == 1


def test_the_same_exception_everywhere_is_everyones_own(url: str) -> None:
    """Ranks that all fail alike at once raise what they have raised; none waits for another."""
    with RankProcesses(fit, 3, url, Fault("setup", stay_and_fail)) as ranks:
        for rank in range(3):  # none is in the barrier before setup any more, from where it would be told
            ranks.wait_for("in step", rank)
        for rank in range(3):
            ranks.release(rank)
        outcomes = ranks.wait()
    assert [outcome.error and outcome.error.type_name for outcome in outcomes] == ["BoomError"] * 3
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1]


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("action", "reason"), [(collapse, "SystemExit: the config is empty"), (interrupt, "KeyboardInterrupt")]
)
def test_exit_and_interrupt_are_failures(action: object, reason: str, culprit: int, url: str) -> None:
    """``sys.exit`` and Ctrl-C on one rank release the others as any exception does."""
    outcomes = launch_ranks(fit, 2, url, Fault("training_step", action).on(culprit))  # type: ignore[arg-type]
    told, failed = outcomes[1 - culprit], outcomes[culprit]
    expect_told(told, culprit, failed.pid, reason)
    assert failed.exit_code == 1


class Unprintable(Exception):
    def __init__(self) -> None:
        super().__init__()
        self.unpicklable = threading.Lock()

    def __str__(self) -> str:
        raise TypeError("no text")


def raise_unprintable() -> None:
    raise Unprintable


def raise_a_book() -> None:
    raise BoomError("no such layer" + 4_000_000 * "!")


@pytest.mark.parametrize(
    ("action", "beginning"),
    [(raise_unprintable, "Unprintable: <its __str__ fails>"), (raise_a_book, "BoomError: no such layer!!!")],
)
def test_odd_exceptions_travel(action: object, beginning: str, url: str) -> None:
    """An exception without a text, or with one of megabytes, is news like any other."""
    outcomes = launch_ranks(fit, 3, url, Fault("training_step", action).on(1))  # type: ignore[arg-type]
    for rank in (0, 2):
        error = outcomes[rank].error
        assert error is not None
        assert error.type_name == "RankFailedError", outcomes[rank].story()
        assert f"failed, so this rank stops: {beginning}" in error.message
        assert len(error.message) < 10_000
    assert outcomes[1].exit_code == 1


# --- before, between and after --------------------------------------------------------------------


def fit_twice(rank: int, world_size: int, url: str, *, then: Fault) -> None:
    strategy = by_hand(rank, world_size, url)
    trainer = make_trainer(world_size, strategy=strategy)
    trainer.fit(Model())
    then.strike("between", rank)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Model())


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_between_two_fits_reaches_those_in_the_second(culprit: int, url: str) -> None:
    """An exception outside of any Trainer call that ends a rank is told to the ranks that wait for it."""
    outcomes = launch_ranks(fit_twice, 2, url, then=Fault("between").on(culprit))
    told, failed = outcomes[1 - culprit], outcomes[culprit]
    assert failed.error is not None
    assert failed.error.type_name == "BoomError"
    expect_told(told, culprit, failed.pid, "BoomError: no such layer")


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_ends_early_is_named(early: int, url: str) -> None:
    """A rank in good health that makes fewer calls than the others is said to have left."""
    outcomes = launch_ranks(fit_twice, 2, url, then=Fault("between", leave).on(early))
    gone, needy = outcomes[early], outcomes[1 - early]
    assert gone.exit_code == 0, gone.story()
    assert needy.error is not None, needy.story()
    assert needy.error.type_name == "RankLeftError"
    who = f"rank {early} (host {socket.gethostname()}, pid {gone.pid})"
    assert needy.error.message.startswith(f"{who} has finished and gone, but this rank still needs it")
    assert needy.exit_code == 1


def fit_again_and_again(rank: int, world_size: int, url: str, *culprits: int) -> dict[str, object]:
    """Fits that fail on one rank after another, all caught, then one that does not."""
    reports = []
    for culprit in culprits:
        try:
            fit(rank, world_size, url, Fault("training_step").on(culprit))
        except (BoomError, RankFailedError) as error:
            reports.append(f"{type(error).__name__} {getattr(error, 'rank', rank)}")
    model = Model()
    trainer = make_trainer(world_size, strategy=by_hand(rank, world_size, url))
    trainer.fit(model)
    return {
        "reports": reports,
        "steps": trainer.global_step,
        "weights": model.layer.weight.tolist(),
        "threads": [thread.name for thread in threading.enumerate() if thread.name.startswith("ddpx")],
    }


def test_processes_that_have_caught_the_failure_train_again(url: str) -> None:
    """After a failure that every rank has caught, the same processes find each other anew, again and again."""
    first, second, third = run_ranks(fit_again_and_again, 3, url, 1, 0, 0)
    assert first["reports"] == ["RankFailedError 1", "BoomError 0", "BoomError 0"]
    assert second["reports"] == ["BoomError 1", "RankFailedError 0", "RankFailedError 0"]
    assert third["reports"] == ["RankFailedError 1", "RankFailedError 0", "RankFailedError 0"]
    assert first["weights"] == second["weights"] == third["weights"]
    for report in (first, second, third):
        assert report["steps"] == BATCHES
        assert report["threads"] == ["ddpx-channel"], "nothing is left of the groups that have failed"


def catch_and_fit_again(rank: int, world_size: int, url: str, *, tolerant: int) -> None:
    try:
        fit(rank, world_size, url, Fault("training_step").on(1), init_timeout=2)
    except (BoomError, RankFailedError):
        if rank != tolerant:
            raise
    fit(rank, world_size, url, init_timeout=2)


@pytest.mark.parametrize(
    ("tolerant", "kind", "words"),
    [
        (0, "MissingRanksError", "rank 1 of 2 did not come within init_timeout 2 s"),
        (1, "StoreError", "found no rank 0 at file://"),
    ],
)
def test_whoever_tries_again_alone_is_told_who_does_not_come(tolerant: int, kind: str, words: str, url: str) -> None:
    """A rank that has caught a failure waits ``init_timeout`` for those that have ended because of it."""
    error = launch_ranks(catch_and_fit_again, 2, url, tolerant=tolerant)[tolerant].error
    assert error is not None
    assert error.type_name == kind
    assert words in error.message


# --- no failure -----------------------------------------------------------------------------------


class Tunable(Model):
    def __init__(self) -> None:
        super().__init__()
        self.learning_rate = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def tune(rank: int, world_size: int, url: str, directory: Path) -> dict[str, object]:
    model = Tunable()
    strategy = by_hand(rank, world_size, url)
    trainer = make_trainer(world_size, strategy=strategy, default_root_dir=directory)
    tuner = Tuner(trainer)
    finder = tuner.lr_find(model, num_training=3, min_lr=1e-4, max_lr=1e-1, early_stop_threshold=None)
    context = current()
    trainer.fit(model)
    assert finder is not None
    return {
        "losses": len(finder.results["loss"]),
        "failure": None if context is None else context.failure,
        "same": current() is context,
        "steps": trainer.global_step,
    }


def test_tuning_is_no_failure(url: str, tmp_path: Path) -> None:
    """The exception by which Lightning's Tuner leaves ``fit`` is announced to nobody, and the group serves on."""
    for report in run_ranks(tune, 2, url, tmp_path):
        assert report["losses"] == 3
        assert report["failure"] is None
        assert report["same"] is True
        assert report["steps"] == BATCHES
