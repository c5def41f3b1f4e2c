"""Values reduced together: what all-reduces one by one would give, or an error that says how ranks differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import LogMismatchError
from lightning_ddp_ext.reductions.all_reduce import all_reduce
from lightning_ddp_ext.reductions.batched import DTYPES, OPS, Value, reduce_batch
from tests.harness.ranks import run_ranks

NAMES: dict[str, list[list[str]]] = {  # by rank
    "one more": [["a", "b"], ["a", "b", "c"]],
    "none": [["a"], []],
    "another": [["a", "b"], ["a", "c"]],
    "another order": [["a", "b"], ["b", "a"]],
    "another op": [["a"], ["a:max"]],
    "more than a message": [[f"{n}" for n in range(70)], [f"{n}" for n in range(71)]],
    "many others": [[], [f"{n}" for n in range(70)]],
}
TOLD = {
    "one more": "rank 1 logged c (sum) (as compared with rank 0)",
    "none": "rank 1 did not log a (sum)",
    "another": "rank 1 logged c (sum) and did not log b (sum)",
    "another order": "rank 1 logged in another order: b (sum), a (sum)",
    "another op": "rank 1 logged a (max) and did not log a (sum)",
    "more than a message": "rank 1 logged 70 (sum)",
    "many others": "rank 1 logged 0 (sum), 1 (sum), 2 (sum), 3 (sum), 4 (sum), 5 (sum), 6 (sum), 7 (sum), ... (as",
}


def value_of(name: str, tensor: Tensor) -> Value:
    name, _, op = name.partition(":")
    return Value(name, op or "sum", tensor)


def reduced(values: Sequence[Value], idle_ranks: tuple[int, ...] = ()) -> list[Tensor]:
    return reduce_batch(values, device=torch.device("cpu"), idle_ranks=idle_ranks)


def open_group(rank: int, world_size: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)


def some_values(number: int) -> list[Value]:
    """Of all types, to be reduced in all ways."""
    values = []
    for index in range(number):
        for op in OPS:
            scale = 10.0 ** torch.randint(-3, 4, ()).item()
            dtype = DTYPES[index % len(DTYPES)]
            values.append(Value(f"{index}", op, (torch.randn(()) * scale).to(dtype)))
    return values


def compare(rank: int, world_size: int, directory: Path, idle_ranks: tuple[int, ...]) -> list[float]:
    """With single all-reduces: fewer values and more than a message holds."""
    open_group(rank, world_size, directory)
    torch.manual_seed(rank)
    found = []
    for number in (1, 30, 12):
        values = some_values(number)
        own = [value.tensor.clone() for value in values]
        results = reduced(values, idle_ranks)
        assert all(value.tensor.equal(before) for value, before in zip(values, own, strict=True))
        expected = [all_reduce(value.tensor, None, value.op, idle_ranks=idle_ranks) for value in values]
        exactly = {"rtol": 0, "atol": 0} if world_size - len(idle_ranks) == 2 else {}
        torch.testing.assert_close(results, expected, **exactly)  # type: ignore[arg-type]
        found += [float(result) for result in results]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("world_size", "idle_ranks"), [(2, ()), (4, ()), (3, (2,)), (4, (0,))])
def test_results_are_those_of_single_all_reduces(world_size: int, idle_ranks: tuple[int, ...], tmp_path: Path) -> None:
    """With their types and without idle ranks, the same on every rank, and of two ranks to the last bit."""
    first, *others = run_ranks(compare, world_size, tmp_path, idle_ranks)
    assert all(other == first for other in others)


def disagree(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    open_group(rank, world_size, directory)
    told = {}
    for case, names in NAMES.items():
        try:
            reduced([value_of(name, torch.tensor(1.0)) for name in names[min(rank, 1)]])
        except LogMismatchError as error:
            told[case] = str(error)
    dist.destroy_process_group()
    return told


def test_ranks_with_different_values_all_hear_how_they_differ(tmp_path: Path) -> None:
    """Number, names, order or reduction: the error names the rank, and what it did otherwise than the other."""
    for told in run_ranks(disagree, 2, tmp_path):
        assert told.keys() == TOLD.keys()
        for case, sentence in TOLD.items():
            assert f"sync_dist=True: {sentence}" in told[case], told[case]


def leave_out(rank: int, world_size: int, directory: Path) -> list[float]:
    open_group(rank, world_size, directory)
    values = [Value(op, op, torch.tensor(float(2**rank))) for op in OPS]
    results = reduced(values, idle_ranks=(2,))
    dist.destroy_process_group()
    return [result.item() for result in results]


def test_idle_ranks_do_not_count(tmp_path: Path) -> None:
    """They get the results of the others."""
    assert run_ranks(leave_out, 3, tmp_path) == [[1.5, 3.0, 1.0, 2.0]] * 3


def some_are_no_number(rank: int, world_size: int, directory: Path) -> list[list[bool]]:
    open_group(rank, world_size, directory)
    found = []
    for odd in range(world_size):
        own = torch.tensor(torch.nan if rank == odd else 1.0)
        values = [value for op in OPS for value in (Value(op, op, own), Value("whole", op, torch.tensor(1.0)))]
        found.append([bool(result.isnan()) for result in reduced(values)])
    dist.destroy_process_group()
    return found


def test_what_is_no_number_on_one_rank_is_none_anywhere(tmp_path: Path) -> None:
    """Whichever rank it is, and however it is reduced; neighbours are not touched."""
    assert run_ranks(some_are_no_number, 3, tmp_path) == [[[True, False] * len(OPS)] * 3] * 3
