"""Saves in the background copy one moment, keep their order, bound their memory, and
report their errors once.
"""

import io
import multiprocessing
from collections.abc import Callable
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.checkpoint.async_save import Saver
from lightning_ddp_ext.checkpoint.snapshot import Buffer, aligned
from tests.checkpoint.content import kinds, numbers, same, unusual
from tests.harness.ranks import launch_ranks, output_of_all

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


Call = Literal["save", "failing save", "remove"]


class Disk:
    """Where a Saver writes and removes in the background; fails for some paths."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.events: list[str] = []
        self.saver = Saver()

    def save(self, path: str) -> None:
        self.saver.save_later(path, {"x": numbers(1)}, lambda content: self._write(path))

    def _write(self, path: str) -> None:
        if path in self.failing:
            self.events.append(f"failed {path}")
            raise OSError(f"no room for {path}")
        self.events.append(f"wrote {path}")

    def remove(self, path: str) -> None:
        self.saver.follow_up(
            path, lambda: self.events.append(f"removed {path}"), later=True, postpone=True
        )


def expected_events(calls: list[Call]) -> list[str]:
    """Jobs run in the order of the calls, but a removal after a failed save waits until
    a save succeeds.
    """
    events: list[str] = []
    postponed: list[str] = []
    last_save_failed = False
    for number, call in enumerate(calls):
        if call == "remove":
            postponed.append(f"removed {number}")
        else:
            last_save_failed = call == "failing save"
            events.append(f"failed {number}" if last_save_failed else f"wrote {number}")
        if not last_save_failed:
            events += postponed
            postponed.clear()
    return events


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(get_args(Call)), max_size=8))
def test_saves_and_removals_keep_their_order(calls: list[Call]) -> None:
    """The order is that of ``expected_events``, and the first error is raised, once."""
    failing = [str(number) for number, call in enumerate(calls) if call == "failing save"]
    disk = Disk(*failing)
    for number, call in enumerate(calls):
        act = disk.remove if call == "remove" else disk.save
        act(str(number))
    if failing:
        with pytest.raises(OSError, match=rf"^no room for {failing[0]}$"):
            disk.saver.wait()
    disk.saver.wait()
    assert disk.events == expected_events(calls)


def test_a_checkpoint_that_outlived_a_failed_save_is_not_removed_once_it_is_saved_again() -> None:
    """A removal that waits for a save that succeeds is dropped if the save writes the
    same path.
    """
    disk = Disk("next")
    disk.save("next")
    disk.remove("last")
    disk.save("last")
    with pytest.raises(OSError, match="no room"):
        disk.saver.wait()
    assert disk.events == ["failed next", "wrote last"]


def save_and_exit(rank: int, world_size: int) -> None:
    Disk("it.ckpt").save("it.ckpt")


def fork(rank: int, world_size: int) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=save_and_exit, args=(rank, world_size)
    )
    process.start()
    process.join()


@pytest.mark.parametrize("work", [save_and_exit, fork])
def test_an_error_that_is_not_raised_is_logged(work: Callable[[int, int], None]) -> None:
    """The process waits for the save at its end, also if multiprocessing forked it."""
    assert output_of_all(launch_ranks(work, 1)).count("no room") == 1


def test_every_kind_of_tensor_is_taken() -> None:
    """The snapshot has the values of its moment, accepts what a save in the foreground
    accepts, and is saved exactly like the original.
    """
    content = kinds() | unusual()
    taken = Buffer().snapshot(content)
    for name, tensor in kinds().items():
        if tensor.layout == torch.strided and name != "expanded":
            content[name].detach().zero_()
    of_snapshot = as_saved(taken())
    of_original = as_saved(kinds() | unusual())
    assert [name for name in of_original if not same(of_snapshot[name], of_original[name])] == []


def as_saved(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_the_buffer_is_used_again() -> None:
    """New memory is allocated only for a snapshot that is larger than all before; views
    share one piece of it.
    """
    buffer = Buffer()
    sizes = list[int]()
    for length in (1000, 1000, 10, 999, 2000, 1000, 0):
        base = numbers(length)
        content = {
            "base": base,
            "again": base,
            "view": base[length // 2 :],
            "other": numbers(length // 2),
        }
        assert same(buffer.snapshot(content)(), content)
        sizes.append(buffer.size)
    # Of the numbers, 4 bytes each, of "base" and "other".
    for_1000 = aligned(4 * 1000) + aligned(4 * 500)
    for_2000 = aligned(4 * 2000) + aligned(4 * 1000)
    assert sizes == [for_1000] * 4 + [for_2000] * 3
