"""Layers that compute their forward pass themselves: named, unless somebody has said how they synchronise."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext import SyncBatchNorm, convert_sync_batchnorm, register_converter, restore_batchnorm
from lightning_ddp_ext.batchnorm import converters
from lightning_ddp_ext.batchnorm.conversion import convert
from lightning_ddp_ext.errors import ConversionError
from tests.batchnorm import kinds
from tests.batchnorm.kinds import Functional, NamedNormAct, NormAct, ReluAfterNormAct, Scaled, parametrized
from tests.ranks import run_ranks

IMAGES = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class SyncFunctional(SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * self.helper(super().forward(input))

    def helper(self, output: Tensor) -> Tensor:
        return output + 1


class Standing(nn.Module):
    """Stands where a layer did, with its tensors and more."""

    def __init__(self, layer: nn.Module, process_group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.core = [SyncBatchNorm(3, process_group=process_group)]
        for name, tensor in layer.named_parameters():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))
        for name, tensor in layer.named_buffers():
            self.register_buffer(name, tensor.clone())
        self.act = nn.Module()
        self.act.register_buffer("table", torch.ones(2), persistent=False)
        self.register_forward_hook(lambda _, __, output: output + 1)

    def forward(self, input: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        return nn.functional.batch_norm(input, mean, var, self.weight, self.bias, self.training)


def standing(layer: nn.Module, process_group: dist.ProcessGroup | None) -> Standing:
    return Standing(layer, process_group)


class OwnConverter(Functional):
    """Brings a converter as torch's SyncBatchNorm does."""

    is_synchronised = False

    @classmethod
    def convert_sync_batchnorm(cls, module: Any, process_group: dist.ProcessGroup | None = None) -> Any:
        made = copy.deepcopy(module)
        made.is_synchronised = True
        return made


class Below(Functional):
    """Has its base's forward."""


class BelowWithForward(Functional):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.batch_norm(input, None, None, training=True)


@pytest.fixture(autouse=True)
def _no_converters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converters, "_registered", {})


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
    alone = [kinds.Functional, kinds.Helped, kinds.ByName, kinds.Alias, kinds.BelowFunctional, kinds.Unwrapped]
    model = nn.ModuleList([*(kind(3) for kind in alone), replaced, scripted, traced, nn.BatchNorm2d(3)])
    types = [type(layer) for layer in model]
    (message,) = left_alone(model)
    reason = "its forward may normalise by itself"
    named = "; ".join(f"{number} ({kind.__name__}): {reason}" for number, kind in enumerate(alone))
    assert f"of each rank's own: {named}; 6 (BatchNorm2d): its forward has been replaced on the object; 7 (" in message
    assert message.count("it has been scripted") == 2
    assert message.endswith("lightning_ddp_ext.register_converter, or leave them out with exclude=")
    assert [type(layer) for layer in model][:9] == types[:9]
    assert isinstance(model[9], SyncBatchNorm)
    assert [type(layer) for layer in restore_batchnorm(model)] == types


def test_only_layers_that_were_asked_for_are_named() -> None:
    """Who leaves such a layer out gets no warning, and a layer without a name is called the module."""
    assert convert(nn.ModuleDict({"a": Functional(3)}), exclude="a").verdicts[0].why_not == "in exclude"
    assert not convert(nn.ModuleDict({"a": Functional(3)}), exclude="a").verdicts[0].is_left_out
    assert "the module (Functional): its forward" in left_alone(Functional(3))[0]
    assert left_alone(Scaled(3)) == []


def test_a_parametrised_layer_is_judged_by_its_own_class() -> None:
    """The class that torch puts in front of it is neither named nor asked for a converter."""
    layer = parametrized(Functional(3), "weight")
    assert "the module (Functional): its forward" in left_alone(layer)[0]
    register_converter(Functional, SyncFunctional)
    assert left_alone(layer) == []
    assert isinstance(layer, SyncBatchNorm)


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


# Converters that are classes.


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
        (Functional, nn.BatchNorm2d, "to_sync must be a subclass of SyncBatchNorm or a function"),
        (Functional, Standing, "to_sync must be a subclass of SyncBatchNorm or a function"),
        (Functional, nn.SyncBatchNorm, "to_sync must be a subclass of SyncBatchNorm or a function"),
        (Functional, "SyncFunctional", "to_sync must be a subclass of SyncBatchNorm or a function"),
    ],
)
def test_what_cannot_be_a_converter_is_refused_at_once(cls: Any, to_sync: Any, told: str) -> None:
    """Also a class of layers that are never converted, whose converter would never be asked."""
    with pytest.raises(ConversionError, match=f"^{told}"):
        register_converter(cls, to_sync)


# Converters that are functions.


def test_a_function_s_module_stands_for_the_layer_until_it_is_restored() -> None:
    """Everywhere that the layer stood, with its mode and hooks; the layer gets the weights back, and its mode."""
    register_converter(Functional, standing)
    calls: list[str] = []
    layer = Functional(3)
    first = layer.register_full_backward_hook(lambda *_: calls.append("before"))
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, nn.Identity())}).eval()
    before = (list(model.state_dict()), sorted(vars(layer)))
    convert_sync_batchnorm(convert_sync_batchnorm(model))
    made: Any = model["a"]
    assert isinstance(made, Standing)
    assert made is model.get_submodule("b.0")
    assert not made.training
    assert made.core[0].process_group is None

    model.train()
    made.register_forward_hook(lambda *_: calls.append("during"))
    made(IMAGES.clone().requires_grad_()).sum().backward()
    assert calls == ["during", "before"]
    assert restore_batchnorm(model) is model
    assert model["a"] is model.get_submodule("b.0") is layer
    assert layer.training
    assert layer.weight is made.weight
    assert layer.running_mean is made.running_mean
    assert layer.num_batches_tracked == 0
    assert (list(model.state_dict()), sorted(vars(layer))) == before

    calls.clear()
    first.remove()
    torch.testing.assert_close(layer(IMAGES), nn.BatchNorm2d(3)(IMAGES))  # without the hook that the module brought
    assert calls == ["during"]


@pytest.mark.parametrize("kind", [Functional, OwnConverter])
def test_a_converted_module_trains_the_layer_s_own_parameters(kind: type[nn.BatchNorm2d]) -> None:
    """Also where a function has copied them: an optimizer that was there before goes on with them."""
    register_converter(Functional, standing)
    model = nn.Sequential(kind(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    convert_sync_batchnorm(model)
    model(IMAGES).sum().backward()
    optimizer.step()
    assert not torch.equal(model.get_parameter("0.bias"), torch.zeros(3))


def test_hooks_registered_on_a_function_s_module_stay() -> None:
    """Also backward hooks, on a layer that had none."""
    register_converter(Functional, standing)
    calls: list[str] = []
    made: Any = convert_sync_batchnorm(Functional(3))
    handle = made.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer: Any = restore_batchnorm(made)
    assert type(layer) is Functional
    layer(IMAGES.clone().requires_grad_()).sum().backward()
    handle.remove()
    layer(IMAGES.clone().requires_grad_()).sum().backward()
    assert calls == ["backward"]


def test_a_copied_module_stands_for_a_copied_layer() -> None:
    """A deep copy of a model with such a module is restored by itself."""
    register_converter(Functional, standing)
    layer = Functional(3)
    model = convert_sync_batchnorm(nn.Sequential(layer))
    copied = restore_batchnorm(copy.deepcopy(model))
    assert type(copied[0]) is Functional
    assert copied[0] is not layer
    assert restore_batchnorm(model)[0] is layer


def broken(layer: Any, process_group: Any) -> Any:
    return {"itself": layer, "none": None, "other keys": nn.Sequential(nn.BatchNorm2d(3))}[layer.mistake]


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("itself", r"must return another module \(got the layer itself\); to keep the layer, register a subclass"),
        ("none", r"must return another module \(got None\)"),
        ("other keys", r"must return a module with the same keys in its state dict.*got 0.weight, .* for weight, "),
    ],
)
def test_a_wrong_result_is_named_with_its_layer(mistake: str, told: str) -> None:
    """The layer itself, nothing, or a module whose checkpoints nobody could read later."""
    register_converter(Functional, broken)
    model: Any = nn.ModuleDict({"norm": Functional(3), "other": nn.BatchNorm2d(3)})
    model.norm.mistake = mistake
    with pytest.raises(ConversionError, match=rf"^the converter of Functional \(layer norm\) {told}"):
        convert_sync_batchnorm(model)
    assert type(model.norm) is Functional
    assert type(restore_batchnorm(model).other) is nn.BatchNorm2d


def test_a_class_may_bring_its_own_converter() -> None:
    """As torch's own SyncBatchNorm does, by a class method; converting twice asks it once."""
    layer = OwnConverter(3)
    model = nn.Sequential(layer)
    assert left_alone(model) == []
    made: Any = model[0]
    assert made.is_synchronised
    assert convert_sync_batchnorm(model)[0] is made
    assert restore_batchnorm(model)[0] is layer


# On ranks: timm's layers, and registered ones.


def timm_layers() -> dict[str, Callable[[], Any]]:
    return {
        "plain": lambda: NormAct(3),
        "SiLU, no affine": lambda: NormAct(3, affine=False, act_layer=nn.SiLU),
        "no activation, cumulative": lambda: NormAct(3, momentum=None, apply_act=False, act_layer=nn.SiLU),
        "dropout layer": lambda: NormAct(3, drop_layer=nn.Tanh, inplace=False),
        "no statistics": lambda: NormAct(3, track_running_stats=False),
        "eval": lambda: NormAct(3).eval(),
        "subclass": lambda: NamedNormAct(3, name="norm"),
        "after another": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), NormAct(3), nn.Conv2d(3, 3, 1), NormAct(3)),
        "registered": lambda: Functional(3),
    }


def difference_from_one_process(factory: Callable[[], Any], rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    batch, weights = torch.randn(4, 3, 4, 4).double() + 1, torch.randn(4, 3, 4, 4).double()
    alone = factory().double()
    layer = copy.deepcopy(alone)
    types = [type(module) for module in layer.modules()]
    assert left_alone(layer) == []
    mine = slice(rank, None, world_size)
    inputs = [batch.clone().requires_grad_(), batch[mine].clone().requires_grad_()]
    expected, output = alone(inputs[0]), layer(inputs[1])
    if isinstance(alone, Functional):
        expected = 2 * (expected + 1)
    (expected * weights).sum().backward()
    (output * weights[mine]).sum().backward()
    pairs = [(output, expected[mine]), (inputs[1].grad, inputs[0].grad[mine])]
    pairs += zip(layer.buffers(), alone.buffers(), strict=True)
    for parameter, other in zip(layer.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        pairs.append((parameter.grad, other.grad))
    assert [type(module) for module in restore_batchnorm(layer).modules()] == types
    return max((one.double() - two.double()).abs().max().item() for one, two in pairs)


def differences(rank: int, world_size: int, directory: Path) -> dict[str, float]:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    register_converter(Functional, SyncFunctional)
    layers = timm_layers().items()
    found = {name: difference_from_one_process(factory, rank, world_size) for name, factory in layers}
    dist.destroy_process_group()
    return found


def test_timm_s_layers_and_registered_ones_train_as_on_the_joined_batch(tmp_path: Path) -> None:
    """A layer with the name and forward of timm's needs no registration and keeps its dropout and activation."""
    for found in run_ranks(differences, 2, tmp_path):
        assert {name: value for name, value in found.items() if not value < 1e-10} == {}


def test_a_timm_subclass_with_its_own_forward_is_left_alone() -> None:
    """What it adds would be lost, and its ``super().forward`` ends in a layer that does not synchronise."""
    assert "ReluAfterNormAct" in left_alone(ReluAfterNormAct(3))[0]
