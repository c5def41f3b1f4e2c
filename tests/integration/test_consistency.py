"""`RankConsistency` finds ranks whose weights or optimisers have diverged in training, under
our strategy and under stock ``ddp``, by checksums that change with every bit.
"""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_ddp_ext import ConfigurationError, DivergenceError, RankConsistency
from lightning_ddp_ext.checksum import checksum
from tests.harness.training import (
    KINDS,
    At,
    Kind,
    Net,
    Sharded,
    fit,
    on_ranks,
    raised,
)

WEIGHT = "parameter layers.0.weight"
BIAS = "parameter layers.0.bias"
MOMENTUM = "optimizer 0: momentum_buffer of layers.3.weight"


@torch.no_grad()
def flip_bit(tensor: torch.Tensor) -> None:
    """Flip a bit of one element."""
    tensor.view(torch.uint8).view(-1)[0] ^= 1


def flip(names: Sequence[str], trainer: Any) -> None:
    """Flip a bit of each of these parameters or buffers."""
    for name in names:
        flip_bit(trainer.lightning_module.state_dict()[name])


flip_weight = partial(flip, ["layers.0.weight"])


def state_of_last(trainer: Any) -> Any:
    return trainer.optimizers[0].state[trainer.lightning_module.layers[3].weight]


def flip_momentum(trainer: Any) -> None:
    flip_bit(state_of_last(trainer)["momentum_buffer"])


def rename_momentum(trainer: Any) -> None:
    state = state_of_last(trainer)
    state["momentum_buffers"] = state.pop("momentum_buffer")


def in_step(change: Any, step: int = 2, rank: int = 1) -> At:
    """Return a callback with which one rank changes its model in a step."""
    return At("on_train_batch_end", change, earlier=step - 1, ranks=[rank])


def train(
    kind: Kind,
    directory: Path,
    change: At,
    every_n_steps: int = 1,
    options: dict[str, Any] | None = None,
    model: type[Net] = Net,
) -> DivergenceError | None:
    """Train four steps with a change; return the error of the consistency check, if any."""
    L.seed_everything(3)
    options = {"max_epochs": 1, "limit_val_batches": 0, **(options or {})}
    try:
        fit(kind, directory, model(), change, RankConsistency(every_n_steps), **options)
    except DivergenceError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("kind", "change", "every_n_steps", "options", "moment", "tensor"),
    [
        pytest.param(
            "ours",
            At("on_train_start", flip_weight, ranks=[1]),
            1,
            {},
            "at the start of training",
            WEIGHT,
            id="start",
        ),
        pytest.param(
            "ours",
            in_step(flip_momentum, 4),
            1,
            {},
            "after batch 4",
            MOMENTUM,
            id="optimiser state",
        ),
        pytest.param(
            "stock", in_step(rename_momentum, 4), 1, {}, "after batch 4", MOMENTUM, id="other names"
        ),
        pytest.param(
            "stock",
            in_step(flip_weight, 4),
            3,
            {},
            "at the end of training",
            WEIGHT,
            id="after the last check",
        ),
        pytest.param(  # checks count batches
            "stock",
            in_step(flip_weight, 3),
            1,
            {"accumulate_grad_batches": 2},
            "after batch 3",
            WEIGHT,
            id="accumulated step",
        ),
    ],
)
def test_a_difference_is_found(
    kind: Kind,
    change: At,
    every_n_steps: int,
    options: dict[str, Any],
    moment: str,
    tensor: str,
    tmp_path: Path,
) -> None:
    """Every rank raises an error at the next check, which names the tensor."""
    for error in on_ranks(kind, train, tmp_path, change, every_n_steps, options):
        assert str(error).startswith(f"the ranks differ {moment}: rank 1 in {tensor} (")


@pytest.mark.parametrize("kind", KINDS)
def test_running_statistics_may_differ(kind: Kind, tmp_path: Path) -> None:
    """Buffers are left out, because DDP sends those of rank 0 in the next step."""
    assert on_ranks(kind, train, tmp_path, in_step(partial(flip, ["layers.1.running_var"]))) == [
        None,
        None,
    ]


def test_the_error_names_the_first_tensor_and_the_ranks(tmp_path: Path) -> None:
    """Among three ranks, the error names the one that differs from the other two, its first
    tensor, and how many differ; its attributes name all of them.
    """
    change = in_step(partial(flip, ["layers.0.weight", "layers.0.bias"]), rank=0)
    for error in on_ranks("stock", train, tmp_path, change, 2, {"devices": 3}, world_size=3):
        assert str(error).startswith(
            f"the ranks differ after batch 2: rank 0 in {WEIGHT} (differing tensors: 2); "
        )
        assert (error.ranks, error.names) == ((0,), (WEIGHT, BIAS))


def test_a_sharded_optimiser_is_left_out(tmp_path: Path) -> None:
    """A state that each rank has of other parameters is not compared."""
    no_change = At("on_fit_end", str)
    assert on_ranks("ours", train, tmp_path, no_change, 1, None, Sharded) == [None, None]


def average(kind: Kind, directory: Path) -> str:
    """Train with local steps, after which models are averaged; return the error."""
    averaging = {
        "ddp_comm_state": PostLocalSGDState(None, None, 2),
        "model_averaging_period": 2,
    }
    return str(
        raised(
            ConfigurationError, fit, kind, directory, Net(), RankConsistency(), strategy=averaging
        )
    )


def test_models_that_are_averaged_are_refused(tmp_path: Path) -> None:
    """Every rank's error asks for a strategy whose ranks have the same model."""
    for message in on_ranks("stock", average, tmp_path):
        assert message.startswith(
            "RankConsistency needs a strategy with the same model on each rank"
        )


# Checksums.


DTYPES = [
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
    torch.float8_e5m2,
]
# Elements after which the hash's weights repeat; for those of more than 32 bits, a
# multiple of that number.
CHUNK = 32 * 1024


def content(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Random bits, NaN among them."""
    data = random.Random(0).randbytes(size * torch.empty(0, dtype=dtype).element_size())
    return torch.frombuffer(bytearray(data), dtype=dtype)


@given(st.sampled_from(DTYPES), st.integers(2, 3000) | st.integers(CHUNK - 2, CHUNK + 2), st.data())
def test_every_change_of_a_tensor_changes_its_checksum(
    dtype: torch.dtype, size: int, data: st.DataObject
) -> None:
    """A flipped bit changes it, and so do two different elements that swap places."""
    elements = content(dtype, size).view(torch.uint8).view(size, -1)
    before = checksum(elements.view(dtype))
    flipped = elements.clone()
    byte = data.draw(st.integers(0, flipped.numel() - 1))
    flipped.view(-1)[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(flipped.view(dtype)) != before
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    swapped = elements.clone()
    swapped[[one, other]] = elements[[other, one]]
    is_same = torch.equal(swapped, elements)
    assert (checksum(swapped.view(dtype)) == before) == is_same
