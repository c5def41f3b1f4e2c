"""Conversion makes the chosen layers synchronise, and is undone exactly."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ddp_ext import (
    ConfigurationError,
    SyncBatchNorm,
    convert_sync_batchnorm,
    restore_batchnorm,
)


class Scaled(nn.BatchNorm2d):
    """A class of a user, with another layer inside."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.second = nn.BatchNorm2d(num_features)

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def network() -> nn.Module:
    """Return layers stem.1, body.0.norm, body.1.norm and head."""
    stem = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    body = [
        nn.ModuleDict({"conv": nn.Conv2d(3, 3, 1), "norm": norm})
        for norm in (nn.BatchNorm2d(3), nn.BatchNorm3d(3))
    ]
    return nn.ModuleDict({"stem": stem, "body": nn.Sequential(*body), "head": nn.BatchNorm1d(3)})


def synchronised(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)]


def identities(model: nn.Module) -> list[Any]:
    """Return all that a conversion must not change: objects by their ids, and the order of
    attributes.
    """
    modules = [
        (name, id(module), type(module), type(module).__mro__, module.training, list(vars(module)))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    tensors = [
        (name, id(tensor), tensor.requires_grad)
        for name, tensor in model.state_dict(keep_vars=True).items()
    ]
    return [*modules, *tensors]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ["stem.1", "body.0.norm", "body.1.norm", "head"]),
        ({"include": "body.*"}, ["body.0.norm", "body.1.norm"]),
        ({"include": "body.?"}, ["body.0.norm", "body.1.norm"]),
        ({"include": ["stem", "h*"]}, ["stem.1", "head"]),
        ({"include": (name for name in ("stem.1", "head"))}, ["stem.1", "head"]),
        ({"include": []}, []),
        ({"include": "body", "exclude": "body.1"}, ["body.0.norm"]),
        ({"exclude": {"body", "stem.?"}}, ["head"]),
    ],
)
def test_chosen_layers_are_converted(arguments: dict[str, Any], names: list[str]) -> None:
    """Names and patterns choose layers, or modules that contain them."""
    assert synchronised(convert_sync_batchnorm(network(), **arguments)) == names


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (
            {"include": ["stem", "backbone.*"]},
            r"^include='backbone\.\*' matches no BatchNorm layer; choose among stem",
        ),
        (
            {"exclude": ["stem", "*.weight"]},
            r"^exclude='\*\.weight' matches no .* head, or modules that contain them\n",
        ),
        ({"exclude": nn.Conv2d(3, 3, 1)}, r"^exclude takes patterns of layer names \(got Conv2d"),
        ({"include": nn.BatchNorm1d}, r"^include takes patterns .*; for any .* a list of names"),
        ({"include": [["stem"]]}, r"^include takes patterns of layer names \(got \['stem'\]"),
    ],
)
def test_a_selection_of_nothing_is_an_error(selection: dict[str, Any], message: str) -> None:
    """The error names the selector and the model's layers, and nothing is converted."""
    model = network()
    with pytest.raises(ConfigurationError, match=message):
        convert_sync_batchnorm(model, **selection)
    assert synchronised(model) == []


def test_layers_that_were_not_meant_are_not_touched() -> None:
    """Other norms and layers that synchronise already do not change.

    They are neither converted nor restored.
    """
    model = nn.Sequential(
        nn.InstanceNorm2d(3), nn.LazyInstanceNorm2d(), nn.GroupNorm(1, 3), SyncBatchNorm(3)
    )
    before = identities(model)
    assert identities(restore_batchnorm(convert_sync_batchnorm(model, exclude="3"))) == before
    assert warnings_of(model) == []
    assert identities(model) == before


def every_kind() -> nn.ModuleDict:
    """Return layers that differ from each other in one property each; one is shared."""
    shared = nn.BatchNorm1d(3).eval()
    half_frozen = nn.BatchNorm2d(3, momentum=None)
    half_frozen.weight.requires_grad_(False)
    with_attributes = nn.BatchNorm2d(3)
    with_attributes.extra = nn.Parameter(torch.ones(2))
    return nn.ModuleDict(
        {
            "shared": shared,
            "meta": nn.BatchNorm2d(3, track_running_stats=False, device="meta"),
            "half frozen": half_frozen,
            "with attributes": with_attributes,
            "volumes": nn.BatchNorm3d(3, eps=1e-3),
            "shared again": shared,
        }
    )


def test_restoring_leaves_nothing_behind() -> None:
    """Each kind of layer is restored exactly.

    Types, objects, modes, attributes and the order of the state dict are those of
    before.
    """
    model = every_kind()
    before = identities(model)
    convert_sync_batchnorm(convert_sync_batchnorm(model))
    assert {*model.keys()} == {*synchronised(model), "shared again"}
    assert identities(restore_batchnorm(model)) == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_converted_layers_are_converted(copied: Callable[[Any], nn.Module]) -> None:
    """A copy and an unpickled model synchronise, and can be restored."""
    model = network()
    layers = synchronised(convert_sync_batchnorm(model))
    twin = copied(model)
    assert synchronised(twin) == layers
    types = [type(module) for module in restore_batchnorm(model).modules()]
    assert [type(module) for module in restore_batchnorm(twin).modules()] == types
    torch.testing.assert_close(twin.state_dict(), model.state_dict(), rtol=0, atol=0)


def with_own_forward() -> nn.Module:
    """Return a layer whose ``forward`` a user has replaced."""
    layer: Any = nn.BatchNorm2d(3)
    layer.forward = lambda input: input
    return layer


def warnings_of(model: nn.Module, **choice: Any) -> list[str]:
    """Convert the model; return the warnings, which must be those of the caller's line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_sync_batchnorm(model, **choice)
    assert all(
        warning.category is UserWarning and warning.filename == __file__ for warning in caught
    )
    return [str(warning.message) for warning in caught]


def test_layers_that_are_not_converted_are_named_in_one_warning() -> None:
    """The warning has names, classes and remedies; excluded layers are not in it.

    These layers are unchanged, but layers in them are converted.
    """
    model = nn.Sequential(
        Scaled(3),
        with_own_forward(),
        nn.LazyBatchNorm2d(),
        nn.SyncBatchNorm(3),
        nn.BatchNorm2d(3),
    )
    before = identities(model)
    (message,) = warnings_of(model)
    assert message == (
        "BatchNorm layers with their own class or forward method are not converted: 0 (Scaled),"
        " 1 (BatchNorm2d), 2 (LazyBatchNorm2d), 3 (SyncBatchNorm). To use the statistics of"
        " all ranks, a class can inherit from"
        " lightning_ddp_ext.SyncBatchNorm, and a lazy layer can run a first batch before the"
        " conversion; to leave a layer out without this warning, use exclude="
    )
    assert synchronised(model) == ["0.second", "4"]
    assert identities(restore_batchnorm(model)) == before
    assert warnings_of(model, exclude=["0", "1", "2", "3"]) == []
