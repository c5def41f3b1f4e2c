"""Values reduced together: what all-reduces one by one would give, whoever has more of them, or others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import LogMismatchError
from lightning_ddp_ext.reductions.at_once import all_reduce
from lightning_ddp_ext.reductions.packed import OPS, Packed, Value, reduce_rows
from tests.ranks import run_ranks

CPU = torch.device("cpu")
NAMES: dict[str, list[list[str]]] = {  # by rank
    "one more": [["a", "b"], ["a", "b", "c"]],
    "none": [["a"], []],
    "another": [["a", "b"], ["a", "c"]],
    "another order": [["a", "b"], ["b", "a"]],
    "another op": [["a"], ["a:max"]],
    "more than a message": [[f"{n}" for n in range(40)], [f"{n}" for n in range(41)]],
}
TOLD = {
    "one more": "rank 1 logged c (sum) (as compared with rank 0)",
    "none": "rank 1 did not log a (sum)",
    "another": "rank 1 logged c (sum) and did not log b (sum)",
    "another order": "rank 1 logged in another order: b (sum), a (sum)",
    "another op": "rank 1 logged a (max) and did not log a (sum)",
    "more than a message": "rank 1 logged 40 (sum)",
    "another place": "rank 1 has a to reduce in validation_step, and not a in training_step",
}


def value_of(name: str, tensor: Tensor) -> Value:
    name, _, op = name.partition(":")
    return Value(name, op or "sum", tensor)


def open_group(rank: int, world_size: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)


def compare(rank: int, world_size: int, directory: Path) -> None:
    """With single all-reduces: values of all types, reduced in all ways, fewer and more than a message holds."""
    open_group(rank, world_size, directory)
    torch.manual_seed(rank)
    packed = Packed()
    for number in (1, 30, 12):
        packed.begin("a step")
        expected, values = [], []
        for index in range(number):
            for op in OPS:
                scale = 10.0 ** torch.randint(-3, 4, ()).item()
                dtype = (torch.float32, torch.float64, torch.int64)[index % 3]
                tensor = (torch.randn(()) * scale * (1 if dtype.is_floating_point else 1e9)).to(dtype)
                is_mean_of_integers = op == "mean" and not dtype.is_floating_point
                summed = all_reduce(tensor.clone(), None, "sum" if is_mean_of_integers else op)
                expected.append(summed / world_size if is_mean_of_integers else summed)
                values.append(Value(f"{index}", op, tensor))
                packed.add(values[-1])
        given = [value.tensor for value in values]
        assert packed.reduce(is_end=True, device=CPU)
        torch.testing.assert_close([value.tensor for value in values], expected, rtol=0, atol=0)
        assert all(value.tensor is tensor for value, tensor in zip(values, given, strict=True) if value.op != "mean")
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_are_those_of_single_all_reduces(world_size: int, tmp_path: Path) -> None:
    """To the last bit, with their types, in the tensors that were given."""
    run_ranks(compare, world_size, tmp_path)


def lone_readers(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Rank 0 wants its values after each that it adds, rank 1 after the second one, and rank 2 at the end."""
    open_group(rank, world_size, directory)
    packed, seen = Packed(), []
    packed.begin("a step")
    for number in range(1, 21):
        value = Value(f"{number}", "sum", torch.tensor(float(number)))
        packed.add(value)
        if rank == 0 or (rank == 1 and number == 2):
            packed.reduce(is_end=False, device=CPU)
            seen.append(value.tensor.item())
    had_any = packed.reduce(is_end=True, device=CPU)
    packed.begin("the next")
    had_none = packed.reduce(is_end=True, device=CPU)
    dist.destroy_process_group()
    return [seen, had_any, had_none]


def test_a_rank_may_want_its_values_before_the_others(tmp_path: Path) -> None:
    """It gets them from what the others have, now or later; and all ranks know whether there was any value."""
    by_rank = run_ranks(lone_readers, 3, tmp_path)
    assert by_rank == [[[3.0 * n for n in range(1, 21)], True, False], [[6.0], True, False], [[], True, False]]


def disagree(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    open_group(rank, world_size, directory)
    told = {}
    for case in (*NAMES, "another place"):
        packed = Packed()
        packed.begin("validation_step" if case == "another place" and rank == 1 else "training_step")
        for name in NAMES[case][min(rank, 1)] if case in NAMES else ["a"]:
            packed.add(value_of(name, torch.tensor(1.0)))
        try:
            packed.reduce(is_end=True, device=CPU)
        except LogMismatchError as error:
            told[case] = str(error)
    dist.destroy_process_group()
    return told


def test_ranks_with_different_values_all_hear_how_they_differ(tmp_path: Path) -> None:
    """Number, names, order, reduction or place: the error names the rank, and what it did otherwise than the other."""
    for told in run_ranks(disagree, 2, tmp_path):
        assert told.keys() == TOLD.keys()
        for case, sentence in TOLD.items():
            assert f"sync_dist=True: {sentence}" in told[case], told[case]


def leave_out(rank: int, world_size: int, directory: Path) -> list[float]:
    open_group(rank, world_size, directory)
    packed = Packed()
    packed.begin("a step")
    values = [Value(op, op, torch.tensor(float(2**rank))) for op in OPS]
    for value in values:
        packed.add(value)
    packed.reduce(is_end=True, device=CPU, absent=(2,))
    dist.destroy_process_group()
    return [value.tensor.item() for value in values]


def test_absent_ranks_do_not_count(tmp_path: Path) -> None:
    """They get the results of the others."""
    assert run_ranks(leave_out, 3, tmp_path) == [[1.5, 3.0, 1.0, 2.0]] * 3


@pytest.mark.parametrize("op", OPS)
def test_what_is_no_number_on_one_rank_is_none_anywhere(op: str) -> None:
    """Whichever rank it is; neighbours are not touched."""
    for rank in range(3):
        rows = torch.ones(3, 2)
        rows[rank, 0] = torch.nan
        assert reduce_rows(rows, op).isnan().tolist() == [True, False]
