"""Conversion changes the layers that were meant, in nothing but their statistics, and is undone exactly."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from lightning_ddp_ext import SyncBatchNorm, convert_sync_batchnorm, register_converter, restore_batchnorm
from lightning_ddp_ext.batchnorm.conversion import convert
from lightning_ddp_ext.errors import ConversionError
from tests.batchnorm import kinds
from tests.batchnorm.kinds import NormAct, Scaled, hooked
from tests.harness.ranks import run_ranks

IMAGES = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), layer

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.norm(self.conv(input))
        return output


def network() -> nn.Module:
    """Layers stem.1, body.0.norm, body.1.norm and head."""
    return nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
            "body": nn.Sequential(Block(nn.BatchNorm2d(3)), Block(Scaled(3))),
            "head": nn.BatchNorm1d(3),
        }
    )


def synchronised(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, SyncBatchNorm)]


def converted(layer: Any) -> Any:
    return convert_sync_batchnorm(layer)


def facts(model: nn.Module) -> list[Any]:
    """All that must be as before, objects by their identity."""
    return [
        (name, id(module), type(module), module.training, list(vars(module)), list(type(module).__mro__))
        for name, module in model.named_modules(remove_duplicate=False)
    ] + [(name, id(tensor), tensor.requires_grad) for name, tensor in model.state_dict(keep_vars=True).items()]


# Which layers.

SELECTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all": ({}, ["stem.1", "body.0.norm", "body.1.norm", "head"]),
    "name": ({"include": "stem.1"}, ["stem.1"]),
    "pattern": ({"include": "body.*"}, ["body.0.norm", "body.1.norm"]),
    "module in a pattern": ({"include": "body.?"}, ["body.0.norm", "body.1.norm"]),
    "module by name": ({"include": "stem"}, ["stem.1"]),
    "class": ({"include": Scaled}, ["body.1.norm"]),
    "class of a module around it": ({"include": Block}, ["body.0.norm", "body.1.norm"]),
    "several": ({"include": ["stem", nn.BatchNorm1d]}, ["stem.1", "head"]),
    "a generator": ({"include": (name for name in ("stem", "head"))}, ["stem.1", "head"]),
    "none of them": ({"include": []}, []),
    "exclude": ({"exclude": {"body.*", "head"}}, ["stem.1"]),
    "exclude a module": ({"exclude": ["body", nn.Sequential]}, ["head"]),
    "both": ({"include": "body", "exclude": Scaled}, ["body.0.norm"]),
    "predicate": ({"predicate": lambda name, layer: name == "head"}, ["head"]),
    "all three": (
        {"include": nn.BatchNorm2d, "exclude": "stem.*", "predicate": lambda _, layer: type(layer) is not Scaled},
        ["body.0.norm"],
    ),
}


@pytest.mark.parametrize("case", SELECTIONS)
def test_chosen_layers_are_converted(case: str) -> None:
    """Names, patterns, classes and a predicate choose layers, by themselves or by a module that they are in."""
    arguments, names = SELECTIONS[case]
    assert synchronised(convert_sync_batchnorm(network(), **arguments)) == names


@pytest.mark.parametrize("field", ["include", "exclude"])
@pytest.mark.parametrize(("selector", "shown"), [("backbone.*", "'backbone.*'"), ("", "''"), (nn.Linear, "Linear")])
def test_a_selector_that_fits_nothing_is_an_error(field: str, selector: Any, shown: str) -> None:
    """It is named, with the layers that there are, and nothing has been converted."""
    model = network()
    with pytest.raises(ConversionError) as raised:
        convert_sync_batchnorm(model, **{field: ["stem", selector]})
    told = "fits no BatchNorm layer; choose among stem.1, body.0.norm, body.1.norm, head, or modules that they are in"
    assert str(raised.value) == f"{field}={shown} {told}"
    assert synchronised(model) == []


def test_a_few_of_many_layers_are_named_and_the_module_itself() -> None:
    """An error stays one line long, and a layer without a name is called the module."""
    with pytest.raises(ConversionError, match=r"choose among 0, 1, 2, 3, 4, …, or modules"):
        convert_sync_batchnorm(nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(6))), "six")
    with pytest.raises(ConversionError, match=r"choose among the module, or"):
        convert_sync_batchnorm(nn.BatchNorm1d(3), "norm")


@pytest.mark.parametrize(
    ("selection", "told"),
    [
        *(
            ({"exclude": selector}, r"^exclude takes patterns of layer names and classes")
            for selector in (5, nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1)), [None], [["stem"]])
        ),
        ({"predicate": "stem.*"}, r"^predicate must be a function .*\(got 'stem.\*'\); for patterns there are"),
    ],
)
def test_what_selects_nothing_by_its_type_is_refused(selection: dict[str, Any], told: str) -> None:
    """A module given in place of its name, say, or a pattern in place of a function."""
    with pytest.raises(ConversionError, match=told):
        convert_sync_batchnorm(network(), **selection)


def test_a_model_without_batchnorm_stays_as_it_is() -> None:
    """So do layers that are no BatchNorm, whatever is asked for."""
    others = nn.Sequential(nn.InstanceNorm2d(3), nn.LazyInstanceNorm2d(), nn.GroupNorm(1, 3), nn.LayerNorm(3))
    before = facts(others)
    assert convert_sync_batchnorm(others, include="nothing") is others
    assert restore_batchnorm(others) is others
    assert facts(others) == before


def test_layers_that_synchronise_already_are_not_touched() -> None:
    """What the user wrote as a synchronised layer is neither converted nor restored."""
    model = nn.Sequential(nn.SyncBatchNorm(3), SyncBatchNorm(3), nn.BatchNorm2d(3))
    before = facts(model)
    conversion = convert(model, exclude=SyncBatchNorm)
    assert conversion.left_alone == {"0": "synchronises already", "1": "synchronises already"}
    assert facts(model)[:3] == before[:3]
    assert facts(restore_batchnorm(model)) == before


def test_converting_twice_is_harmless() -> None:
    """What was converted first stays so, and one restore undoes both."""
    model = network()
    before = facts(model)
    convert_sync_batchnorm(model, include="stem")
    first = type(model.get_submodule("stem.1"))
    convert_sync_batchnorm(convert_sync_batchnorm(model))
    assert type(model.get_submodule("stem.1")) is first
    assert synchronised(model) == ["stem.1", "body.0.norm", "body.1.norm", "head"]
    assert facts(restore_batchnorm(restore_batchnorm(model))) == before


def test_a_layer_can_be_the_whole_module() -> None:
    """It is returned itself, in both directions, and is both what it was and a synchronised layer."""
    layer = nn.BatchNorm2d(3)
    assert convert_sync_batchnorm(layer) is layer
    assert isinstance(layer, SyncBatchNorm)
    assert isinstance(layer, nn.BatchNorm2d)
    assert repr(layer).startswith("SyncBatchNorm2d(3, eps=1e-05")
    assert restore_batchnorm(layer) is layer
    assert type(layer) is nn.BatchNorm2d


def test_a_shared_layer_stays_shared() -> None:
    """A layer, and a block, in two places is converted once, named once, and the same in both places ever after."""
    layer, block = nn.BatchNorm2d(3), Block(nn.BatchNorm2d(3))
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer, block), "c": block})
    before = facts(model)
    conversion = convert(model, exclude="b.1.*")
    assert (conversion.converted, conversion.left_alone) == (("a",), {"b.1.norm": "in exclude"})
    assert synchronised(model) == ["a"]
    assert facts(restore_batchnorm(model)) == before


# What stays.


# Classes whose forward goes through ``super().forward``.
SUPER: list[Any] = [
    kinds.Scaled,
    kinds.ScaledTwice,
    kinds.Decorated,
    kinds.Mixed,
    kinds.Slotted,
    kinds.OfMeta,
    kinds.WithState,
    kinds.WithReduce,
    kinds.WithReduceByFunction,
    kinds.WithDeepcopy,
    kinds.Closed,
]


def every_kind() -> nn.Module:
    """One layer each of what may be different from one to the next."""
    frozen = nn.BatchNorm2d(3).requires_grad_(False)
    half_frozen = nn.BatchNorm2d(3, momentum=None)
    half_frozen.weight.requires_grad_(False)
    with_attributes = nn.BatchNorm2d(3)
    with_attributes.note, with_attributes.extra = "mine", nn.Parameter(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        weight_norm = nn.utils.weight_norm(nn.BatchNorm2d(3))
    return nn.ModuleList(
        [
            nn.BatchNorm1d(3).eval(),
            nn.BatchNorm3d(3, affine=False, dtype=torch.float64),
            nn.BatchNorm2d(3, track_running_stats=False, device="meta"),
            nn.BatchNorm2d(3).bfloat16(),
            frozen,
            half_frozen,
            with_attributes,
            weight_norm,
            nn.utils.spectral_norm(nn.BatchNorm2d(3)),
            hooked(nn.BatchNorm2d(3)),
            *(kind(3) for kind in SUPER),
        ]
    )


def test_restoring_leaves_nothing_behind() -> None:
    """Types, objects, modes, attributes, and the order of the state dict are those of before, for every kind of layer.

    In between only types and one attribute differ.
    """
    model = every_kind()
    before = facts(model)
    state = {name: (tensor.dtype, tensor.device.type) for name, tensor in model.state_dict().items()}
    convert_sync_batchnorm(model)
    layers = list(model)  # type: ignore[call-overload]
    assert all(isinstance(layer, SyncBatchNorm) for layer in layers)
    assert {name: (tensor.dtype, tensor.device.type) for name, tensor in model.state_dict().items()} == state
    assert [fact[:2] for fact in facts(model)] == [fact[:2] for fact in before]
    assert facts(restore_batchnorm(model)) == before


def test_state_dicts_fit_in_both_directions() -> None:
    """Converted and plain models read one another's; a restored layer has the statistics of the converted one."""
    plain, other = every_kind(), converted(every_kind())
    assert list(plain.state_dict()) == list(other.state_dict())
    plain.load_state_dict(other.state_dict())
    other.load_state_dict(plain.state_dict())
    layer = converted(Scaled(3))
    layer(IMAGES)
    trained = copy.deepcopy(layer.state_dict())
    assert trained["num_batches_tracked"] == 1
    torch.testing.assert_close(restore_batchnorm(layer).state_dict(), trained)


def test_hooks_of_all_kinds_stay_and_go_by_their_handles() -> None:
    """Hooks registered before and during conversion run, also after it, until their handles remove them."""
    seen: list[str] = []
    layer = nn.BatchNorm2d(3)
    handles = register_all(layer, "before", seen)
    handles += register_all(converted(layer), "during", seen)
    names = [f"{when} {what}" for what in ("pre", "forward", "backward pre", "backward", "state") for when in WHEN]
    for changed in (layer, restore_batchnorm(layer)):
        seen.clear()
        changed(IMAGES.clone().requires_grad_()).sum().backward()
        changed.state_dict()
        assert seen == names
        convert_sync_batchnorm(layer)
    for handle in handles:
        handle.remove()
    seen.clear()
    restore_batchnorm(layer)(IMAGES.clone().requires_grad_()).sum().backward()
    layer.state_dict()
    assert seen == []


WHEN = ("before", "during")


def register_all(layer: Any, when: str, seen: list[str]) -> list[Any]:
    def noting(what: str) -> Callable[..., None]:
        return lambda *_: seen.append(f"{when} {what}")

    return [
        layer.register_forward_pre_hook(noting("pre")),
        layer.register_forward_hook(noting("forward")),
        layer.register_full_backward_pre_hook(noting("backward pre")),
        layer.register_full_backward_hook(noting("backward")),
        layer.register_state_dict_post_hook(noting("state")),
    ]


def test_a_layer_parametrised_while_converted_cannot_be_restored() -> None:
    """The error says how to get it restored."""
    layer = converted(nn.BatchNorm2d(3))
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(ConversionError, match=r"was parametrised while .*; call .*remove_parametrizations first$"):
        restore_batchnorm(layer)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(restore_batchnorm(layer)) is nn.BatchNorm2d


# Copies and files.


def saved_and_loaded(layer: Any) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "pickle, protocol 1": lambda layer: pickle.loads(pickle.dumps(layer, protocol=1)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_converted_and_can_be_restored(how: str) -> None:
    """However a class says that it is copied, a copy computes what the layer does and becomes plain again."""
    for kind in [nn.BatchNorm2d, *SUPER]:
        if kind is kinds.Slotted and how == "pickle, protocol 1":
            continue  # Python cannot
        layer = converted(kind(3))
        copied = COPIES[how](layer)
        assert copied is not layer
        assert type(copied) is type(layer)
        assert copied(IMAGES).equal(layer(IMAGES)), kind
        assert type(restore_batchnorm(copied)) is kind
        assert copied(IMAGES).equal(layer(IMAGES)), kind
        assert isinstance(layer, SyncBatchNorm)


def test_restored_models_can_be_traced_scripted_and_exported() -> None:
    """Nothing of the conversion stands in the way of torch.jit and torch.export."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    restore_batchnorm(convert_sync_batchnorm(model)).eval()
    expected = model(IMAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [torch.jit.script(model), torch.jit.trace(model, (IMAGES,))]
        made.append(torch.export.export(model, (IMAGES,)).module())
    for each in made:
        torch.testing.assert_close(each(IMAGES), expected)


# On ranks: what was promised is what is computed.


def factories() -> dict[str, Callable[[], Any]]:
    return {
        **{kind.__name__: lambda kind=kind: kind(3) for kind in SUPER},
        "BatchNorm2d": lambda: nn.BatchNorm2d(3),
        "hooked": lambda: hooked(nn.BatchNorm2d(3)),
        "weight norm": lambda: nn.utils.weight_norm(nn.BatchNorm2d(3)),
        "spectral norm": lambda: nn.utils.spectral_norm(nn.BatchNorm2d(3)),
        "layer in a layer": lambda: kinds.Split(3),
        "shared": lambda: nn.Sequential(layer := nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1, bias=False), layer),
        "in eval mode": lambda: nn.BatchNorm2d(3).eval(),
        "hooked while converted": lambda: nn.BatchNorm2d(3),
        "deepcopied": lambda: nn.BatchNorm2d(3),
        "pickled": lambda: nn.BatchNorm2d(3),
        "registered": lambda: kinds.Functional(3),
        "timm's": lambda: NormAct(3),
        "timm's, SiLU, no affine": lambda: NormAct(3, affine=False, act_layer=nn.SiLU),
        "timm's, no activation, cumulative": lambda: NormAct(3, momentum=None, apply_act=False),
        "timm's, dropout layer": lambda: NormAct(3, drop_layer=nn.Tanh, inplace=False),
        "timm's, no statistics": lambda: NormAct(3, track_running_stats=False),
        "timm's, in eval mode": lambda: NormAct(3).eval(),
        "subclass of timm's": lambda: kinds.NamedNormAct(3, name="norm"),
        "timm's behind another": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), NormAct(3), nn.Conv2d(3, 3, 1), NormAct(3)),
    }


WHILE_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "hooked while converted": hooked,
    "deepcopied": copy.deepcopy,
    "pickled": COPIES["pickle"],
}


def step(model: Any, batch: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input of one step in SGD."""
    batch = batch.clone().requires_grad_()
    output = model(batch)
    (output * weights).sum().backward()
    assert batch.grad is not None
    return output.detach(), batch.grad


def difference_from_one_process(name: str, rank: int, world_size: int) -> float:
    """How far one training step over ranks is from one on the joined batch, in outputs, gradients and buffers."""
    torch.manual_seed(0)
    batch, weights = torch.randn(4, 3, 2, 2).double() + 1, torch.randn(4, 3, 2, 2).double()
    change = WHILE_CONVERTED.get(name, lambda layer: layer)
    torch.manual_seed(1)
    alone = change(factories()[name]().double())
    torch.manual_seed(1)
    layer = factories()[name]().double()
    types = [type(module) for module in layer.modules()]
    layer = change(convert_sync_batchnorm(layer))
    mine = slice(rank, None, world_size)
    output, gradient = step(layer, batch[mine], weights[mine])
    expected_output, expected_gradient = step(alone, batch, weights)
    pairs = [(output, expected_output[mine]), (gradient, expected_gradient[mine])]
    for parameter, expected in zip(layer.parameters(), alone.parameters(), strict=True):
        if expected.grad is not None:
            dist.all_reduce(parameter.grad)
            pairs.append((parameter.grad, expected.grad))
    pairs += list(zip(layer.buffers(), alone.buffers(), strict=True))
    assert [type(module) for module in restore_batchnorm(layer).modules()] == types
    assert list(layer.state_dict()) == list(alone.state_dict())
    assert sorted(vars(layer)) == sorted(vars(alone))
    return max((one.double() - two.double()).abs().max().item() for one, two in pairs)


def differences(rank: int, world_size: int, directory: Path) -> dict[str, float]:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    register_converter(kinds.Functional, SyncBatchNorm)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)  # of the old weight norm
        found = {name: difference_from_one_process(name, rank, world_size) for name in factories()}
    dist.destroy_process_group()
    return found


def test_every_kind_of_layer_trains_as_on_the_joined_batch(tmp_path: Path) -> None:
    """Two ranks compute for each what one process computes with both batches, and restore what was there.

    A layer with the name and forward of timm's needs no registration and keeps its dropout and activation.
    """
    for found in run_ranks(differences, 2, tmp_path):
        assert {name: value for name, value in found.items() if not value < 1e-10} == {}


def models_in_use(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """A converted model in DDP, in torch.compile, and in a process without ranks."""
    without_ranks = pickle.dumps(convert_sync_batchnorm(Block(Scaled(3))))
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    mine = IMAGES[rank::world_size]
    plain = Block(Scaled(3))
    expected = copy.deepcopy(plain)(IMAGES)[rank::world_size]

    wrapped = DistributedDataParallel(copy.deepcopy(plain))
    found: dict[str, Any] = {"names in DDP": synchronised(convert_sync_batchnorm(wrapped, include="module.norm"))}
    found["in DDP"] = (wrapped(mine) - expected).abs().max().item()

    for backend in ("eager", "aot_eager"):
        model = copy.deepcopy(plain)
        compiled: Any = torch.compile(model, backend=backend)
        compiled(mine)
        convert_sync_batchnorm(model)
        output = compiled(mine)
        output.square().sum().backward()
        found[f"compiled, {backend}"] = (output - expected).abs().max().item()
        restore_batchnorm(model)
        found[f"restored, {backend}"] = (compiled(mine) - copy.deepcopy(plain)(mine)).abs().max().item()
    torch.compiler.reset()  # else it goes on with the pieces
    graphs: list[str] = []
    torch.compile(convert_sync_batchnorm(model), backend=lambda graph, _: graphs.append(graph.code) or graph)(mine)
    found["graphs"] = ["conv" in code for code in graphs]

    group = dist.new_group()
    grouped: Any = pickle.loads(pickle.dumps(convert_sync_batchnorm(copy.deepcopy(plain), process_group=group)))
    found["pickled with its group"] = grouped.norm.process_group
    kinds_with_copies = (Scaled, kinds.WithState, kinds.WithReduce)
    copies = [copy.deepcopy(convert_sync_batchnorm(kind(3), process_group=group)) for kind in kinds_with_copies]
    found["copied with their group"] = [copied.process_group is group for copied in copies]
    dist.destroy_process_group()
    found["without ranks"] = [pickle.loads(each)(mine).shape for each in (without_ranks, pickle.dumps(grouped))]
    return found


def test_converted_models_work_wherever_models_do(tmp_path: Path) -> None:
    """In DDP, compiled (also before conversion), and in a process without ranks, which gets no group.

    A compiled graph ends at a layer and goes on behind it, as with torch's own SyncBatchNorm.
    """
    for found in run_ranks(models_in_use, 2, tmp_path):
        assert found["names in DDP"] == ["module.norm"]
        numbers = {key: value for key, value in found.items() if isinstance(value, float)}
        assert len(numbers) == 5
        assert max(numbers.values()) < 1e-5, numbers
        assert found["graphs"] == [True, False]
        assert found["pickled with its group"] is None
        assert found["copied with their group"] == [True] * 3
        assert found["without ranks"] == [(2, 3, 5, 5)] * 2
