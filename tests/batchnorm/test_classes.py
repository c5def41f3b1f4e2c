"""Layers whose class has a forward of its own: left alone and named, or chosen and held to what they promise."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_ddp_ext import SyncBatchNorm, convert_sync_batchnorm, restore_batchnorm
from tests.batchnorm.kinds import Mixed, Scaled

IMAGES = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class Conditional(nn.BatchNorm2d):
    """Takes a second input."""

    def forward(self, input: Tensor, shift: Tensor) -> Tensor:
        return super().forward(input) + shift


def replaced() -> nn.Module:
    layer: Any = nn.BatchNorm2d(3)
    layer.forward = lambda input: input
    return layer  # type: ignore[no-any-return]


def parametrised() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def warnings_of(model: nn.Module, **choice: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_sync_batchnorm(model, **choice)
    assert all(warning.category is UserWarning and warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def test_layers_that_are_not_converted_are_named_in_one_warning() -> None:
    """They stay as they are; the warning has their names, classes and reasons, and the arguments that end it."""
    layers = [
        (Scaled(3), "0 (Scaled) overrides forward; "),
        (Mixed(3), "1 (Mixed) overrides forward; "),
        (replaced(), "2 (BatchNorm2d) had its forward replaced on the object; "),
        (parametrised(), "3 (ParametrizedBatchNorm2d) is parametrised (remove the parametrisation first); "),
        (nn.LazyBatchNorm2d(), "4 (LazyBatchNorm2d) is lazy (run a first batch before the conversion). A layer that "),
    ]
    model = nn.ModuleList([*(layer for layer, _ in layers), nn.BatchNorm2d(3)])
    types = [type(layer) for layer in model]
    (message,) = warnings_of(model)
    assert [told for _, told in layers if told not in message] == []
    assert message.endswith(
        "include= or predicate= of SyncBatchNormConversion chooses it; exclude= leaves a layer out without this warning"
    )
    assert [isinstance(layer, SyncBatchNorm) for layer in model] == [False] * 5 + [True]
    assert [type(layer) for layer in restore_batchnorm(model)] == types
    assert warnings_of(nn.Sequential(Scaled(3)), exclude="0") == []
    assert "the module (Scaled) overrides forward" in warnings_of(Scaled(3))[0]


@pytest.mark.parametrize("choice", [{"include": "*"}, {"include": nn.BatchNorm2d}, {"predicate": lambda *_: True}])
def test_a_chosen_layer_runs_its_own_forward(choice: dict[str, Any]) -> None:
    """With its further inputs, and with a mixin's forward; it is converted without a warning."""
    plain = nn.BatchNorm2d(3)
    for layer, inputs, expected in (
        (Scaled(3), (IMAGES,), 2 * plain(IMAGES)),
        (Mixed(3), (IMAGES,), plain(IMAGES.square())),
        (Conditional(3), (IMAGES, torch.ones(3, 1, 1)), plain(IMAGES) + 1),
    ):
        before = list(vars(layer))
        assert warnings_of(layer, **choice) == []
        assert isinstance(layer, SyncBatchNorm)
        torch.testing.assert_close(layer(*inputs), expected, rtol=0, atol=0)
        assert list(vars(restore_batchnorm(layer))) == before
