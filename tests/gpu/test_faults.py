"""Whatever happens to a rank on a GPU, the other rank names it, ends without SIGABRT,
and saves nothing wrong; what the package does to NCCL for this harms no later training.
"""

import re
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint

from lightning_ddp_ext.errors import RankAbsentError, RankDiedError, RankFailedError
from lightning_ddp_ext.rendezvous.process_context import current, leave
from lightning_ddp_ext.supervision.flight_recorder import groups_in_collectives
from tests.gpu.conftest import ALONE, GPU, IS_GPU, NCCL, Placement, Wide
from tests.harness import training
from tests.harness.ranks import stories

STEPS_BEFORE_FAULT = 2
CALIBRATION_CYCLES = 10**8  # of the GPU's clock
SECONDS_TO_RAISE = 10.0  # until a rank is forced to exit; two ranks on a GPU may be slow


def read_beyond_the_end() -> None:
    """Fail in a kernel, after which this process cannot use its GPU; on a CPU this is
    an ordinary error.
    """
    torch.ones(2, device=GPU)[torch.tensor([5], device=GPU)].cpu()


@dataclass(frozen=True)
class Fault:
    """What rank 1 does in its third step, and the error that rank 0 raises."""

    strike: Callable[[], None]
    error: type[RankFailedError]
    message: str
    exit_code: int = 1  # of rank 1


FAULTS = {
    "raises": Fault(
        training.boom, RankFailedError, "failed, so this rank stops: BoomError: no such layer"
    ),
    "dies": Fault(
        training.die, RankDiedError, "died: its process ended unexpectedly", -signal.SIGKILL
    ),
    "is late": Fault(
        training.wait_for_ever,
        RankAbsentError,
        r"in a collective for its timeout of 3 s, but rank 1 .*\.py:\d+",
    ),
    # torch's watchdog for NCCL leaves the error to Python: no SIGABRT.
    "asserts": Fault(
        read_beyond_the_end,
        RankFailedError,
        "failed, so this rank stops: .*(device-side assert|out of bounds)",
    ),
}


class Faulty(training.Net):
    """Has a fault on rank 1 in the third step."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def training_step(self, batch: training.Batch, index: int) -> Any:
        if self.fault == "is late" and index == STEPS_BEFORE_FAULT - 1:
            training.limit_collectives(3.0)
        if self.global_rank == 1 and index == STEPS_BEFORE_FAULT:
            FAULTS[self.fault].strike()
        return super().training_step(batch, index)


def train_with_fault(
    rank: int, world_size: int, placement: Placement, directory: Path, fault: str
) -> None:
    """Train until the fault; a callback saves if the error leaves the weights intact."""
    trainer = placement.trainer(
        directory,
        strategy={"timeout": 600},
        callbacks=[OnExceptionCheckpoint(directory, "after-error")],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    events = trainer.strategy._rendezvous.timeouts.grace
    training.change_timeouts(trainer.strategy, grace=dict.fromkeys(events, SECONDS_TO_RAISE))
    trainer.fit(Faulty(fault))


@pytest.mark.parametrize("fault", FAULTS)
def test_messages_name_the_rank_that_fails(
    placement: Placement, fault: str, tmp_path: Path
) -> None:
    """The other rank names one that raises, dies, is late or fails in a kernel, and saves
    no partial sums.

    NCCL's aborted collectives may leave partial sums, so nothing is saved after them.
    """
    expected = FAULTS[fault]
    survivor, faulty = placement.launch(train_with_fault, tmp_path, fault, time_limit=180)
    story = stories([survivor, faulty])
    assert (survivor.exit_code, faulty.exit_code) == (1, expected.exit_code), story
    error = survivor.failure.exception
    assert isinstance(error, expected.error), story
    assert error.rank == 1
    assert re.search(expected.message, survivor.failure.message), story
    assert (tmp_path / "after-error.ckpt").exists() == (placement.backend == "gloo"), story


def hold_device(seconds: float) -> None:
    """Keep the current stream of a GPU busy, and return before it is idle again; on a
    CPU, wait.
    """
    if not IS_GPU:
        threading.Event().wait(seconds)
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    cycles_per_ms = CALIBRATION_CYCLES / start.elapsed_time(end)
    torch.cuda._sleep(int(cycles_per_ms * seconds * 1000))


class Interrupted(Wide):
    """Kills rank 1 in the third step's backward pass, once all buckets but the last
    have been summed.

    The last bucket has the gradient of the first layer. Rank 0 holds its device for
    some seconds before it.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers[0].weight.register_hook(self.interrupt)

    def interrupt(self, gradient: torch.Tensor) -> None:
        if self.global_step != STEPS_BEFORE_FAULT:
            return
        if self.global_rank == 0:
            hold_device(self.seconds)
            return
        if IS_GPU:
            torch.cuda.synchronize()
        training.die()


def train_until_interrupted(
    rank: int, world_size: int, placement: Placement, directory: Path, seconds: float
) -> None:
    """Train; rank 0 also saves its weights after each step."""
    L.seed_everything(1)
    model = Interrupted(seconds)

    def save_weights(trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            torch.save(training.weights(model), directory / f"step-{trainer.global_step}.pt")

    placement.trainer(
        directory,
        strategy={"stop_checkpoint": directory / "stopped.ckpt", "bucket_cap_mb": 1},
        callbacks=[LambdaCallback(on_train_batch_end=save_weights)],
        num_sanity_val_steps=0,
    ).fit(model)


@pytest.mark.parametrize("seconds", [0, 4], ids=["short", "over 3 s"])
def test_partial_sums_are_not_saved(placement: Placement, seconds: float, tmp_path: Path) -> None:
    """After a kill between two buckets of a backward pass, the file has the weights of the
    last finished step. With NCCL, whose abort may change them, there is no file.
    """
    survivor, killed = placement.launch(train_until_interrupted, tmp_path, seconds, time_limit=120)
    assert (survivor.exit_code, killed.exit_code) == (1, -signal.SIGKILL), survivor.story()
    assert isinstance(survivor.failure.exception, RankDiedError), survivor.story()
    path = tmp_path / "stopped.ckpt"
    has_aborted = "NCCL was aborted" in survivor.output
    if IS_GPU and placement.backend == NCCL:  # the stand-in may raise before it is aborted
        assert has_aborted, survivor.story()
    if has_aborted:
        assert not path.exists()
        return
    finished, saved = (
        torch.load(each, weights_only=True, map_location="cpu")
        for each in (tmp_path / f"step-{STEPS_BEFORE_FAULT}.pt", path)
    )
    assert saved["global_step"] == STEPS_BEFORE_FAULT
    training.assert_same(dict(saved["state_dict"]), finished)


# Aborts, and the Flight Recorder.


def fit(placement: Placement, directory: Path) -> dict[str, torch.Tensor]:
    """Train from fixed initial weights, and return the trained ones."""
    torch.manual_seed(1)
    model = training.Net()
    placement.trainer(directory).fit(model)
    return training.weights(model)


def abort_and_train_again(
    rank: int, world_size: int, placement: Placement, directory: Path
) -> list[dict[str, torch.Tensor]]:
    """Train, abort an all-reduce, leave, and train twice; return the weights after
    each training.
    """
    before = fit(placement, directory)
    context = current()
    assert context is not None
    hold_device(3.0 if IS_GPU else 0.0)
    torch.distributed.all_reduce(torch.ones(3, device=GPU))
    aborting = threading.Thread(target=context.groups.abort)
    aborting.start()
    aborting.join(60.0)
    assert not aborting.is_alive()
    if IS_GPU:
        torch.cuda.synchronize()
    context.close_group()
    leave()
    assert not torch.distributed.is_initialized()
    # The first of these trains with a new group, and the second with the same.
    return [before, fit(placement, directory), fit(placement, directory)]


def test_ranks_connect_again_after_an_abort(tmp_path: Path) -> None:
    """A thread aborts an all-reduce that waits; later Trainers learn as the first."""
    [[before, *after]] = ALONE.run(abort_and_train_again, tmp_path)
    training.assert_same(after, [before, before])


def capture_while_read(
    rank: int, world_size: int, placement: Placement, directory: Path
) -> torch.Tensor:
    """Capture y = 2 x, read the recorder meanwhile, and return y of a replay with x = 4."""
    fit(placement, directory)
    x = torch.ones(3, device=GPU)
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        y = 2 * x
        groups_in_collectives()
    x.fill_(4)
    graph.replay()
    return y.cpu()


def test_a_cuda_graph_is_captured_while_the_recorder_is_read(tmp_path: Path) -> None:
    """A capture in "global" mode fails if any thread calls CUDA in a way that it forbids."""
    if not IS_GPU:
        pytest.skip("a CPU captures no graphs")
    [replayed] = ALONE.run(capture_while_read, tmp_path)
    training.assert_same(replayed, torch.full((3,), 8.0))
