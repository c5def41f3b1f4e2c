"""Conversion makes the chosen layers synchronise, and is undone exactly."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_ddp_ext import SyncBatchNorm, convert_sync_batchnorm, restore_batchnorm
from lightning_ddp_ext.batchnorm.conversion import convert
from lightning_ddp_ext.batchnorm.selection import LayerChoice
from lightning_ddp_ext.errors import ConfigurationError


class Scaled(nn.BatchNorm2d):
    gain = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return self.gain * super().forward(input)


class Squared:
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.square())


class Mixed(Squared, nn.BatchNorm2d):
    pass


class Derived(nn.BatchNorm2d):
    """Has torch's forward."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features, eps=1e-3)


class Split(Derived):
    """Has a separate layer inside."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.second = nn.BatchNorm2d(num_features)


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = layer


def network() -> nn.Module:
    """Return layers stem.1, body.0.norm, body.1.norm and head."""
    stem = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    body = [Block(nn.BatchNorm2d(3)), Block(Derived(3))]
    return nn.ModuleDict({"stem": stem, "body": nn.Sequential(*body), "head": nn.BatchNorm1d(3)})


def synchronised(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)]


def facts(model: nn.Module) -> list[Any]:
    """Return the state that a conversion must not change, objects by their identity."""
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
        ({"include": ["stem", nn.BatchNorm1d]}, ["stem.1", "head"]),
        ({"include": (name for name in ("stem.1", "head"))}, ["stem.1", "head"]),
        ({"include": []}, []),
        ({"include": Block, "exclude": Derived}, ["body.0.norm"]),
        ({"exclude": {"body", nn.Sequential}}, ["head"]),
    ],
)
def test_chosen_layers_are_converted(arguments: dict[str, Any], names: list[str]) -> None:
    """Names, patterns and classes choose layers, or modules that contain them."""
    assert synchronised(convert_sync_batchnorm(network(), **arguments)) == names


def test_a_choice_is_the_same_in_a_second_fit() -> None:
    """Selectors may come from a generator, which can be read once."""
    choice = LayerChoice.of((name for name in ("body", "head")), (name for name in ("body.1",)))
    names = [convert(network(), choice).converted for _ in range(2)]
    assert names == [("body.0.norm", "head")] * 2


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (
            {"include": ["stem", "backbone.*"]},
            r"^include='backbone\.\*' matches no BatchNorm layer; choose among stem",
        ),
        (
            {"exclude": ["stem", nn.Linear]},
            r"^exclude=Linear matches no .* head, or modules that contain them\n",
        ),
        ({"exclude": nn.Conv2d(3, 3, 1)}, r"^exclude takes patterns of layer names and classes"),
        ({"include": [["stem"]]}, r"^include takes patterns of layer names and classes"),
    ],
)
def test_a_selection_of_nothing_is_an_error(selection: dict[str, Any], message: str) -> None:
    """The error names the selector and the model's layers, and nothing is converted."""
    model = network()
    with pytest.raises(ConfigurationError, match=message):
        convert_sync_batchnorm(model, **selection)
    assert synchronised(model) == []


def test_the_error_of_a_selection_lists_the_first_five_layers() -> None:
    """A large model does not flood the screen."""
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(6)))
    with pytest.raises(ConfigurationError, match=r"choose among 0, 1, 2, 3, 4, …, or modules"):
        convert_sync_batchnorm(model, include="a")


def test_layers_that_were_not_meant_are_not_touched() -> None:
    """Other norms and layers that synchronise already do not change.

    They are neither converted nor restored.
    """
    others = [
        nn.InstanceNorm2d(3),
        nn.LazyInstanceNorm2d(),
        nn.GroupNorm(1, 3),
        nn.SyncBatchNorm(3),
        SyncBatchNorm(3),
    ]
    model = nn.Sequential(*others)
    before = facts(model)
    assert facts(restore_batchnorm(convert_sync_batchnorm(model, exclude=SyncBatchNorm))) == before
    assert facts(convert_sync_batchnorm(model)) == before


def every_kind() -> nn.ModuleDict:
    """Return layers that differ from each other in one property each; one is shared."""
    half_frozen = nn.BatchNorm2d(3, momentum=None)
    half_frozen.weight.requires_grad_(False)
    with_attributes = nn.BatchNorm2d(3)
    with_attributes.note = "mine"
    with_attributes.extra = nn.Parameter(torch.ones(2))
    hooked = nn.BatchNorm2d(3)
    hooked.register_full_backward_hook(lambda _, gradients, __: None)
    meta = nn.BatchNorm2d(3, track_running_stats=False, device="meta")
    shared = nn.BatchNorm1d(3).eval()
    return nn.ModuleDict(
        {
            "shared": shared,
            "meta": meta,
            "half frozen": half_frozen,
            "with attributes": with_attributes,
            "hooked": hooked,
            "derived": Derived(3),
            "split": Split(3),
            "shared again": shared,
        }
    )


def test_restoring_leaves_nothing_behind() -> None:
    """Each kind of layer is restored exactly.

    Types, objects, modes, attributes and the order of the state dict are those of
    before.
    """
    model = every_kind()
    before = facts(model)
    convert_sync_batchnorm(convert_sync_batchnorm(model))
    assert {*model.keys(), "split.second"} == {*synchronised(model), "shared again"}
    identities = [(name, identity) for name, identity, *_ in facts(model)]
    assert identities == [(name, identity) for name, identity, *_ in before]
    assert facts(restore_batchnorm(model)) == before


def replaced() -> nn.Module:
    layer: Any = nn.BatchNorm2d(3)
    layer.forward = lambda input: input
    return layer


def parametrised() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def warnings_of(model: nn.Module, **choice: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convert_sync_batchnorm(model, **choice)
    assert all(
        warning.category is UserWarning and warning.filename == __file__ for warning in caught
    )
    return [str(warning.message) for warning in caught]


def test_layers_that_are_not_converted_are_named_in_one_warning() -> None:
    """The warning has names, classes and reasons, and the arguments that avoid it.

    These layers are unchanged.
    """
    layers = [
        (Scaled(3), "0 (Scaled) overrides forward; "),
        (Mixed(3), "1 (Mixed) overrides forward; "),
        (replaced(), "2 (BatchNorm2d) had its forward replaced on the object; "),
        (
            parametrised(),
            "3 (ParametrizedBatchNorm2d) is parametrised (remove the parametrisation first); ",
        ),
        (
            nn.LazyBatchNorm2d(),
            "4 (LazyBatchNorm2d) is lazy (run a first batch before the conversion). A class that ",
        ),
    ]
    model = nn.ModuleList([*(layer for layer, _ in layers), nn.BatchNorm2d(3)])
    types = [type(layer) for layer in model]
    (message,) = warnings_of(model)
    assert [part for _, part in layers if part not in message] == []
    assert message.endswith("to leave a layer out without this warning, use exclude=")
    assert [isinstance(layer, SyncBatchNorm) for layer in model] == [False] * 5 + [True]
    assert [type(layer) for layer in restore_batchnorm(model)] == types


def test_a_layer_without_a_name_is_named_the_module() -> None:
    """A model may consist of one layer, which has an empty name."""
    (message,) = warnings_of(Scaled(3), include="*")
    assert "the module (Scaled) overrides forward" in message


def test_layers_that_are_excluded_cause_no_warning() -> None:
    """``exclude`` is the remedy that the warning names."""
    assert warnings_of(nn.Sequential(Scaled(3)), exclude="0") == []
