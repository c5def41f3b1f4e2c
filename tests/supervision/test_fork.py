"""Runs whose ranks are forked functions end correctly: after a failure, after a kill,
after a signal.

The forking process has imported everything already; every test fails if one of its
processes is left.
"""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.errors import RankDiedError
from tests.harness.ranks import RankProcesses, rank_name, run_ranks
from tests.harness.training import At, Net
from tests.supervision import model


def train(rank: int, world_size: int, directory: Path, *faults: At, endless: bool = False) -> None:
    """Start two ranks from a process that is not a rank; ``endless``: until a signal.

    A survivor has five seconds to leave its step.
    """
    options = {
        "max_epochs": -1 if endless else 1,
        "limit_val_batches": 0,
        "default_root_dir": directory,
    }
    strategy = ddpx.DDPExtStrategy(start_method="fork", save_deadline=5)
    model.make_trainer(2, strategy, *faults, **options).fit(Net())


def pids_of_ranks(launching: RankProcesses) -> dict[int, int]:
    """Wait until both ranks have announced a step; their process ids by rank."""
    return dict(launching.wait_for("at work", 0) for _ in range(2))


def leave(*_: object) -> None:
    raise SystemExit(0)


@dataclass
class Failed:
    """What a launching process, and its two ranks, printed."""

    output: str
    who: list[str]  # how messages name each rank, such as "rank 1 (host a, pid 42)"

    @property
    def lines(self) -> list[str]:
        return model.lines_of(self.output)


def launch(directory: Path, *faults: At) -> Failed:
    """Fork two ranks with these faults; the launching process must exit with status 1."""
    start = At("setup", model.announce_step)
    with RankProcesses(train, 1, directory, start, *faults) as launching:
        pids = pids_of_ranks(launching)
        (outcome,) = launching.wait()
    assert outcome.exit_code == 1, outcome.story()
    return Failed(outcome.output, [rank_name(rank, pids[rank]) for rank in range(2)])


def test_the_launching_process_raises_the_exception_of_a_rank(tmp_path: Path) -> None:
    """The traceback of the rank that failed is the cause of the other one's error, of
    which that rank prints a line.
    """
    failed = launch(tmp_path, model.in_step(model.boom, 1))
    who = failed.who[1]
    line = f"[rank 0] RankFailedError: {who} failed, so this rank stops: BoomError: no such layer"
    assert line in failed.lines, failed.output
    assert failed.lines[-1].endswith("BoomError: no such layer"), failed.output
    assert '    raise BoomError("no such layer")' in failed.lines, failed.output


def test_the_launching_process_names_a_rank_that_died(tmp_path: Path) -> None:
    """The other rank, which is in a step, also names it."""
    failed = launch(tmp_path, model.in_step(model.wait_for_ever, 0), model.in_step(model.die, 1))
    who = failed.who[1]
    line = f"[rank 0] RankDiedError: {who} died: its process ended unexpectedly; every rank stops."
    assert any(each.startswith(line) for each in failed.lines), failed.output
    error = (
        f"lightning_ddp_ext.errors.RankDiedError: local {who} died: it was killed by SIGKILL;"
        " the other ranks were"
    )
    assert failed.lines[-1].startswith(error), failed.output


def test_the_launching_process_names_a_rank_that_left(tmp_path: Path) -> None:
    """A rank that exits with status 0 in the middle of its work is a failure."""
    failed = launch(tmp_path, model.in_step(leave))
    error = (
        f"lightning_ddp_ext.errors.RankFailedError: local {failed.who[0]} exited with status 0"
        " before it finished its work;"
    )
    assert failed.lines[-1].startswith(error), failed.output


class DiesBeforeConnecting(Net):
    """Dies on both ranks of a node, before they wait for those of other nodes."""

    def configure_callbacks(self) -> Any:
        model.die()


def train_second_node(rank: int, world_size: int) -> tuple[str, int]:
    """Return the beginning of the error, and the rank that died first on this node."""
    trainer = model.make_trainer(2, "ddp_ext_fork", num_nodes=2)
    with pytest.raises(RankDiedError, match=r"local rank \d .* killed by SIGKILL") as caught:
        trainer.fit(DiesBeforeConnecting())
    return str(caught.value)[: len("local rank 0")], caught.value.rank


def test_the_error_counts_the_ranks_of_all_nodes() -> None:
    """The two ranks on the second node are ranks 2 and 3."""
    env = {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    (named,) = run_ranks(train_second_node, 1, env=env)
    assert named in [("local rank 0", 2), ("local rank 1", 3)]


@pytest.mark.parametrize(
    ("number", "status", "sentence"),
    [
        (signal.SIGTERM, 143, "all ranks stop after step"),
        (signal.SIGINT, 1, "Detected KeyboardInterrupt"),
    ],
)
def test_a_signal_to_the_launching_process_alone_ends_the_ranks(
    number: int, status: int, sentence: str, tmp_path: Path
) -> None:
    """The ranks save and stop; SIGTERM and Ctrl-C give different exit statuses.

    In a notebook, only the kernel gets Ctrl-C, not its children.
    """
    in_third_step = At("on_train_batch_start", model.announce_step, earlier=2)
    with RankProcesses(train, 1, tmp_path, in_third_step, endless=True) as launching:
        pids_of_ranks(launching)
        launching.kill(0, number)
        (outcome,) = launching.wait()
    assert outcome.exit_code == status, outcome.story()
    assert sentence in outcome.output, outcome.story()
    assert list(tmp_path.rglob("last-preempted.ckpt"))
