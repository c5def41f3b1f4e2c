"""What rank 0 does for all: the same outcome on every rank, whatever it is."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.supervision.rank_zero import rank_zero_for_all
from tests.harness.ranks import launch_ranks, run_ranks
from tests.supervision.model import BoomError, Model, boom, by_hand, die, interrupt, make_trainer


def outcomes_of(work: Callable[[], Any]) -> list[Any]:
    """What rank 0 and another rank return or raise, one after the other; what is sent waits in a list."""
    sent: list[bytes] = []

    def send(message: object) -> object:
        sent.append(pickle.dumps(message))
        return message

    def outcome(broadcast: Callable[[Any], Any], *, is_rank_zero: bool) -> Any:
        try:
            return rank_zero_for_all(work, is_rank_zero=is_rank_zero, broadcast=broadcast, what="saving")
        except Exception as error:
            return error

    first = outcome(send, is_rank_zero=True)
    return [first, outcome(lambda _: pickle.loads(sent.pop()), is_rank_zero=False)]


def test_every_rank_gets_the_result() -> None:
    """The work is done once; other ranks have a copy of its result."""
    calls: list[str] = []

    def work() -> list[int]:
        calls.append("worked")
        return [1, 2]

    first, other = outcomes_of(work)
    assert first == other == [1, 2]
    assert first is not other
    assert calls == ["worked"]


def test_every_rank_raises_the_error() -> None:
    """Type and text are the same; the other ranks have a note on where it happened, and rank 0's traceback."""
    first, other = outcomes_of(boom)
    assert type(first) is type(other) is BoomError
    assert str(first) == str(other) == "no such layer"
    assert other.__notes__ == ["raised on rank 0 during saving"]
    assert "in boom\n" in str(other.__cause__)
    assert not hasattr(first, "__notes__")


class Growing(Exception):
    """Pickle rebuilds it with its text as the layer."""

    def __init__(self, layer: str) -> None:
        super().__init__(f"no layer {layer}")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("no such layer")
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Growing("layer3"), "Growing: no layer layer3"),
        (Unpicklable(), "Unpicklable: no such layer"),
        (Mute(), "Mute: <its __str__ fails>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_that_pickle_spoils_is_told_in_words(error: Exception, text: str) -> None:
    """Rank 0 raises the error itself, the others a ``RuntimeError`` that names its type and text."""

    def work() -> None:
        raise error

    first, other = outcomes_of(work)
    assert first is error
    assert type(other) is RuntimeError
    assert str(other) == text


def test_a_result_that_cannot_travel_is_an_error_everywhere() -> None:
    """Rank 0 does not go on alone with a result that the others cannot have."""
    first, other = outcomes_of(threading.Lock)
    assert type(first) is type(other) is TypeError
    assert str(first) == str(other) == "cannot pickle '_thread.lock' object"


# --- on real Trainers -----------------------------------------------------------------------------


class Work(pl.Callback):
    """Has rank 0 work for all in the second step."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.result: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:  # type: ignore[override]
        if trainer.global_step == 1:
            assert isinstance(trainer.strategy, DDPExtStrategy)
            self.result = trainer.strategy.on_rank_zero(self.work, what="a test")


def answer() -> int:
    return 42


def fit(rank: int, world_size: int, url: str, work: Callable[[], Any]) -> Any:
    callback = Work(work)
    make_trainer(world_size, strategy=by_hand(rank, world_size, url), callbacks=[callback]).fit(Model())
    return callback.result


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.mark.parametrize(
    ("work", "message"),
    [(boom, "BoomError: no such layer"), (threading.Lock, "TypeError: cannot pickle '_thread.lock' object")],
)
def test_all_ranks_end_with_the_error(work: Callable[[], Any], message: str, url: str) -> None:
    """Each rank raises it as its own, none waits for rank 0, and whoever prints its traceback prints rank 0's."""
    for outcome in launch_ranks(fit, 3, url, work):
        assert outcome.error is not None, outcome.story()
        assert f"{outcome.error.type_name}: {outcome.error.message}" == message
        assert "in rank_zero_for_all\n" in outcome.error.traceback
        assert outcome.exit_code == 1


@pytest.mark.parametrize(
    ("work", "name", "reason"),
    [
        (die, "RankDiedError", "died: its process ended unexpectedly"),
        (interrupt, "RankFailedError", "failed, so this rank stops: KeyboardInterrupt"),
    ],
)
def test_others_are_released_if_rank_zero_does_not_come_back(
    work: Callable[[], Any], name: str, reason: str, url: str
) -> None:
    """A death or an interrupt in the work is an end like any other."""
    first, other = launch_ranks(fit, 2, url, work)
    assert other.error is not None, other.story()
    assert other.error.type_name == name
    assert f"rank 0 (host {other.error.exception.host}, pid {first.pid}) {reason}" in other.error.message  # type: ignore[union-attr]


class SaveWhenInterrupted(pl.Callback):
    def __init__(self) -> None:
        self.result: Any = None

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        assert isinstance(trainer.strategy, DDPExtStrategy)
        self.result = trainer.strategy.on_rank_zero(answer)
        trainer.strategy.on_rank_zero(threading.Lock)  # nobody else is to have it


def fail_and_save(rank: int, world_size: int, url: str) -> Any:
    saver = SaveWhenInterrupted()
    trainer = make_trainer(world_size, strategy=by_hand(rank, world_size, url), callbacks=[saver, Work(boom)])
    with pytest.raises(BoomError):
        trainer.fit(Model())
    return saver.result


def test_rank_zero_works_alone_when_training_is_interrupted(url: str) -> None:
    """After an exception nobody waits for anybody: rank 0 has its result, the others none."""
    assert run_ranks(fail_and_save, 2, url) == [42, None]
