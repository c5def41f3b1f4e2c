"""A call that some ranks do not make, or make too late, ends with an error that names them,
and ranks that wait for each other in different calls with one that has both calls; no other
wait does.
"""

import os
import re
import signal
import threading
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ddp_ext import DDPExtStrategy, RankAbsentError, RankFailedError
from lightning_ddp_ext.supervision import status_table
from lightning_ddp_ext.supervision.pusher import StatusPusher
from lightning_ddp_ext.supervision.status import Status
from tests.harness import ranks, training

PLACE = r"\S+/test_deadlocks\.py:\d+"


class Validating(training.Plain):
    """Only rank 0 has samples to validate on, and computes a metric from them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: training.Batch, index: int) -> None:
        self.mean(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.mean.compute()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(training.Streamed(training.data(3 if self.global_rank == 0 else 0)))


class EndsEarly(training.Plain):
    """Rank 1 ends the epoch before its second batch."""

    def on_train_batch_start(self, batch: training.Batch, index: int) -> int:
        return -1 if self.global_rank == 1 and index == 1 else 0


class LoggedOnRankZero(training.Plain):
    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        if self.global_rank == 0:
            self.log("on_rank_0", 1.0, rank_zero_only=True)
        return super().training_step(batch, index)


class Run(NamedTuple):
    """What a rank trains."""

    model: L.LightningModule
    options: dict[str, Any]  # of the Trainer


def call_on_one_rank(
    hook: str, call: Callable[[L.Trainer], object], *, earlier: int = 0, caller: int = 0
) -> Run:
    """Let one rank make a call in a hook."""
    return Run(
        training.Plain(), {"callbacks": [training.At(hook, call, earlier=earlier, ranks=[caller])]}
    )


def monitored_on_rank_0(callback: L.Callback) -> Run:
    return Run(LoggedOnRankZero(), {"callbacks": [callback], "enable_checkpointing": True})


def read_log_dir(trainer: L.Trainer) -> object:
    return trainer.log_dir


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


def gather(trainer: L.Trainer) -> object:
    return trainer.lightning_module.all_gather(torch.ones(2))


def different(call_of_rank_0: str, call_of_rank_1: str, remedy: str) -> str:
    """Return the sentence about ranks that wait in these calls."""
    rank_0, rank_1 = (
        rf"rank {rank} \(host \S+, pid \d+\) is in {call}, {PLACE}"
        for rank, call in enumerate((call_of_rank_0, call_of_rank_1))
    )
    return rf"ranks are waiting for each other in different calls: {rank_0}; {rank_1}; .*{remedy}"


# The calls in which ranks wait, as messages name them.
GRADIENTS = r"all_reduce #\d+ \[\[49\]\]"
FINAL_BARRIER = "the final barrier of the Trainer's run"
# What ranks train, and the sentence with the calls and the remedy.
DIFFERENT_CALLS = [
    pytest.param(
        call_on_one_rank("on_before_backward", read_log_dir, earlier=1),
        different("a broadcast from rank 0", GRADIENTS, r"such as trainer\.log_dir, on every rank"),
        id="log_dir in a step",
    ),
    *[
        pytest.param(
            call_on_one_rank(hook, read_log_dir),
            rf"rank 0 .*began a broadcast from rank 0 \({PLACE}\)",
            id=f"log_dir {hook}",
        )
        for hook in ("on_fit_start", "on_train_end")
    ],
    pytest.param(
        Run(
            training.Net(),
            {"max_epochs": 2, "callbacks": [training.At("on_train_epoch_end", stop, ranks=[1])]},
        ),
        rf"rank 1 began {FINAL_BARRIER}, but rank 0 \(host \S+, pid \d+\) continued without it; if"
        r" only some ranks set trainer\.should_stop",
        id="should_stop",
    ),
    pytest.param(
        Run(EndsEarly(), {"limit_val_batches": 0}),
        "or return -1 from on_train_batch_start, let every rank",
        id="an epoch that ends early",
    ),
    pytest.param(
        call_on_one_rank("on_train_batch_end", gather, earlier=1),
        different(
            r"all_gather #\d+ \[\[2\]\]",
            GRADIENTS,
            "make sure that every rank makes the same calls in the same order",
        ),
        id="callbacks",
    ),
    pytest.param(
        Run(Validating(), {"limit_val_batches": 5}),
        different(
            r"barrier #\d+", FINAL_BARRIER, r"if the ranks have different numbers of batches"
        ),
        id="no batch for a metric",
    ),
    *[
        pytest.param(
            monitored_on_rank_0(callback),
            rf"rank 0 .*began a decision of {type(callback).__name__} \({PLACE}\).*; log"
            " 'on_rank_0' on every rank",
            id=type(callback).__name__,
        )
        for callback in (
            ModelCheckpoint(monitor="on_rank_0", every_n_train_steps=1, save_top_k=2),
            EarlyStopping("on_rank_0", strict=False, check_on_train_epoch_end=True),
        )
    ],
]


def fit(rank: int, world_size: int, directory: Path, run: Run, *, seconds: float = 0.5) -> None:
    """Train; the ranks are compared after some seconds in a call."""
    strategy = training.make_strategy("ours", directory)
    training.change_timeouts(strategy, deadlock=seconds)
    options = {
        "devices": world_size,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": directory,
        **run.options,
    }
    training.make_trainer(strategy, **options).fit(run.model)


@pytest.mark.parametrize(("run", "sentence"), DIFFERENT_CALLS)
def test_ranks_in_different_calls_are_named(run: Run, sentence: str, tmp_path: Path) -> None:
    """Both ranks raise an error with the calls, their lines and a remedy, long before the
    timeout.
    """
    for outcome in ranks.launch_ranks(fit, 2, tmp_path, run):
        assert re.search(sentence, ranks.message_of(outcome, RankAbsentError)), outcome.story()


# A rank is busy until the test releases it.


def stay(*_: Any) -> None:
    ranks.hold("busy")


def enter_barrier(trainer: L.Trainer) -> None:
    trainer.strategy.barrier("apart")


# Rank 0 waits in a collective, rank 1 in a barrier, and rank 2 works.
APART = Run(
    training.Plain(),
    {
        "callbacks": [
            training.At("on_train_batch_end", do, ranks=[rank])
            for rank, do in enumerate((gather, enter_barrier, stay))
        ]
    },
)


def test_a_deadlock_is_named_while_a_rank_that_is_not_in_it_works(tmp_path: Path) -> None:
    """Two ranks that wait for each other do not wait until the third one needs them."""
    with ranks.RankProcesses(fit, 3, tmp_path, APART) as processes:
        processes.wait_for("busy", 2)
        outcomes = processes.wait(0, 1)
        processes.release(2)
        processes.wait(2)
    for outcome in outcomes:
        message = outcome.failure.message
        assert message.startswith("ranks are waiting for each other in different calls: rank 0 (")
        assert "; rank 1 (" in message
        assert "rank 2 (" not in message


# Waits that are not deadlocks.


class SavesSlowly(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        stay()
        super().save_checkpoint(*args, **kwargs)


def save(trainer: L.Trainer) -> None:
    trainer.save_checkpoint(f"{trainer.default_root_dir}/it.ckpt")


def run_backward(released: list[bool]) -> None:
    while not released:
        pass


def reduce_in_other_orders(trainer: L.Trainer) -> None:
    """Reduce in two groups, in another order on each rank, beside a long backward pass."""
    released: list[bool] = []
    groups = [dist.new_group() for _ in range(2)]
    group, other = groups if trainer.global_rank == 0 else reversed(groups)
    reducing = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    threading.Thread(target=lambda: released.append(stay() is None)).start()
    # Computes in a frame of torch's.
    types.FunctionType(run_backward.__code__, {"__name__": "torch.autograd.graph"})(released)
    dist.all_reduce(torch.ones(1), group=other)
    reducing.wait()


def fit_and_announce(rank: int, world_size: int, directory: Path, run: Run) -> None:
    """Train; rank 0 announces each time that it compares statuses of waiting ranks."""
    find = status_table.deadlock_in

    def find_and_announce(statuses: Sequence[Status]) -> object:
        if statuses:
            ranks.announce("compared")
        return find(statuses)

    status_table.deadlock_in = find_and_announce
    fit(rank, world_size, directory, run, seconds=0.2)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(call_on_one_rank("on_train_batch_end", stay, earlier=1), id="a callback"),
        pytest.param(
            Run(
                training.Plain(),
                {
                    "callbacks": [training.At("on_train_batch_end", save, earlier=1)],
                    "plugins": [SavesSlowly()],
                },
            ),
            id="a long save",
        ),
        pytest.param(call_on_one_rank("setup", stay), id="work at the start"),
    ],
)
def test_a_rank_that_works_can_continue(run: Run, tmp_path: Path) -> None:
    """The other rank waits for it, however often it has the ranks compared."""
    with ranks.RankProcesses(fit_and_announce, 2, tmp_path, run) as processes:
        processes.wait_for("busy", 0)
        for _ in range(4):
            processes.wait_for("compared", 0)
        processes.release(0)
        ranks.output_of_all(processes.wait())


def test_ranks_that_compute_beside_collectives_can_continue(tmp_path: Path) -> None:
    """They may enter the collectives of several groups in different orders."""
    callbacks = [training.At("on_train_batch_end", reduce_in_other_orders)]
    run = Run(training.Plain(), {"callbacks": callbacks})
    with ranks.RankProcesses(fit_and_announce, 2, tmp_path, run) as processes:
        processes.wait_for_all("busy")
        for _ in range(4):
            processes.wait_for("compared", 0)
        processes.release(0, 1)
        ranks.output_of_all(processes.wait())


def fit_and_look(rank: int, world_size: int, directory: Path) -> None:
    """Train; rank 1 is late at the end of training, and then at a barrier. Rank 0 announces
    when it looks for the late rank, and when it has looked; only the first wait is overdue.
    """
    ask = StatusPusher._ask
    answer = status_table.StatusTable._answer
    handle_look = StatusPusher._handle_look

    def ask_once(self: Any, *args: Any, **kwargs: Any) -> None:
        ask(self, *args, **kwargs)
        training.limit_collectives(600)

    def answer_and_announce(self: Any, *args: Any) -> None:
        ranks.announce("looks")
        answer(self, *args)

    def handle_and_announce(self: Any, body: Any) -> None:
        handle_look(self, body)
        if not body["is_watched"]:
            ranks.announce("has looked")

    StatusPusher._ask = ask_once
    status_table.StatusTable._answer = answer_and_announce
    StatusPusher._handle_look = handle_and_announce
    callbacks = [
        training.At("on_train_end", lambda _: training.limit_collectives(0.2), ranks=[0]),
        training.At("on_train_end", stay, ranks=[1]),
        training.At("on_fit_end", stay, ranks=[1]),
        training.At("on_fit_end", enter_barrier),
    ]
    fit(rank, world_size, directory, Run(training.Plain(), {"callbacks": callbacks}), seconds=0.2)


def test_a_rank_that_arrives_while_it_is_looked_for_can_continue(tmp_path: Path) -> None:
    """It may be late again in the next call, whose wait has only begun."""
    with ranks.RankProcesses(fit_and_look, 2, tmp_path) as processes:
        processes.wait_for("busy", 1)
        processes.wait_for("looks", 0)
        processes.release(1)
        processes.wait_for("busy", 1)
        processes.wait_for("has looked", 0)
        processes.release(1)
        outcomes = processes.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()


def test_a_stopped_process_can_continue(tmp_path: Path) -> None:
    """A process that SIGSTOP stopped and SIGCONT continued finishes, and so do the
    ranks that waited for it.
    """
    run = call_on_one_rank("on_train_batch_end", stay, earlier=1, caller=1)
    with ranks.RankProcesses(fit_and_announce, 2, tmp_path, run) as processes:
        processes.wait_for("busy", 1)
        processes.kill(1, signal.SIGSTOP)
        processes.release(1)
        for _ in range(2):
            processes.wait_for("compared", 0)
        processes.kill(1, signal.SIGCONT)
        ranks.output_of_all(processes.wait())


# A call that some ranks do not make, or make too late.


TIMEOUT = 2.0  # of a collective, in seconds
ANSWER = 6.0  # seconds after which a silent rank counts as hung

Elsewhere = Callable[[L.Trainer], object]


@pytest.mark.parametrize(("saving", "absent"), [([2], "[01]"), ([0, 1], "2")])
def test_a_save_on_some_ranks_names_one_that_did_not_make_it(
    saving: list[int], absent: str, tmp_path: Path
) -> None:
    """`trainer.save_checkpoint` under `if rank == 0` raises on all ranks immediately,
    instead of hanging.
    """
    path = tmp_path / "it.ckpt"
    save = training.At(
        "on_train_batch_end", partial(L.Trainer.save_checkpoint, filepath=path), ranks=saving
    )
    sentence = rf"began saving {path} .*rank {absent} \(host .*make this call"
    for outcome in training.fit_on(3, tmp_path, training.Net(), save):
        assert re.search(sentence, ranks.message_of(outcome, RankAbsentError)), outcome.story()


def validate_elsewhere(trainer: L.Trainer) -> None:
    trainer.validate(training.Net())


def save_after_fit(
    rank: int, world_size: int, directory: Path, path: Path, elsewhere: Elsewhere
) -> None:
    trainer = training.fit("ours", directory, training.Net(), max_epochs=1)
    if rank == 0:
        trainer.save_checkpoint(path)
    else:
        elsewhere(trainer)


@pytest.mark.parametrize(
    ("elsewhere", "sentence"),
    [
        (
            str,
            rf"finished and exited, but this rank still needs it for saving \S+ \({PLACE}\); make",
        ),
        (
            validate_elsewhere,
            rf"different calls: .*rank 0 \(host \S+, pid \d+\) began saving \S+ \({PLACE}\)",
        ),
    ],
    ids=["exits", "validates"],
)
def test_a_save_on_rank_0_after_fit_writes_the_file(
    elsewhere: Elsewhere, sentence: str, tmp_path: Path
) -> None:
    """The error names the save. With stock, the file is also there."""
    path = tmp_path / "it.ckpt"
    saving, _ = ranks.launch_ranks(save_after_fit, 2, tmp_path, path, elsewhere)
    assert re.search(sentence, saving.failure.message), saving.story()
    assert saving.exit_code == 1
    assert torch.load(path, weights_only=False)["global_step"] == 4


def exit_after_a_barrier(rank: int, world_size: int, directory: Path) -> None:
    """Enter a barrier; rank 0 then ends its process without any clean-up."""
    trainer = training.fit("ours", directory, training.Net(), max_epochs=1)
    trainer.strategy.barrier("end")
    if rank == 0:
        os._exit(0)


def test_a_rank_that_exits_immediately_after_a_barrier_is_not_missed(tmp_path: Path) -> None:
    """Every rank has passed the barrier, so none fails."""
    outcomes = ranks.launch_ranks(exit_after_a_barrier, 2, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], ranks.stories(outcomes)


def late_at_a_barrier(rank: int, world_size: int, directory: Path, late: int) -> None:
    trainer = training.fit("ours", directory, training.Net(), max_epochs=1)
    training.limit_collectives(TIMEOUT)
    if rank == late:
        ranks.hold("elsewhere")
    trainer.strategy.barrier("end")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_for_a_barrier_is_named(late: int, tmp_path: Path) -> None:
    """The waiting rank raises an error with its name, even if it is rank 0, which keeps
    the record.
    """
    with ranks.RankProcesses(late_at_a_barrier, 2, tmp_path, late) as processes:
        (outcome,) = processes.wait(1 - late)
    sentence = (
        rf"rank {1 - late} began barrier 'end' .*, but rank {late} \(host .*did not do so in time"
    )
    assert re.search(sentence, outcome.story())


# Ranks that wait in vain in a collective name the rank that they waited for.


class Late(training.Net):
    """In its second step all ranks wait for the test; then one may stay there.

    Args:
        late_rank: the rank that stays, if any.
        call: made by the others in the step, which wait for it there.
    """

    def __init__(
        self, late_rank: int | None, call: Callable[[L.Trainer], object] | None = None
    ) -> None:
        super().__init__()
        self.late_rank = late_rank
        self.call = call

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 1:
            ranks.hold("in step")
            training.limit_collectives(TIMEOUT)
            if self.global_rank == self.late_rank:
                ranks.hold("late")
            if self.call is not None:
                self.call(self.trainer)
        return self.loss(batch)


def reduce_ones(trainer: L.Trainer) -> None:
    dist.all_reduce(torch.ones(1))


def fit_late(
    rank: int, world_size: int, url: str, model: training.Net, process_group_backend: str
) -> None:
    strategy = DDPExtStrategy(
        url, timeout=30, process_group_backend=training.backend(process_group_backend)
    )
    training.change_timeouts(strategy, answer=ANSWER)
    training.make_trainer(strategy, devices=world_size, limit_val_batches=0).fit(model)


def assert_named(
    outcomes: list[ranks.Outcome], culprit: int, kind: type[RankFailedError], sentence: str
) -> None:
    """Assert that each rank raised an error of this kind, which names the culprit."""
    for outcome in outcomes:
        error = outcome.failure.exception
        assert type(error) is kind, outcome.story()
        assert (error.rank, outcome.exit_code) == (culprit, 1), outcome.story()
        assert re.search(sentence, str(error)), outcome.story()


SILENT = (
    r"^rank \d \(host .*, pid \d+\) has not answered; "
    rf"(rank \d has waited .*{TIMEOUT:g} s|rank \d began barrier .*"
    r"|the connections of rank \d were closed in a collective)"
    r"; every rank stops$"
)
ELSEWHERE = (
    r"in a collective.*, but rank 1 \(host .*, pid \d+\) is in"
    r" .*ranks.py:\d+;"  # where ``hold`` waits
    r" make sure that"
)


@pytest.mark.parametrize("call", [None, enter_barrier], ids=["backward", "barrier"])
def test_a_stopped_process_is_named(call: Callable[[L.Trainer], object] | None) -> None:
    """The other ranks name rank 0 if it was stopped, although it relays messages and
    serves the store.
    """
    url = f"tcp://127.0.0.1:{ranks.free_port()}"
    with ranks.RankProcesses(fit_late, 3, url, Late(None, call), "gloo") as processes:
        processes.wait_for_all("in step")
        processes.kill(0, signal.SIGSTOP)
        processes.release(*processes.pids)
        outcomes = processes.wait(1, 2)
    assert_named(outcomes, 0, RankAbsentError, SILENT)


@pytest.mark.parametrize(
    ("call", "backend"),
    [(reduce_ones, "gloo"), (None, "nccl_stand_in")],
    ids=["all_reduce", "NCCL"],
)
def test_a_rank_that_does_something_else_is_named(
    call: Callable[[L.Trainer], object] | None, backend: str, tmp_path: Path
) -> None:
    """The others name it with file and line, and later it does so itself, before
    torch's own limit for NCCL.
    """
    url = f"file://{tmp_path}/store"
    model = Late(1, call)
    with ranks.RankProcesses(fit_late, 3, url, model, backend) as processes:
        processes.wait_for_all("in step")
        processes.release(*processes.pids)
        outcomes = processes.wait(0, 2)
        processes.release(1)
        outcomes += processes.wait(1)
    assert_named(outcomes, 1, RankAbsentError, ELSEWHERE)
