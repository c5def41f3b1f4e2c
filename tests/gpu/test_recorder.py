"""What the package needs of NCCL and CUDA works on one rank: the Flight Recorder,
aborts, and graphs.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current, leave
from lightning_ddp_ext.supervision.flight_recorder import (
    GroupProgress,
    groups_in_collectives,
    read_progress,
)
from tests.gpu.placement import ALONE, GPU, IS_GPU, Placement, hold_device
from tests.harness import training

SECONDS_TO_ABORT = 60.0


def fit(placement: Placement, directory: Path) -> dict[str, Tensor]:
    """Train from fixed initial weights, and return the trained ones."""
    torch.manual_seed(1)
    model = training.Net()
    placement.trainer(directory).fit(model)
    return training.weights(model)


def start_slow_all_reduce() -> ProcessContext:
    """Start an all-reduce that waits for the device; return this process's context."""
    context = current()
    assert context is not None
    value = torch.ones(3, device=GPU)
    hold_device(3.0 if IS_GPU else 0.0)
    dist.all_reduce(value)
    return context


class Records(NamedTuple):
    """What is known of a collective that waits, and the timeout of collectives."""

    waiting_groups: list[str]
    progress: list[GroupProgress]
    timeout: float


def read_records(rank: int, world_size: int, placement: Placement, directory: Path) -> Records:
    fit(placement, directory)
    context = start_slow_all_reduce()
    records = Records(
        groups_in_collectives(), read_progress(), context.groups.timeout.total_seconds()
    )
    if IS_GPU:
        torch.cuda.synchronize()
    return records


def test_an_all_reduce_that_waits_is_recorded(tmp_path: Path) -> None:
    """The Flight Recorder has the shape, place, ranks, timeout and age of an all-reduce
    that waits.
    """
    [records] = ALONE.run(read_records, tmp_path)
    [progress] = [group for group in records.progress if group.label == ""]  # the default group
    number = progress.entered
    assert progress.describe(number).startswith(f"all_reduce #{number} [[3]]")
    assert progress.collective(number).place.startswith(__file__)
    assert progress.members == [0]
    assert records.timeout <= progress.limit <= records.timeout + 60
    assert 0.0 <= time.time() - progress.entered_at < 60
    if IS_GPU:  # gloo has finished by then
        assert progress.pending == number
        groups = records.waiting_groups
        assert any(group.startswith("_dump_nccl_trace ") for group in groups), groups


def abort_and_train_again(
    rank: int, world_size: int, placement: Placement, directory: Path
) -> list[dict[str, Tensor]]:
    """Train, abort an all-reduce, leave, and train twice; return the weights after
    each training.
    """
    before = fit(placement, directory)
    context = start_slow_all_reduce()
    aborting = threading.Thread(target=context.groups.abort)
    aborting.start()
    aborting.join(SECONDS_TO_ABORT)
    assert not aborting.is_alive()
    if IS_GPU:
        torch.cuda.synchronize()
    context.close_group()
    leave()
    assert not dist.is_initialized()
    with_new_group = fit(placement, directory)
    with_same_group = fit(placement, directory)
    return [before, with_new_group, with_same_group]


def test_ranks_connect_again_after_an_abort(tmp_path: Path) -> None:
    """A thread aborts an all-reduce that waits; later Trainers learn as the first."""
    [[before, *after]] = ALONE.run(abort_and_train_again, tmp_path)
    training.assert_same(after, [before, before])


@contextlib.contextmanager
def recorder_polled(every: float) -> Iterator[threading.Semaphore]:
    """Read the Flight Recorder on a thread, every so many seconds; the semaphore counts
    the reads.
    """
    is_over = threading.Event()
    reads = threading.Semaphore(0)

    def poll() -> None:
        while not is_over.wait(every):
            groups_in_collectives()
            reads.release()

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield reads
    finally:
        is_over.set()
        thread.join()


def capture_while_polled(
    rank: int, world_size: int, placement: Placement, directory: Path
) -> Tensor:
    """Capture y = 2 x during three reads, and return y of a replay with x = 4."""
    fit(placement, directory)
    x = torch.ones(3, device=GPU)
    graph: Any = torch.cuda.CUDAGraph()
    with (
        recorder_polled(every=0.05) as reads,
        torch.cuda.graph(graph, capture_error_mode="global"),
    ):
        while reads.acquire(blocking=False):
            pass  # only reads during the capture count
        y = 2 * x
        assert all(reads.acquire(timeout=60) for _ in range(3))
    x.fill_(4)
    graph.replay()
    return y.cpu()


def test_a_cuda_graph_is_captured_while_the_recorder_is_read(tmp_path: Path) -> None:
    """Capture of a CUDA graph in "global" mode, while the Flight Recorder is read every
    50 ms.
    """
    if not IS_GPU:
        pytest.skip("a CPU captures no graphs")
    [replayed] = ALONE.run(capture_while_polled, tmp_path)
    training.assert_same(replayed, torch.full((3,), 8.0))
