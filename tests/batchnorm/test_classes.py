"""Layers that compute their forward pass themselves: named, unless somebody has said how they synchronise."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm
from torch.nn.utils import parametrize

from lightning_ddp_ext import SyncBatchNorm, convert_sync_batchnorm, register_converter, restore_batchnorm
from lightning_ddp_ext.errors import ConfigurationError
from tests.batchnorm.kinds import Functional

IMAGES = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class Helped(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return self.normalised(input) if self.training else super().forward(input)

    def normalised(self, input: Tensor) -> Tensor:
        return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True)


class ByName(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, input)


class BelowFunctional(Functional):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class SyncFunctional(SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * self.helper(super().forward(input))

    def helper(self, output: Tensor) -> Tensor:
        return output + 1


class Registered(Functional):
    """Has a converter for good; other classes with its forward have none."""


def left_alone(model: nn.Module, **options: Any) -> list[str]:
    """What warnings a conversion gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_sync_batchnorm(model, **options)
    assert all(warning.category is UserWarning and warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def replaced() -> nn.Module:
    layer: Any = nn.BatchNorm2d(3)
    layer.forward = lambda input: input
    return layer  # type: ignore[no-any-return]


def parametrised() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script
def test_layers_that_would_not_be_synchronised_are_named_once() -> None:
    """Those that never reach ``super().forward`` stay as they are; one warning has their names, types and reasons."""
    layers = [
        (Helped(3), "0 (Helped): its forward may normalise by itself; "),
        (ByName(3), "1 (ByName): its forward may normalise by itself; "),
        (BelowFunctional(3), "2 (BelowFunctional): its forward may normalise by itself; "),
        (replaced(), "3 (BatchNorm2d): its forward has been replaced on the object; "),
        (torch.jit.script(nn.BatchNorm2d(3)), "): it has been scripted before it could be converted; "),
        (parametrised(), "5 (ParametrizedBatchNorm2d): it is parametrised (remove the parametrisation first); "),
        (nn.LazyBatchNorm2d(), "6 (LazyBatchNorm2d): it is lazy (run a first batch before the conversion). "),
    ]
    model = nn.ModuleList([*(layer for layer, _ in layers), nn.BatchNorm2d(3)])
    types = [type(layer) for layer in model]
    (message,) = left_alone(model)
    assert [told for _, told in layers if told not in message] == []
    assert message.endswith("lightning_ddp_ext.register_converter, or leave them out with exclude=")
    assert [isinstance(layer, SyncBatchNorm) for layer in model] == [False] * 7 + [True]
    assert [type(layer) for layer in restore_batchnorm(model)] == types
    assert left_alone(nn.ModuleDict({"a": Functional(3)}), exclude="a") == []
    assert "the module (Functional): its forward" in left_alone(Functional(3))[0]


def test_a_class_that_cannot_be_made_is_an_error() -> None:
    """A class that wants arguments from its subclasses, say."""

    class Particular(nn.BatchNorm2d):
        def __init_subclass__(cls, *, kind: str) -> None: ...

    with pytest.raises(
        ConfigurationError, match=r"(?s)no class can be made of Particular and SyncBatchNorm: .* exclude="
    ):
        convert_sync_batchnorm(Particular(3))


def test_a_converter_takes_the_place_of_forward_and_of_nothing_else() -> None:
    """The layer stays the object it is, with the class's forward and methods until it is restored."""
    register_converter(Registered, SyncFunctional)
    layer: Any = Registered(3)
    layer.note = "mine"
    expected = 2 * (nn.BatchNorm2d(3)(IMAGES) + 1)
    assert convert_sync_batchnorm(layer) is layer
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(each, Registered)
        assert each(IMAGES).equal(expected)
        assert each.note == "mine"
    assert type(restore_batchnorm(layer)) is Registered
    assert layer(IMAGES).equal(nn.BatchNorm2d(3)(IMAGES))


def test_subclasses_have_their_base_s_converter_while_they_have_its_forward() -> None:
    """One with a forward of its own needs a converter of its own; the last one registered counts."""

    class Base(Functional): ...

    class Below(Base): ...

    class WithForward(Base):
        forward = BelowFunctional.forward

    register_converter(Base, SyncBatchNorm)
    register_converter(Base, SyncFunctional)
    assert isinstance(convert_sync_batchnorm(Below(3)), SyncFunctional)
    assert "WithForward" in left_alone(WithForward(3))[0]


@pytest.mark.parametrize(
    ("cls", "to_sync", "told"),
    [
        (nn.InstanceNorm2d, SyncFunctional, "cls must be a subclass of BatchNorm"),
        (Functional(3), SyncFunctional, "cls must be a subclass of BatchNorm"),
        (Functional, nn.SyncBatchNorm, "to_sync must be a subclass of SyncBatchNorm"),
        (Functional, lambda layer, group: layer, "to_sync must be a subclass .*; derive a class from"),
    ],
)
def test_what_cannot_be_a_converter_is_refused_at_once(cls: Any, to_sync: Any, told: str) -> None:
    """Also a class of layers that are never converted, whose converter would never be asked."""
    with pytest.raises(ConfigurationError, match=f"^{told}"):
        register_converter(cls, to_sync)
