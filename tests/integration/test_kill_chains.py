"""A run that is killed again and again, and started again each time, loses no finished step
and ends with the bits of an unbroken run.

``make soak`` draws chains of kills at random moments, for a model that draws no random
numbers.
"""

import os
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import ranks, training
from tests.harness.scripts import print_line
from tests.integration.early_ends import (
    BATCHES,
    EPOCHS,
    VALIDATION_BATCHES,
    Kill,
    Net,
    Plan,
    survive,
    train,
)

# Models whose weights depend on more than the batches.


class Hooked(Net):
    """Adds up the gradients' norms of all ranks before each step, and limits a weight after
    it.
    """

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = [weight.grad.norm() for weight in self.parameters() if weight.grad is not None]
        torch.distributed.all_reduce(torch.stack(norms))

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        self.layers[0].weight.clamp_(-0.3, 0.3)


class Skipping(Net):
    """Ends the first epoch in its fifth batch, which is not trained on."""

    def on_train_batch_start(self, batch: training.Batch, index: int) -> int | None:
        return -1 if self.current_epoch == 0 and index == 4 else None


class Manual(training.ByHand, Net):
    """Makes a step itself in each batch."""


# Chains of chosen kills.


@dataclass(frozen=True)
class Chain:
    """Kills of a run that is started again after each of them.

    Attributes:
        kills: that of the first run, of the second one, and so on.
        plan: the run.
        world_size: the number of ranks.
        may_miss: whether a run may end before the moment of its kill.
        is_nightly: whether only ``make nightly`` runs it.
    """

    kills: list[Kill]
    plan: Plan = field(default_factory=Plan)
    world_size: int = 2
    may_miss: bool = False
    is_nightly: bool = False


# Options of the strategy on three ranks, which sum gradients in another order after DDP has
# rebuilt its buckets. A resumed run would rebuild them anew; with this option, none does.
ON_THREE_RANKS = {"find_unused_parameters": True}
IN_STEP_AND_VALIDATION = [
    Kill("on_before_optimizer_step", earlier=9),
    Kill("on_validation_batch_start", earlier=1, ranks=[0]),
]
CHAINS = {
    # Either rank may be the survivor, within a step and between two epochs.
    "in steps": Chain(
        [
            Kill("on_after_backward", earlier=9, ranks=[0]),
            Kill("on_train_epoch_start", earlier=1),
            Kill("on_before_optimizer_step", earlier=3),
        ]
    ),
    # A kill in a validation loses none of the epoch's steps before it.
    "in validations within an epoch": Chain(
        [
            Kill("on_validation_start", earlier=1),
            Kill("on_validation_batch_end", earlier=2, ranks=[0]),
        ],
        Plan(trainer={"val_check_interval": 5}),
    ),
    # A run without a finished step keeps the file of the run before.
    "errors before a step finishes": Chain(
        [
            Kill("on_after_backward", earlier=9, by="error"),
            # From here on, no step has finished.
            Kill("setup", by="error"),
            Kill("on_train_start", ranks=[0], by="error"),
            Kill("on_train_batch_start", ranks=[0, 1], by="error"),
        ]
    ),
    # Batches of an unfinished step are trained on again.
    "within an accumulated step": Chain(
        [Kill("on_train_batch_end", earlier=6), Kill("on_after_backward", earlier=1, ranks=[0])],
        Plan(trainer={"accumulate_grad_batches": 5}),
    ),
    # Ranks that all fail by themselves save like survivors.
    "another call, and errors of all ranks": Chain(
        [
            Kill("on_before_backward", earlier=7, ranks=[0], by="other call"),
            Kill("on_validation_batch_start", earlier=1, ranks=[0, 1], by="error"),
            Kill("on_train_epoch_end", ranks=[0, 1], by="error"),
        ]
    ),
    # A weight that a hook changes after the step belongs to it.
    "hooks around a step": Chain(IN_STEP_AND_VALIDATION, Plan(model=Hooked)),
    # The model's own step is found as the Trainer's is.
    "manual": Chain(IN_STEP_AND_VALIDATION, Plan(model=Manual)),
    # The last step of an epoch, its validation and its end are not repeated.
    "at the end of an epoch": Chain(
        [
            Kill("on_validation_batch_start", earlier=1, ranks=[0]),
            Kill("on_train_epoch_end"),
            Kill("on_validation_end", ranks=[0]),
        ],
        is_nightly=True,
    ),
    # As above with one failing rank: the other one is a survivor.
    "another call, and errors": Chain(
        [
            Kill("on_before_backward", earlier=7, by="other call"),
            Kill("on_train_batch_start", earlier=7, by="error"),
            Kill("on_train_batch_end", earlier=6, ranks=[0], by="error"),
        ],
        is_nightly=True,
    ),
    # One of two survivors saves. The first kill interrupts an optimiser step; at the second
    # one, none has started.
    "one of three ranks": Chain(
        [
            Kill("on_before_backward", earlier=8, ranks=[2]),
            Kill("on_train_epoch_start", earlier=1, ranks=[2]),
        ],
        Plan(strategy=ON_THREE_RANKS),
        world_size=3,
        is_nightly=True,
    ),
    # A file that the Trainer has not written to its end does not replace an earlier one.
    "two of three ranks, and in a save": Chain(
        [
            Kill("on_before_backward", earlier=4, ranks=[0, 2]),
            Kill("writing", earlier=3, ranks=[0]),
            Kill("on_train_batch_end", earlier=2, by="error"),
        ],
        Plan(strategy=ON_THREE_RANKS),
        world_size=3,
        is_nightly=True,
    ),
    # An epoch that ends early has fewer steps than batches.
    "skipping": Chain(IN_STEP_AND_VALIDATION, Plan(model=Skipping), is_nightly=True),
    # Each rank continues its own order.
    "own draw on each rank": Chain(
        IN_STEP_AND_VALIDATION,
        Plan(trainer={"use_distributed_sampler": False}),
        is_nightly=True,
    ),
}

# Chains of random kills.

KILLS_OF_A_CHAIN = 3
FIRST_SEED = int(os.environ.get("SOAK_SEED", 0))
COUNT = int(os.environ.get("SOAK_COUNT", 0)) // KILLS_OF_A_CHAIN  # of chains
# Moments that a rank passes in a run, and among how many first calls a kill is drawn. A run
# that resumes late may make fewer (``may_miss``).
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


def draw(seed: int) -> Chain:
    """Return three kills at random moments."""
    chance = random.Random(seed)
    world_size = chance.choice((2, 3))
    options = chance.choice(({}, {"val_check_interval": 5}, {"accumulate_grad_batches": 5}))
    kills = [draw_kill(chance, world_size) for _ in range(KILLS_OF_A_CHAIN)]
    return Chain(
        kills,
        Plan(strategy=ON_THREE_RANKS if world_size == 3 else {}, trainer=options),
        world_size,
        may_miss=True,
    )


def draw_kill(chance: random.Random, world_size: int) -> Kill:
    """Return the kill of some ranks, but not of all, at a random moment."""
    moment = chance.choice([*MOMENTS])
    ranks = chance.sample(range(world_size), chance.randrange(1, world_size))
    if moment == "writing":
        ranks = [0]  # no other rank writes
    return Kill(moment, earlier=chance.randrange(MOMENTS[moment]), ranks=ranks)


RANDOM_CHAINS = {f"seed {seed}": draw(seed) for seed in range(FIRST_SEED, FIRST_SEED + COUNT)}


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param(chain, id=name, marks=[pytest.mark.nightly] if chain.is_nightly else [])
        for name, chain in {**CHAINS, **RANDOM_CHAINS}.items()
    ],
)
def test_a_chain_of_kills_is_survived(chain: Chain, tmp_path: Path) -> None:
    """No step that a survivor finished is lost, and the final state is that of a run without
    a fault, to the last bit.
    """
    killed = survive(
        chain.world_size, chain.plan, chain.kills, tmp_path / "killed", may_miss=chain.may_miss
    )
    unbroken = survive(chain.world_size, chain.plan, (), tmp_path / "unbroken")
    torch.testing.assert_close(killed, unbroken, rtol=0, atol=0)


# A batch with several steps.


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
    failed = ranks.launch_ranks(train, 2, Plan(fails, model=TwoOptimizers), tmp_path)
    assert any("saved step 9 to" in outcome.output for outcome in failed), ranks.stories(failed)
    resumed, _ = ranks.launch_ranks(train, 2, Plan(model=TwoOptimizers), tmp_path)
    assert resumed.exit_code == 0, resumed.story()
    batches = re.findall(r"^batch (\d+)$", resumed.output, re.MULTILINE)
    in_whole_run = [*range(BATCHES)] * EPOCHS
    assert [int(batch) for batch in batches] == in_whole_run[4:]
