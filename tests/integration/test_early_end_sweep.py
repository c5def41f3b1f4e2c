"""However a run fails, no finished step is lost: a rank saves, and the same command
continues to the bits of an unbroken run, for a model that draws no random numbers.

``make soak`` draws chains of kills at random moments.
"""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.early_ends import BATCHES, EPOCHS, VALIDATION_BATCHES, Kill, Plan, survive

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
