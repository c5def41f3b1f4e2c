"""A rank that dies costs no step: a survivor saves, and the same command continues to
the bits of an unbroken run.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_ddp_ext.checkpoint import rank_records
from tests.harness import ranks, training
from tests.harness.outcomes import stories
from tests.harness.scripts import run_script
from tests.integration import rescuing
from tests.integration.rescuing import Kill, Net, Plan

FIRST = int(os.environ.get("SOAK_SEED", 0))
# A chain has three kills, so that a third as many chains have as many faults.
COUNT = int(os.environ.get("SOAK_COUNT", 0)) // 3
ROOT = Path(__file__).resolve().parents[2]
Weights = list[dict[str, torch.Tensor]]  # by rank
# Three ranks sum gradients in another order after DDP has rebuilt its buckets, which a
# resumed run does anew.
OPTIONS: dict[int, dict[str, Any]] = {2: {}, 3: {"find_unused_parameters": True}}


@dataclass(frozen=True)
class Chain:
    """Kills of a run that is started again after each of them."""

    kills: list[Kill]
    world_size: int = 2
    trainer: dict[str, Any] = field(default_factory=dict)  # options


CHAINS = [
    Chain(
        [
            Kill("on_after_backward", earlier=9, ranks=[0]),
            Kill("on_train_batch_end", earlier=1),
            Kill("on_before_optimizer_step", earlier=3),
        ]
    ),
    pytest.param(
        Chain(
            [
                Kill("on_validation_batch_start", earlier=1, ranks=[0]),
                Kill("on_train_epoch_end"),
                Kill("on_validation_end", earlier=0, ranks=[0]),
            ]
        ),
        marks=pytest.mark.nightly,
    ),
    Chain(
        [
            Kill("on_validation_start", earlier=1),
            Kill("on_validation_batch_end", earlier=2, ranks=[0]),
        ],
        trainer={"val_check_interval": 5},
    ),
    # The first one interrupts an optimiser step; at the second one, none has started.
    pytest.param(
        Chain(
            [
                Kill("on_before_backward", earlier=8, ranks=[2]),
                Kill("on_train_epoch_start", earlier=1, ranks=[2]),
            ],
            world_size=3,
        ),
        marks=pytest.mark.nightly,
    ),
    Chain(
        [Kill("on_train_batch_end", earlier=6), Kill("on_after_backward", earlier=1, ranks=[0])],
        trainer={"accumulate_grad_batches": 5},
    ),
    pytest.param(
        Chain(
            [
                Kill("on_before_backward", earlier=4, ranks=[0, 2]),
                Kill("writing", earlier=3, ranks=[0]),
                Kill("on_train_batch_end", earlier=2, by="error"),
            ],
            world_size=3,
        ),
        marks=pytest.mark.nightly,
    ),
]


def drawn(seed: int) -> Chain:
    """Three kills at random moments."""
    chance = random.Random(seed)
    world_size = chance.choice((2, 3))
    options = chance.choice(({}, {"val_check_interval": 5}, {"accumulate_grad_batches": 5}))
    kills = []
    for _ in range(3):
        moment = chance.choice(list(rescuing.MOMENTS))
        killed = [0]  # which writes
        if moment != "writing":
            killed = chance.sample(range(world_size), chance.randrange(1, world_size))
        kills.append(Kill(moment, chance.randrange(rescuing.MOMENTS[moment]), killed))
    return Chain(kills, world_size, options)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Weights]:
    """Return the result of a run without a fault; each run is made once."""

    @functools.cache
    def run(world_size: int, **options: Any) -> Weights:
        plan = Plan(strategy=OPTIONS[world_size], trainer=options)
        return ranks.run_ranks(
            rescuing.train, world_size, plan, tmp_path_factory.mktemp("unbroken")
        )

    return run


# Code that changes the model outside of the optimiser.


class Momentum(Net):
    """Has an encoder whose weights follow those that are trained, before each forward
    pass.

    Args:
        change: how the weights are changed.
        since: the first step that does so.
    """

    def __init__(self, change: Callable[[Tensor, Tensor], object], since: int = 0) -> None:
        super().__init__()
        self.change = change
        self.since = since
        self.target = nn.Linear(4, 8).requires_grad_(False)

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        if self.global_step >= self.since:
            with torch.no_grad():
                for each, trained in zip(
                    self.target.parameters(), self.layers[0].parameters(), strict=True
                ):
                    self.change(each, 0.8 * each + 0.2 * trained)
        return (
            super().training_step(batch, index)
            + (self.target(batch[0]) - self.layers[0](batch[0])).square().mean()
        )


def assign(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter other memory; its version stays."""
    parameter.data = value


def assign_inside(parameter: Tensor, value: Tensor) -> None:
    """Change a parameter without a trace in its version."""
    parameter.data.copy_(value)


class Normalising(Net):
    """Scales trained weights before each forward pass."""

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        with torch.no_grad():
            self.layers[0].weight.mul_(0.9)
        return super().training_step(batch, index)


class Clipping(Net):
    """Limits trained weights after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.layers[0].weight.clamp_(-0.3, 0.3)


class OtherGenerator(Net):
    """Has NumPy draw from a generator that is not a Mersenne Twister."""

    def setup(self, stage: str) -> None:
        np.random.set_bit_generator(np.random.PCG64(7))


class Skipping(Net):
    """Ends the first epoch in its fifth batch, which is not trained on."""

    def on_train_batch_start(self, batch: training.Batch, index: int) -> int | None:
        return -1 if self.current_epoch == 0 and index == 4 else None


class Slow(Net):
    """Takes long for the backward pass of the sixth step on a rank that survives."""

    def on_before_backward(self, loss: Tensor) -> None:
        is_resumed = self.trainer.ckpt_path is not None
        if self.global_step == 5 and self.global_rank == 0 and not is_resumed:
            threading.Event().wait(rescuing.SLOW)


class Norms(Net):
    """Adds the gradients' norms of all ranks before each optimiser step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [each.grad.norm() for each in self.parameters() if each.grad is not None]
        dist.all_reduce(torch.stack(norms))


def test_a_rank_that_dies_before_the_optimiser_changes_weights(tmp_path: Path) -> None:
    """The other rank waits in a collective of a hook, and saves the five finished steps."""
    killed = Plan(Kill("on_before_optimizer_step", earlier=5), kind=Norms)
    survivor, _ = ranks.launch_ranks(rescuing.train, 2, killed, tmp_path)
    assert survivor.exit_code == 1
    assert rescuing.saved(tmp_path) == 5


TWO: dict[str, Any] = {"accumulate_grad_batches": 2}
CHANGED = [
    pytest.param(partial(Momentum, Tensor.copy_), {}, id="momentum by copy_"),
    pytest.param(partial(Momentum, assign), TWO, id="momentum by data ="),
    pytest.param(partial(Momentum, assign_inside), TWO, id="momentum by data.copy_"),
    (Normalising, {}),
    (Clipping, {}),
    (OtherGenerator, {}),
    (Skipping, {}),
]


@pytest.mark.parametrize(("kind", "options"), CHANGED)
def test_a_model_that_changes_outside_of_the_optimiser_continues_exactly(
    kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    """A momentum encoder in the file is that of the last finished step.

    This holds whichever way it is updated.
    """
    plan = Plan(trainer=options, kind=kind)
    kills = [
        Kill("on_before_backward", earlier=9, ranks=[0]),
        Kill("on_validation_batch_start", earlier=1),
        Kill("on_before_backward", earlier=3),
    ]
    ended = rescuing.survive(2, plan, kills, tmp_path)
    (tmp_path / "unbroken").mkdir()
    unbroken = ranks.run_ranks(rescuing.train, 2, plan, tmp_path / "unbroken")
    torch.testing.assert_close(ended, unbroken, rtol=0, atol=0)


@pytest.mark.parametrize("chain", [*CHAINS, *map(drawn, range(FIRST, FIRST + COUNT))], ids=str)
def test_a_chain_of_kills_is_survived(
    chain: Chain, unbroken: Callable[..., Weights], tmp_path: Path
) -> None:
    """No step that a survivor finished is lost.

    The final state is that of a run without a fault.
    """
    plan = Plan(strategy=OPTIONS[chain.world_size], trainer=chain.trainer)
    ended = rescuing.survive(chain.world_size, plan, chain.kills, tmp_path)
    whole = unbroken(chain.world_size, **chain.trainer)
    torch.testing.assert_close(ended, whole, rtol=0, atol=0)


def train_with_loggers(rank: int, world_size: int, directory: Path) -> None:
    """Kill rank 0 of a run in which loggers have different versions, as ``WandbLogger``
    has.
    """
    logger = CSVLogger(directory, version=f"of_rank_{rank}")
    kill = training.At("on_after_backward", Kill("on_after_backward", ranks=[0]).strike, earlier=2)
    strategy = training.make_strategy("ours", directory, rescue_checkpoint=rescuing.NAME)
    options: dict[str, Any] = {"callbacks": [kill], "logger": logger, "enable_checkpointing": True}
    training.make_trainer(
        strategy, **options, default_root_dir=directory, num_sanity_val_steps=0
    ).fit(Net())


def test_any_survivor_saves_where_rank_zero_would_look(tmp_path: Path) -> None:
    """Loggers may give the run's directory to rank 0 alone."""
    _, survivor = ranks.launch_ranks(train_with_loggers, 2, tmp_path)
    [saved_to] = tmp_path.rglob(rescuing.NAME)
    assert saved_to.parent.parent == tmp_path / "checkpoints", survivor.story()


def test_a_run_that_resumes_from_an_older_file_keeps_it(tmp_path: Path) -> None:
    """The older file may be the last one of another run."""
    ranks.run_ranks(rescuing.train, 2, Plan(trainer={"max_epochs": 1}), tmp_path)
    [older] = tmp_path.glob("*.ckpt")
    ranks.launch_ranks(rescuing.train, 2, Plan(Kill("on_after_backward", earlier=5)), tmp_path)
    ranks.run_ranks(rescuing.train, 2, Plan(trainer={"max_epochs": 2}, resumed=older), tmp_path)
    assert (tmp_path / rescuing.NAME).exists()


def train_twice(rank: int, world_size: int, kill: Kill | None, directory: Path) -> None:
    """Train in two fits of one script, of which a kill hits the second one."""
    for plan in (Plan(), Plan(kill)):
        rescuing.train(rank, world_size, plan, directory)


def test_the_fits_of_a_script_do_not_resume_from_each_others_rescue(tmp_path: Path) -> None:
    """The first one starts from the beginning, and the second one continues."""
    ranks.launch_ranks(train_twice, 2, Kill("on_after_backward", earlier=5), tmp_path)
    first, _ = ranks.launch_ranks(train_twice, 2, None, tmp_path)
    assert first.exit_code == 0, first.story()
    before, found, _ = first.output.partition(f"ckpt_path='last' is {tmp_path / rescuing.NAME}")
    assert found
    assert (
        f"{tmp_path / rescuing.NAME} belongs to a fit with another number in its script; pass its"
        " path" in before
    )
    assert not (tmp_path / rescuing.NAME).exists()


def test_a_rank_without_space_for_its_states_trains_on(
    unbroken: Callable[..., Weights], tmp_path: Path
) -> None:
    """Full shared memory does not end training."""
    ended = ranks.run_ranks(train_until_space_ends, 2, Plan(), tmp_path, writes=0)
    torch.testing.assert_close(ended, unbroken(2), rtol=0, atol=0)


def train_until_space_ends(
    rank: int, world_size: int, plan: Plan, directory: Path, *, writes: int
) -> Any:
    """Rank 0, which records the buffers, has space for so many writes; with 0 no rank
    has any.
    """
    left = iter(range(writes))
    pwrite = os.pwrite

    def write_first(*args: Any) -> int:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*args)

    with patch.object(os, "pwrite", pwrite if rank and writes else write_first):
        return rescuing.train(rank, world_size, plan, directory)


def test_buffers_of_an_earlier_step_are_not_saved(tmp_path: Path) -> None:
    """The rank that recorded them trained on without space for newer ones."""
    _, survivor = ranks.launch_ranks(
        train_until_space_ends,
        2,
        Plan(Kill("on_after_backward", earlier=8, ranks=[0])),
        tmp_path,
        writes=9,
    )
    assert (
        "did not save the last step: the buffers of this step are not recorded" in survivor.output
    ), survivor.story()
    assert not (tmp_path / rescuing.NAME).exists()


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_the_process_that_starts_ranks_lets_a_survivor_save(
    start_method: str, unbroken: Callable[..., Weights], tmp_path: Path
) -> None:
    """The process waits up to ``save_deadline`` for a slow save, and then raises.

    The step before the save also takes long; the error is the cause.
    """
    options = {"start_method": start_method}
    killed = Plan(Kill("on_before_backward", earlier=5), rescue="slow", strategy=options, kind=Slow)
    (outcome,) = ranks.launch_ranks(rescuing.train, 1, killed, tmp_path)
    assert "RankDiedError: local rank 1 " in outcome.output, outcome.story()
    assert rescuing.saved(tmp_path) >= 5
    (again,) = ranks.launch_ranks(rescuing.train, 1, Plan(strategy=options, kind=Slow), tmp_path)
    torch.testing.assert_close(again.result, unbroken(2)[0], rtol=0, atol=0)


ORPHANED = """
    import threading
    from pathlib import Path
    from tests.harness.training import At
    from tests.integration.rescuing import Kill, Plan, train

    stuck = At("on_exception", lambda trainer: threading.Event().wait())
    kill = Kill("on_after_backward", earlier=5, ranks=[0])
    popen = {"start_method": "popen"}
    train(0, 1, Plan(kill, strategy=popen, trainer={"callbacks": [stuck]}), Path.cwd())
"""


@pytest.mark.nightly
def test_a_rank_whose_launcher_was_killed_names_the_cause(tmp_path: Path) -> None:
    """It saves, and exits even if a hook is stuck."""
    # The shell's output ends when rank 1 exits, after the script.
    shell = ("sh", "-c", '(python "$0") 2>&1 | cat')
    script = run_script(ORPHANED, launcher=shell, cwd=tmp_path)
    assert "RankDiedError: rank 0 " in script.output, script.output
    assert rescuing.saved(tmp_path) >= 5


def test_another_survivor_saves_if_the_first_is_killed_meanwhile(tmp_path: Path) -> None:
    """The lock ends with its holder."""
    outcomes = ranks.launch_ranks(
        rescuing.train,
        3,
        Plan(Kill("on_after_backward", earlier=5, ranks=[0]), rescue="killed"),
        tmp_path,
    )
    assert sorted(outcome.exit_code for outcome in outcomes) == [-9, -9, 1], stories(outcomes)
    assert rescuing.saved(tmp_path) >= 5


def train_on_two_hosts(rank: int, world_size: int, plan: Plan, directory: Path) -> Any:
    """Each rank sees only its own records, as where the others are on other hosts."""
    rank_records._open = lambda path: None
    return rescuing.train(rank, world_size, plan, directory)


def test_a_rank_of_another_host_continues_with_random_states_from_the_seed(tmp_path: Path) -> None:
    """The survivor reports it, and no step is lost."""
    survivor, _ = ranks.launch_ranks(
        train_on_two_hosts, 2, Plan(Kill("on_after_backward", earlier=5)), tmp_path
    )
    said = (
        "; this host has no record of the random states of rank 1, so those states are derived from"
        " the seed"
    )
    assert said in survivor.output
    assert rescuing.saved(tmp_path) >= 5
    states = torch.load(tmp_path / rescuing.NAME, weights_only=True)["lightning_ddp_ext"]["ranks"]
    assert str(states[0]["random"]) != str(states[1]["random"])
    outcomes = ranks.launch_ranks(train_on_two_hosts, 2, Plan(), tmp_path)
    assert not any(outcome.exit_code for outcome in outcomes), stories(outcomes)


@pytest.mark.parametrize(
    ("rescue", "said"),
    [("full", "No space left on device"), ("stuck", "will finish writing its checkpoint")],
)
def test_a_disk_that_does_not_take_the_checkpoint_hides_no_error(
    rescue: str, said: str, tmp_path: Path
) -> None:
    """Each survivor names the rank that died, within ``save_deadline``."""
    plan = Plan(Kill("on_after_backward", earlier=5), rescue, {"save_deadline": 1})
    survivor, _ = ranks.launch_ranks(rescuing.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    assert said in survivor.output, survivor.story()
    assert "RankDiedError: rank 1 " in survivor.output
    assert not (tmp_path / rescuing.NAME).exists()


# What is not saved.


class Counting(Net):
    """Saves the state of a metric, which differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()
        self.seen.persistent(True)

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        self.seen.update(batch[0])
        return super().training_step(batch, index)


class Queue(Net):
    """Changes a buffer that is too large to be recorded, as MoCo's queue is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(1 << 19))  # 2 MiB

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        self.queue[index] = batch[0][0, 0]
        return super().training_step(batch, index)


class Shaking(Net):
    """Changes a trained weight before the sixth step's forward pass."""

    def on_train_batch_start(self, batch: training.Batch, index: int) -> None:
        if self.global_step == 5:
            self.layers[4].bias.data = self.layers[4].bias.data + 1


class SeveralClosures(Net):
    """Whose optimiser calls the closure three times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class Manual(Net):
    """Makes two steps itself in each batch."""

    automatic_optimization = False

    def training_step(self, batch: training.Batch, index: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()


class Sharded(Net):
    """Whose ranks each have a part of the optimiser's state."""

    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.05)


class Averaging(L.Callback):
    """Has other weights validated than are trained; as Lightning's own, it does not
    change their version counters.
    """

    def _swap(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for each in module.parameters():
            each.data.copy_(-each)

    on_validation_epoch_start = on_validation_epoch_end = _swap


THIRD = Kill("on_after_backward", earlier=2)
SIXTH = Kill("on_before_backward", earlier=5)
NO_STEP = "no step has finished since the start"
SANITY = (NO_STEP, Plan(Kill("on_sanity_check_end"), trainer={"num_sanity_val_steps": 2}))
REFUSED = [
    ("several times per step", Plan(Kill("on_after_backward", earlier=7), kind=SeveralClosures)),
    ("manual optimisation", Plan(Kill("on_after_backward", earlier=5), kind=Manual)),
    ("shard of the optimiser's state", Plan(THIRD, kind=Sharded)),
    (
        "weight averaging",
        Plan(Kill("on_validation_batch_start", earlier=1), trainer={"callbacks": [Averaging()]}),
    ),
    ("seen.mean_value has changed", Plan(SIXTH, kind=Counting)),
    ("queue has changed", Plan(SIXTH, kind=Queue)),
    ("target.weight may have changed", Plan(SIXTH, kind=partial(Momentum, assign_inside, since=5))),
    ("layers.4.bias may have changed", Plan(SIXTH, kind=Shaking)),
    (NO_STEP, Plan(Kill("on_before_backward"))),
    pytest.param(*SANITY, marks=pytest.mark.nightly),
    ("model_averaging_period", Plan(THIRD, strategy={"model_averaging_period": 2})),
    ('resume_data="stock"', Plan(THIRD, strategy={"resume_data": "stock"})),
]


@pytest.mark.parametrize(("reason", "plan"), REFUSED)
def test_what_could_be_a_wrong_checkpoint_is_refused(
    reason: str, plan: Plan, tmp_path: Path
) -> None:
    """A line next to the error gives the reason."""
    survivor, _ = ranks.launch_ranks(rescuing.train, 2, plan, tmp_path)
    assert survivor.exit_code == 1
    [line] = [
        line
        for line in survivor.output.splitlines()
        if "this rank did not save the last step: " in line
    ]
    assert reason in line
    assert "RankDiedError: rank 1 " in survivor.output
    assert not (tmp_path / rescuing.NAME).exists()


def test_a_place_without_locks_is_refused_at_the_start(tmp_path: Path) -> None:
    """Every rank raises, before it trains, if a path is in an object store."""
    plan = Plan(strategy={"rescue_checkpoint": "memory://run/it.ckpt"})
    for outcome in ranks.launch_ranks(rescuing.train, 2, plan, tmp_path):
        assert outcome.failure.type_name == "ConfigurationError"
        assert "(got memory://run/it.ckpt); pass a local path" in outcome.failure.message


def test_an_earlier_save_error_does_not_prevent_the_rescue(tmp_path: Path) -> None:
    """A survivor saves although an earlier save in the background failed.

    That error was not raised before the other rank died.
    """
    survivor, _ = ranks.launch_ranks(
        rescuing.train, 2, Plan(Kill("on_before_backward", earlier=15), rescue="only"), tmp_path
    )
    assert "saved step 15 to" in survivor.output, survivor.story()
    assert "cannot save checkpoint /dev/null/" in survivor.output


SCRIPT = """
    import os, signal, sys
    import lightning as L
    import torch
    from lightning_ddp_ext import DDPExtStrategy
    from tests.integration.rescuing import Net

    class Killed(Net):
        def on_after_backward(self):
            restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if restart == self.global_rank == 0 and self.trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_start(self):
            step = self.trainer.global_step
            sys.stdout.write(f"rank {self.global_rank} starts at step {step}\\n")

    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    quiet = dict.fromkeys(names, False)
    strategy = DDPExtStrategy(rescue_checkpoint="last-rescued.ckpt")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        num_sanity_val_steps=0,
        **quiet,
    )
    torch.manual_seed(0)
    trainer.fit(Killed(), ckpt_path="last")
    assert trainer.global_step == 24
"""


@pytest.mark.nightly
def test_torchrun_starts_the_ranks_again_where_they_were(tmp_path: Path) -> None:
    """Training continues with ``--max-restarts`` and ``"last"``.

    At the end no file is left.
    """
    launcher = ("torchrun", "--nproc-per-node=2", "--max-restarts=1")
    script = run_script(SCRIPT, launcher=launcher, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert script.exit_code == 0, script.output
    starts = [int(step) for step in re.findall(r"starts at step (\d+)", script.output)]
    assert starts in ([0, 0, 5, 5], [0, 0, 6, 6])
    assert not list(tmp_path.glob("*rescued*"))
