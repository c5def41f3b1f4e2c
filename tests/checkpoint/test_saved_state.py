"""What a survivor restores of a module, and what must not have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_ddp_ext.checkpoint.fixed_values import FixedValues
from lightning_ddp_ext.checkpoint.recorded_buffers import RecordedBuffers
from lightning_ddp_ext.checkpoint.saved_parameters import SavedParameters

pytestmark = pytest.mark.unit


class Copies(TorchFunctionMode):
    """Counts the copies to CPU memory that would wait for a GPU."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is Tensor.cpu
        return func(*args, **(kwargs or {}))


def test_buffers_are_copied_from_the_device_together() -> None:
    """ResNet-50 has 159 of them, and each copy from a GPU waits for it."""
    buffers = RecordedBuffers(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(3))))
    with Copies() as copies:
        noted = buffers.read(even_if_same=True)
    assert (copies.count, len(noted)) == (1, 3 * (2 * 2 * 4 + 8))


def test_recorded_buffers_are_restored() -> None:
    """However they were changed, and whatever their memory looks like."""
    module = nn.Module()
    module.register_buffer("few", torch.ones(2))
    module.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    module.register_buffer("none", torch.zeros(0))
    buffers = RecordedBuffers(module)
    noted = buffers.read(even_if_same=False)
    assert buffers.read(even_if_same=False) == b""
    assert buffers.restore(noted)
    for change in (module.few.add_, module.turned.add_, module.few.data.add_):
        change(1)
        noted = buffers.read(even_if_same=True)
    module.few = torch.zeros(2)
    module.turned.zero_()
    assert buffers.restore(noted)
    assert module.few.tolist() == [3.0, 3.0]
    assert module.turned.tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    assert not buffers.restore(noted[1:])


class Holder(nn.Module):
    """Saves a value that is neither a parameter nor a buffer."""

    value: Any = None

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_a_change_of_other_saved_values_is_found() -> None:
    """At most a MiB of buffers is noted; sparse ones, and those made later, are not."""
    module = Holder()
    module.value = {"seen": [torch.zeros(2), 1]}
    module.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    for number in range(5):
        module.register_buffer(f"mask {number}", torch.zeros(1 << 17, dtype=torch.float16))
    module.register_buffer("graph", torch.eye(2).to_sparse())
    module.register_buffer("late", None)
    buffers = RecordedBuffers(module)
    assert len(buffers.read(even_if_same=True)) == 1 << 20
    fixed = FixedValues(module, lambda: (*module.parameters(), *buffers.tensors()))

    def found(change: Any, undo: Any) -> str | None:
        change()
        name = fixed.find_changed()
        undo()
        assert fixed.find_changed() is None
        return name

    def set_late(value: Tensor | None) -> None:
        module.late = value

    def count(step: int) -> None:
        module.value["seen"][1] += step

    assert found(lambda: module.weight.data.add_(1), lambda: None) is None
    assert found(lambda: buffers.tensors()[0].add_(1), lambda: None) is None
    assert found(
        lambda: module.get_buffer("mask 4").data.add_(1),
        lambda: module.get_buffer("mask 4").zero_(),
    )
    assert found(lambda: set_late(torch.zeros(1)), lambda: set_late(None)) == "late"
    assert found(lambda: count(1), lambda: count(-1)) == "_extra_state"
    module.graph.mul_(2)
    assert fixed.find_changed() == "graph"


def test_a_recorded_empty_tensor_exempts_no_other_empty_value() -> None:
    """It may grow, but another empty value must keep its shape."""
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(0))
    module.register_buffer("seen", torch.zeros(0, 3))
    fixed = FixedValues(module, lambda: [module.get_buffer("queue")])
    assert fixed.find_changed() is None
    module.register_buffer("queue", torch.zeros(2))
    assert fixed.find_changed() is None
    module.register_buffer("seen", torch.zeros(0, 4))
    assert fixed.find_changed() == "seen"


class Pair(nn.Module):
    """A trained parameter, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture
def saved(pair: Pair) -> SavedParameters:
    parameters = SavedParameters(pair)
    parameters.start_epoch()
    return parameters


def step(saved: SavedParameters, module: Pair) -> None:
    saved.start_step()
    saved.before_backward()
    module.trained.data.add_(1)
    saved.end_step()


def test_a_parameter_that_begins_to_change_late_is_unknown_at_first_and_restored_later(
    pair: Pair, saved: SavedParameters
) -> None:
    """Contents are compared only now and then, but a change is found before anything is
    saved.
    """
    for _ in range(3):
        step(saved, pair)
    is_known = False
    while not is_known:
        saved.start_step()
        expected = pair.frozen.tolist()
        pair.frozen.data.add_(1)
        unknown = saved.undo(step=True)
        is_known = unknown is None
        assert unknown in (None, "frozen")
        assert not is_known or pair.frozen.tolist() == expected
        saved.before_backward()
    assert expected != [0.0, 0.0]


def test_a_parameter_that_changed_in_the_first_step_that_was_compared_is_unknown(
    pair: Pair, saved: SavedParameters
) -> None:
    """It was found to change only after it had."""
    step(saved, pair)
    saved.start_step()
    pair.frozen.data.add_(1)
    saved.before_backward()
    assert saved.undo(step=True) == "frozen"
    assert saved.undo(step=False) is None


def test_parameters_may_be_frozen_and_replaced_between_epochs_only(
    pair: Pair, saved: SavedParameters
) -> None:
    """A new epoch notes the parameters anew; within one a replaced parameter is named."""
    step(saved, pair)
    pair.trained.requires_grad_(False)
    pair.frozen = nn.Parameter(torch.ones(2))
    saved.start_epoch()
    saved.start_step()
    assert saved.undo(step=True) is None
    pair.frozen = nn.Parameter(torch.ones(2))
    assert saved.undo(step=True) == "a parameter that was added or replaced in this epoch"
