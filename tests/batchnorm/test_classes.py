"""Layers that compute their forward pass themselves: named, unless somebody has said how they synchronise."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_ddp_ext import SyncBatchNorm, convert_sync_batchnorm, register_converter, restore_batchnorm
from lightning_ddp_ext.batchnorm import classes
from lightning_ddp_ext.batchnorm.conversion import convert
from lightning_ddp_ext.errors import ConversionError
from tests.batchnorm import kinds
from tests.batchnorm.kinds import Functional, ReluAfterNormAct, Scaled

IMAGES = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class SyncFunctional(SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * self.helper(super().forward(input))

    def helper(self, output: Tensor) -> Tensor:
        return output + 1


class Below(Functional):
    """Has its base's forward."""


class BelowWithForward(Functional):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.batch_norm(input, None, None, training=True)


@pytest.fixture(autouse=True)
def _no_converters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "_registered", dict(classes._registered))


def left_alone(model: nn.Module) -> list[str]:
    """What warnings a conversion gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_sync_batchnorm(model)
    assert all(warning.category is UserWarning and warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


# Who needs one.


def test_layers_that_would_not_be_synchronised_are_named_once() -> None:
    """Those that never reach ``super().forward`` stay as they are; one warning has their names, types and reasons."""
    replaced: Any = nn.BatchNorm2d(3)
    replaced.forward = lambda input: input
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.BatchNorm2d(3))
        traced = torch.jit.trace(nn.Sequential(nn.BatchNorm2d(3)).eval(), IMAGES)
    alone = [kinds.Functional, kinds.Helped, kinds.ByName, kinds.BelowFunctional]
    parametrised, lazy = nn.BatchNorm2d(3), nn.LazyBatchNorm2d()
    parametrize.register_parametrization(parametrised, "weight", nn.Identity())
    others = [replaced, scripted, traced, parametrised, lazy]
    model = nn.ModuleList([*(kind(3) for kind in alone), *others, nn.BatchNorm2d(3)])
    types = [type(layer) for layer in model]
    (message,) = left_alone(model)
    reason = "its forward may normalise by itself"
    named = "; ".join(f"{number} ({kind.__name__}): {reason}" for number, kind in enumerate(alone))
    assert f"of each rank's own: {named}; 4 (BatchNorm2d): its forward has been replaced on the object; 5 (" in message
    assert message.count("it has been scripted") == 2
    assert "7 (ParametrizedBatchNorm2d): it is parametrised (remove the parametrisation first); " in message
    assert "8 (LazyBatchNorm2d): it is lazy (run a first batch before the conversion). " in message
    assert message.endswith("lightning_ddp_ext.register_converter, or leave them out with exclude=")
    assert [type(layer) for layer in model][:9] == types[:9]
    assert isinstance(model[9], SyncBatchNorm)
    assert [type(layer) for layer in restore_batchnorm(model)] == types


def test_only_layers_that_were_asked_for_are_named() -> None:
    """Who leaves such a layer out gets no warning, and a layer without a name is called the module."""
    conversion = convert(nn.ModuleDict({"a": Functional(3)}), exclude="a")
    assert conversion.left_alone == {"a": "in exclude"}
    assert conversion.warning() is None
    assert "the module (Functional): its forward" in left_alone(Functional(3))[0]
    assert left_alone(Scaled(3)) == []


def test_a_class_that_cannot_be_made_is_an_error() -> None:
    """A class that wants arguments from its subclasses, say, or a converter derived from the layer's class."""

    class Particular(nn.BatchNorm2d):
        def __init_subclass__(cls, *, kind: str) -> None: ...

    class Derived(Functional, SyncBatchNorm):
        pass

    register_converter(Functional, Derived)
    for layer, name in ((Particular(3), "Particular and SyncBatchNorm"), (Functional(3), "Functional and Derived")):
        with pytest.raises(ConversionError, match=f"(?s)no class can be made of {name}: .* exclude="):
            convert_sync_batchnorm(layer)
        assert not isinstance(layer, SyncBatchNorm)


# Converters.


def test_a_class_takes_the_place_of_forward_and_of_nothing_else() -> None:
    """The layer stays the object it is, with the class's forward and methods until it is restored."""
    register_converter(Functional, SyncFunctional)
    layer: Any = Functional(3)
    layer.note = "mine"
    expected = 2 * (nn.BatchNorm2d(3)(IMAGES) + 1)
    assert convert_sync_batchnorm(layer) is layer
    assert isinstance(layer, SyncFunctional)
    assert isinstance(layer, Functional)
    for each in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(each(IMAGES), expected)
        assert each.note == "mine"
    assert type(restore_batchnorm(layer)) is Functional
    assert layer(IMAGES).equal(nn.BatchNorm2d(3)(IMAGES))


def test_a_forward_replaced_on_the_object_wins_over_a_converter() -> None:
    """It would be called instead of the converter's, so the layer is named."""
    register_converter(Functional, SyncFunctional)
    layer: Any = Functional(3)
    layer.forward = lambda input: input
    assert "its forward has been replaced on the object" in left_alone(layer)[0]
    assert type(layer) is Functional


def test_subclasses_have_their_base_s_converter_while_they_have_its_forward() -> None:
    """One with a forward of its own needs a converter of its own; the last one registered counts."""
    register_converter(Functional, SyncFunctional)
    register_converter(Functional, SyncBatchNorm)
    assert type(convert_sync_batchnorm(Below(3))).__mro__[1:3] == (Below, Functional)
    assert "BelowWithForward" in left_alone(BelowWithForward(3))[0]
    register_converter(BelowWithForward, SyncFunctional)
    assert isinstance(convert_sync_batchnorm(BelowWithForward(3)), SyncFunctional)
    assert not isinstance(convert_sync_batchnorm(Functional(3)), SyncFunctional)


@pytest.mark.parametrize(
    ("cls", "to_sync", "told"),
    [
        (nn.InstanceNorm2d, SyncFunctional, "cls must be a subclass of BatchNorm"),
        (Functional(3), SyncFunctional, "cls must be a subclass of BatchNorm"),
        (Functional, nn.BatchNorm2d, "to_sync must be a subclass of SyncBatchNorm"),
        (Functional, nn.SyncBatchNorm, "to_sync must be a subclass of SyncBatchNorm"),
        (Functional, lambda layer, group: layer, "to_sync must be a subclass of SyncBatchNorm .*; derive a class from"),
    ],
)
def test_what_cannot_be_a_converter_is_refused_at_once(cls: Any, to_sync: Any, told: str) -> None:
    """Also a class of layers that are never converted, whose converter would never be asked."""
    with pytest.raises(ConversionError, match=f"^{told}"):
        register_converter(cls, to_sync)


def test_a_timm_subclass_with_its_own_forward_is_left_alone() -> None:
    """What it adds would be lost, and its ``super().forward`` ends in a layer that does not synchronise."""
    assert "ReluAfterNormAct" in left_alone(ReluAfterNormAct(3))[0]
