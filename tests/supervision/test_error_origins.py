"""An exception is a rank's own, whatever its text, unless another rank broke the
collective in which it was raised.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from tests.harness.ranks import Outcome, RankProcesses, announce, hold
from tests.harness.training import At, Batch, Net, fit
from tests.supervision import model


class Reading(torch.utils.data.Dataset[Any]):
    """Rank 0 reads a sample for a long time; in a loader worker of rank 1, a client of
    a store fails meanwhile.
    """

    reads = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads == 5 and torch.utils.data.get_worker_info() is not None:
            raise RuntimeError(
                "store: gloo: [Errno 104] Connection reset by peer, process group, socket"
            )
        if self.reads == 5 and dist.get_rank() == 0:
            hold("busy")
        return torch.ones(4), torch.ones(1)


class ReadsFromStore(Net):
    def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(
            Reading(), batch_size=2, num_workers=int(self.global_rank == 1)
        )


class FailsInBackward(Net):
    """The backward pass of rank 1 fails in C++ for its own reason, while rank 0 works."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        if index == 1 and self.global_rank == 0:
            hold("busy")
        loss = self.loss(batch)
        return loss.detach() if index == 1 and self.global_rank == 1 else loss


def train(rank: int, world_size: int, directory: Path, net: type[Net]) -> None:
    fit("ours", directory, net(), max_epochs=1, limit_val_batches=0)


@pytest.mark.parametrize(
    ("net", "error"),
    [
        pytest.param(
            ReadsFromStore,
            r"RuntimeError: .*store: gloo: \[Errno 104\] Connection reset by peer",
            id="a loader worker",
        ),
        pytest.param(
            FailsInBackward,
            "RuntimeError: element 0 of tensors does not require grad",
            id="a backward pass",
        ),
    ],
)
def test_an_error_while_another_rank_works_is_the_ranks_own(
    net: type[Net], error: str, tmp_path: Path
) -> None:
    """Its rank raises and prints it while another rank is busy for a long time, and that
    rank names the first one.
    """
    with RankProcesses(train, 2, tmp_path, net) as ranks:
        ranks.wait_for("busy", 0)
        (failed,) = ranks.wait(1)
        ranks.release(0)
        (survivor,) = ranks.wait(0)
    assert re.search(error, failed.output, re.DOTALL), failed.story()
    assert failed.failure.type_name == "RuntimeError", failed.story()
    model.error_of(survivor, RankFailedError, 1, failed.pid)


def use_socket() -> None:
    raise RuntimeError("gloo: no socket is left, connection reset by peer")


def use_closed_group() -> None:
    dist.destroy_process_group()
    dist.barrier()


def fail_after_fit(rank: int, world_size: int, directory: Path, work: Callable[[], object]) -> None:
    fit("ours", directory, Net(), max_epochs=1)
    if rank == 0:
        hold("after fit")
        work()


def failure_after_fit(work: Callable[[], object], directory: Path) -> Outcome:
    """Do some work on rank 0 after rank 1 has finished and exited; return rank 0's end."""
    with RankProcesses(fail_after_fit, 2, directory, work) as ranks:
        ranks.wait_for("after fit", 0)
        ranks.wait(1)
        ranks.release(0)
        (failed,) = ranks.wait(0)
    return failed


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (use_socket, "RuntimeError: gloo: no socket is left"),
        (use_closed_group, "ValueError: Default process group has not been initialized"),
    ],
)
def test_an_error_after_fit_is_the_ranks_own(
    work: Callable[[], object], error: str, tmp_path: Path
) -> None:
    """Whatever its text, it is raised and printed, although another rank has exited."""
    failed = failure_after_fit(work, tmp_path)
    assert f"{failed.failure.type_name}: {failed.failure.message}".startswith(error)
    assert error in failed.output, failed.story()


def need_another_rank() -> None:
    dist.all_reduce(torch.ones(1))


def test_a_collective_after_fit_names_the_rank_that_exited(tmp_path: Path) -> None:
    """The script gets the collective's own error; the rank prints it in one line with the
    script's line, and then one that names the rank that has exited.
    """
    failed = failure_after_fit(need_another_rank, tmp_path)
    assert failed.failure.type_name == "RuntimeError", failed.story()
    assert re.search(
        r"this exception probably follows from another rank's failure: RuntimeError: [^\n]*"
        r" \(\S+/test_error_origins\.py:\d+\)\n(.*\n)*.*RankFailedError: rank 1",
        failed.output,
    ), failed.story()


def wait_for_work(trainer: Any) -> None:
    """Wait in user code for a collective that the other rank, which dies, never enters."""
    if trainer.global_rank == 1:
        hold("dying")
    work = dist.all_reduce(torch.ones(1), async_op=True)
    announce("waiting")
    work.wait()


def fit_asynchronously(rank: int, world_size: int, directory: Path) -> None:
    fit("ours", directory, Net(), At("on_train_batch_end", wait_for_work))


def test_a_collective_that_user_code_waits_for_names_the_dead_rank(tmp_path: Path) -> None:
    """The backend raises in the user's own line, and the error still names the rank
    that died.
    """
    with RankProcesses(fit_asynchronously, 2, tmp_path) as ranks:
        ranks.wait_for("dying", 1)
        ranks.wait_for("waiting", 0)
        ranks.kill(1)
        survivor, died = ranks.wait()
    model.error_of(survivor, RankDiedError, 1, died.pid)
