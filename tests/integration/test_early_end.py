"""However a run fails, no finished step is lost: a rank saves, whatever the model and
whatever happens meanwhile, to the place where the same command looks for it, and that
command continues to the bits of an unbroken run.

``make soak`` draws chains of kills at random moments, for a model that draws no random
numbers.
"""

import errno
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from tests.harness import ranks, training
from tests.harness.scripts import print_line
from tests.integration import early_ends
from tests.integration.early_ends import (
    BATCHES,
    EPOCHS,
    VALIDATION_BATCHES,
    FaultyIO,
    Kill,
    Net,
    Plan,
    survive,
)

# Steps before the kills; a survivor may also finish the step in which another rank dies.
FINISHED = 5
IN_SIXTH_STEP = Kill("on_after_backward", earlier=FINISHED)
RANK_ZERO_IN_SIXTH_STEP = Kill("on_after_backward", earlier=FINISHED, ranks=[0])


# Where the file is.


def train_with_own_names(rank: int, world_size: int, directory: Path, kill: Kill | None) -> int:
    """Train on ranks that have different command lines and, as with ``WandbLogger``,
    log directories; return the step at which training starts.
    """
    sys.argv = ["train.py", str(rank)]
    starts: list[int] = []
    start = training.At("on_train_start", lambda trainer: starts.append(trainer.global_step))
    training.fit(
        "ours",
        directory,
        Net(),
        *([start] if kill is None else [start, kill.callback()]),
        ckpt_path="last",
        logger=CSVLogger(directory, version=f"of_rank_{rank}"),
        enable_checkpointing=True,
        default_root_dir=directory,
    )
    return starts[0]


def test_rank_zero_finds_the_file_of_any_survivor(tmp_path: Path) -> None:
    """Rank 1 saves under the name, and as the run, for which rank 0 looks later."""
    ranks.launch_ranks(train_with_own_names, 2, tmp_path, RANK_ZERO_IN_SIXTH_STEP)
    starts = ranks.run_ranks(train_with_own_names, 2, tmp_path, None)
    assert min(starts) >= FINISHED


def test_a_run_that_resumes_from_another_file_keeps_the_last_step(tmp_path: Path) -> None:
    """Only a run that found the stop checkpoint by ``"last"`` removes it."""
    ranks.run_ranks(early_ends.train, 2, Plan(trainer={"max_epochs": 1}), tmp_path)
    [older] = tmp_path.glob("*.ckpt")
    ranks.launch_ranks(early_ends.train, 2, Plan(IN_SIXTH_STEP), tmp_path)
    ranks.run_ranks(early_ends.train, 2, Plan(trainer={"max_epochs": 2}, ckpt_path=older), tmp_path)
    assert list(tmp_path.rglob(early_ends.NAME))


# Faults while a survivor saves.


def fill_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_long() -> None:
    """Wait longer than a rank may run after a failure if it has nothing to save."""
    threading.Event().wait(6.0)


def kill_first(marker: Path) -> None:
    """Kill the first process that calls this."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class SlowInSixthStep(Net):
    """Waits on rank 0, which survives, before the sixth step's backward pass."""

    def on_before_backward(self, loss: Tensor) -> None:
        if self.global_step == FINISHED and self.global_rank == 0:
            wait_long()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_process_that_starts_ranks_lets_a_survivor_save(
    start_method: str, tmp_path: Path
) -> None:
    """The process waits for a slow step and a slow save, and then raises the cause."""
    strategy = {"start_method": start_method, "checkpoint_io": FaultyIO(wait_long)}
    kill = Kill("on_before_backward", earlier=FINISHED)
    plan = Plan(kill, strategy=strategy, model=SlowInSixthStep)
    [outcome] = ranks.launch_ranks(early_ends.train, 1, plan, tmp_path)
    assert "RankDiedError: local rank 1 " in outcome.output, outcome.story()
    assert early_ends.saved_step(tmp_path) >= FINISHED


def test_another_survivor_saves_if_the_first_is_killed_meanwhile(tmp_path: Path) -> None:
    """The kernel releases the lock of the rank that was killed while it saved."""
    io = FaultyIO(partial(kill_first, tmp_path / "killed"))
    plan = Plan(RANK_ZERO_IN_SIXTH_STEP, strategy={"checkpoint_io": io})
    outcomes = ranks.launch_ranks(early_ends.train, 3, plan, tmp_path)
    exit_codes = sorted(outcome.exit_code for outcome in outcomes)
    assert exit_codes == [-signal.SIGKILL, -signal.SIGKILL, 1], ranks.stories(outcomes)
    assert early_ends.saved_step(tmp_path) >= FINISHED


@pytest.mark.parametrize(
    ("fault", "save_deadline", "report"),
    [
        pytest.param(fill_disk, 60, "No space left on device", id="full disk"),
        pytest.param(
            training.wait_for_ever, 1, "will finish writing its checkpoint", id="stuck disk"
        ),
    ],
)
def test_a_disk_that_does_not_take_the_checkpoint_hides_no_error(
    fault: Callable[[], None], save_deadline: int, report: str, tmp_path: Path
) -> None:
    """The survivor also names the rank that died."""
    strategy = {"save_deadline": save_deadline, "checkpoint_io": FaultyIO(fault)}
    survivor, _ = ranks.launch_ranks(early_ends.train, 2, Plan(IN_SIXTH_STEP, strategy), tmp_path)
    assert survivor.exit_code == 1
    assert report in survivor.output, survivor.story()
    assert "RankDiedError: rank 1 " in survivor.output
    assert not list(tmp_path.rglob(early_ends.NAME))


# Models.


class Hooked(Net):
    """Adds up the gradients' norms of all ranks before each step, and limits a weight after
    it.
    """

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [weight.grad.norm() for weight in self.parameters() if weight.grad is not None]
        dist.all_reduce(torch.stack(norms))

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.layers[0].weight.clamp_(-0.3, 0.3)


class Skipping(Net):
    """Ends the first epoch in its fifth batch, which is not trained on."""

    def on_train_batch_start(self, batch: training.Batch, index: int) -> int | None:
        return -1 if self.current_epoch == 0 and index == 4 else None


class Manual(training.ByHand, Net):
    """Makes a step itself in each batch."""


CONTINUING = [
    pytest.param(Hooked, {}, id="hooks around a step"),
    pytest.param(Manual, {}, id="manual"),
    pytest.param(Skipping, {}, id="skipping", marks=pytest.mark.nightly),
    pytest.param(
        Net,
        {"use_distributed_sampler": False},
        id="own draw on each rank",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize(("model", "options"), CONTINUING)
def test_two_kills_leave_the_weights_of_an_unbroken_run(
    model: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """No finished step is lost, and the weights are those of an unbroken run, to the last
    bit.
    """
    plan = Plan(trainer=options, model=model)
    kills = [
        Kill("on_before_optimizer_step", earlier=9),
        Kill("on_validation_batch_start", earlier=1, ranks=[0]),
    ]
    killed = early_ends.survive(2, plan, kills, tmp_path / "killed")
    unbroken = early_ends.survive(2, plan, (), tmp_path / "unbroken")
    torch.testing.assert_close(killed, unbroken, rtol=0, atol=0)


class TwoOptimizers(Net):
    """Makes a step of each of two optimisers in each batch, and prints the batch."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, _, second = self.layers
        return [torch.optim.AdamW(layer.parameters(), lr=0.05) for layer in (first, second)]

    def training_step(self, batch: training.Batch, index: int) -> None:
        print_line(f"batch {index}")
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()


@pytest.mark.parametrize("by", ["kill", pytest.param("error", marks=pytest.mark.nightly)])
def test_a_batch_is_repeated_as_a_whole_if_a_second_optimiser_fails(
    by: str, tmp_path: Path
) -> None:
    """The first optimiser's step in it is saved, and made again."""
    fails = Kill("on_before_backward", earlier=9, by=by)  # in the fifth batch
    failed = ranks.launch_ranks(early_ends.train, 2, Plan(fails, model=TwoOptimizers), tmp_path)
    assert any("saved step 9 to" in outcome.output for outcome in failed), ranks.stories(failed)
    resumed, _ = ranks.launch_ranks(early_ends.train, 2, Plan(model=TwoOptimizers), tmp_path)
    assert resumed.exit_code == 0, resumed.story()
    batches = re.findall(r"^batch (\d+)$", resumed.output, re.MULTILINE)
    later = [*range(BATCHES)] * (EPOCHS - 1)
    assert [int(batch) for batch in batches] == [*range(4, BATCHES), *later]


# Models and options with which the weights may not be those of the last finished step.


class SeveralClosures(Net):
    """Has an optimiser that calls the closure three times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class InStep(Net):
    """Calls a collective in each step, after it has changed the weights; before that of the
    sixth step, rank 1 ends.
    """

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.global_step == 5 and self.global_rank == 1:
            Kill("").end_process()
        dist.all_reduce(torch.zeros(1))


class Exploding(Net):
    """Has weights that are not finite from the third step on."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            self.layers[0].weight[0, 0] = torch.inf


THIRD_STEP = Kill("on_after_backward", earlier=2)
EIGHTH_CALL = Kill("on_after_backward", earlier=7)  # in the third step of three calls each
MODEL_AVERAGING = {
    "ddp_comm_state": PostLocalSGDState(None, None, 2),
    "model_averaging_period": 2,
}
REFUSED = [
    ("had started to change the weights", Plan(EIGHTH_CALL, model=SeveralClosures)),
    ("had started to change the weights", Plan(model=InStep)),
    ("shard of the optimiser's state", Plan(THIRD_STEP, model=training.Sharded)),
    (
        "swapped the weights",
        Plan(Kill("on_validation_batch_start", earlier=1), callbacks=[WeightAveraging()]),
    ),
    ("not finite", Plan(Kill("on_before_backward", earlier=5), model=Exploding)),
    ("no step has finished since the start", Plan(Kill("on_before_backward"))),
    ("fast_dev_run", Plan(THIRD_STEP, trainer={"fast_dev_run": 5, "limit_train_batches": 5})),
    ("model_averaging_period", Plan(THIRD_STEP, strategy=MODEL_AVERAGING)),
    ('resume_data="stock"', Plan(THIRD_STEP, strategy={"resume_data": "stock"})),
]


@pytest.mark.parametrize(("reason", "plan"), REFUSED)
def test_a_survivor_does_not_save_a_checkpoint_that_could_be_wrong(
    reason: str, plan: Plan, tmp_path: Path
) -> None:
    """The survivor prints the reason next to the error that names the dead rank."""
    survivor, _ = ranks.launch_ranks(early_ends.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    _, refusal, rest = survivor.output.partition("this rank did not save the last step: ")
    assert refusal, survivor.story()
    assert reason in rest.splitlines()[0]
    assert "RankDiedError: rank 1 " in survivor.output
    assert not list(tmp_path.rglob(early_ends.NAME))


# Chains of kills.


KILLS_OF_A_CHAIN = 3
FIRST_SEED = int(os.environ.get("SOAK_SEED", 0))
COUNT = int(os.environ.get("SOAK_COUNT", 0)) // KILLS_OF_A_CHAIN  # of chains
# Moments that a rank passes in a run, and how often at least.
MOMENTS = {
    "on_train_epoch_start": EPOCHS - 1,
    "on_train_batch_start": BATCHES,
    "on_before_backward": BATCHES,
    "on_after_backward": BATCHES,
    "on_before_optimizer_step": BATCHES // 2,
    "on_before_zero_grad": BATCHES // 2,
    "on_train_batch_end": BATCHES,
    "on_validation_start": EPOCHS - 1,
    "on_validation_batch_start": (EPOCHS - 1) * VALIDATION_BATCHES,
    "on_validation_batch_end": (EPOCHS - 1) * VALIDATION_BATCHES,
    "on_validation_end": EPOCHS - 1,
    "on_train_epoch_end": EPOCHS - 1,
    "writing": 2 * EPOCHS,
}


@dataclass(frozen=True)
class Chain:
    """Kills of a run that is started again after each of them."""

    kills: list[Kill]
    world_size: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)  # options
    may_miss: bool = False  # whether a run may end before the moment of its kill

    @property
    def plan(self) -> Plan:
        # Three ranks sum gradients in another order after DDP has rebuilt its buckets,
        # which a resumed run does anew; with this option DDP does not rebuild them.
        strategy = {"find_unused_parameters": True} if self.world_size == 3 else {}
        return Plan(strategy=strategy, trainer=self.trainer)


CHAINS = [
    Chain(
        [
            Kill("on_after_backward", earlier=9, ranks=[0]),
            Kill("on_train_epoch_start", earlier=1),
            Kill("on_before_optimizer_step", earlier=3),
        ]
    ),
    Chain(
        [
            Kill("on_validation_start", earlier=1),
            Kill("on_validation_batch_end", earlier=2, ranks=[0]),
        ],
        trainer={"val_check_interval": 5},
    ),
    # After the first one, no step has finished.
    Chain(
        [
            Kill("on_after_backward", earlier=9, by="error"),
            Kill("setup", by="error"),
            Kill("on_train_start", ranks=[0], by="error"),
            Kill("on_train_batch_start", ranks=[0, 1], by="error"),
        ]
    ),
    Chain(
        [Kill("on_train_batch_end", earlier=6), Kill("on_after_backward", earlier=1, ranks=[0])],
        trainer={"accumulate_grad_batches": 5},
    ),
    Chain(
        [
            Kill("on_before_backward", earlier=7, ranks=[0], by="other call"),
            Kill("on_validation_batch_start", earlier=1, ranks=[0, 1], by="error"),
            Kill("on_train_epoch_end", ranks=[0, 1], by="error"),
        ]
    ),
]
NIGHTLY_CHAINS = [
    Chain(
        [
            Kill("on_validation_batch_start", earlier=1, ranks=[0]),
            Kill("on_train_epoch_end"),
            Kill("on_validation_end", ranks=[0]),
        ]
    ),
    Chain(
        [
            Kill("on_before_backward", earlier=7, by="other call"),
            Kill("on_train_batch_start", earlier=7, by="error"),
            Kill("on_train_batch_end", earlier=6, ranks=[0], by="error"),
        ]
    ),
    # The first one interrupts an optimiser step; at the second one, none has started.
    Chain(
        [
            Kill("on_before_backward", earlier=8, ranks=[2]),
            Kill("on_train_epoch_start", earlier=1, ranks=[2]),
        ],
        world_size=3,
    ),
    Chain(
        [
            Kill("on_before_backward", earlier=4, ranks=[0, 2]),
            Kill("writing", earlier=3, ranks=[0]),
            Kill("on_train_batch_end", earlier=2, by="error"),
        ],
        world_size=3,
    ),
]


def draw(seed: int) -> Chain:
    """Return three kills at random moments."""
    chance = random.Random(seed)
    world_size = chance.choice((2, 3))
    options = chance.choice(({}, {"val_check_interval": 5}, {"accumulate_grad_batches": 5}))
    kills = [draw_kill(chance, world_size) for _ in range(KILLS_OF_A_CHAIN)]
    return Chain(kills, world_size=world_size, trainer=options, may_miss=True)


def draw_kill(chance: random.Random, world_size: int) -> Kill:
    """Return the kill of some ranks, but not of all, at a random moment."""
    moment = chance.choice([*MOMENTS])
    ranks = chance.sample(range(world_size), chance.randrange(1, world_size))
    if moment == "writing":
        ranks = [0]  # no other rank writes
    return Kill(moment, earlier=chance.randrange(MOMENTS[moment]), ranks=ranks)


@pytest.mark.parametrize(
    "chain",
    [
        *CHAINS,
        *(pytest.param(chain, marks=pytest.mark.nightly) for chain in NIGHTLY_CHAINS),
        *(draw(seed) for seed in range(FIRST_SEED, FIRST_SEED + COUNT)),
    ],
    ids=str,
)
def test_a_chain_of_kills_is_survived(chain: Chain, tmp_path: Path) -> None:
    """No step that a survivor finished is lost.

    The final state is that of a run without a fault.
    """
    killed = survive(
        chain.world_size, chain.plan, chain.kills, tmp_path / "killed", may_miss=chain.may_miss
    )
    unbroken = survive(chain.world_size, chain.plan, (), tmp_path / "unbroken")
    torch.testing.assert_close(killed, unbroken, rtol=0, atol=0)
