"""What LightningCLI, editors and `help()` learn about `DDPExtStrategy`: every option by name, with type and text."""

from __future__ import annotations

import inspect
import re
import typing
from datetime import timedelta
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lightning_ddp_ext import DDPExtStrategy, InitMethodError, OptionError

pytestmark = pytest.mark.lowest

OURS = inspect.signature(DDPExtStrategy).parameters
STOCK = {name: p for name, p in inspect.signature(DDPStrategy).parameters.items() if p.kind is not p.VAR_KEYWORD}
# What the strategy passes by itself.
OF_THE_STRATEGY = {"self", "module", "device_ids", "output_device"}
DDP = {
    name: parameter
    for name, parameter in inspect.signature(DistributedDataParallel.__init__).parameters.items()
    if name not in OF_THE_STRATEGY
}


def test_every_option_of_stock_and_of_ddp_is_an_argument() -> None:
    """No option hides behind `**kwargs`, and a default is the same here as there, or None, which leaves it as it is."""
    assert not [name for name, parameter in OURS.items() if parameter.kind is parameter.VAR_KEYWORD]
    assert STOCK.keys() | DDP.keys() <= OURS.keys()
    inherited = {**STOCK, **DDP}
    assert [name for name, theirs in inherited.items() if OURS[name].default not in (theirs.default, None)] == []


def test_arguments_are_keywords() -> None:
    """All but the first: an order nobody can remember is none."""
    assert [name for name, parameter in OURS.items() if parameter.kind is not parameter.KEYWORD_ONLY] == ["init_method"]


def test_every_argument_has_a_type_that_can_be_looked_up() -> None:
    """LightningCLI resolves annotations at run time, and offers what has one."""
    hints = typing.get_type_hints(DDPExtStrategy.__init__)
    assert hints.keys() - {"return"} == OURS.keys()
    assert hints["start_method"] == Literal["popen", "spawn", "fork", "forkserver"]
    assert set(typing.get_args(hints["init_timeout"])) == {float, timedelta}
    assert hints["find_unused_parameters"] is bool


def test_every_argument_is_explained_in_order() -> None:
    """The docstring has a line for each argument, and none for what does not exist."""
    text = inspect.getdoc(DDPExtStrategy) or ""
    section = text.partition("Args:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): \S", section, re.MULTILINE) == list(OURS)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("find_unused_parameter", "did you mean find_unused_parameters?"),
        ("bucket_cap", "did you mean bucket_cap_mb?"),
        ("init_metod", "did you mean init_method?"),
        ("qqq", "see help(DDPExtStrategy)"),
    ],
)
def test_an_unknown_option_is_refused_by_name(wrong: str, nearest: str) -> None:
    """With the nearest one that exists; it is a `TypeError`, as of any call, and a `DDPExtError`."""
    with pytest.raises(OptionError, match=f"has no argument '{wrong}'") as caught:
        DDPExtStrategy(**{wrong: True})
    assert nearest in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_an_option_that_this_torch_lacks_is_refused_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default is harmless, so that one signature does for all versions of torch."""

    def older(self: Any, module: Any, find_unused_parameters: bool = False) -> None: ...

    monkeypatch.setattr(DistributedDataParallel, "__init__", older)
    assert DDPExtStrategy(find_unused_parameters=True, static_graph=False)
    with pytest.raises(OptionError, match=f"static_graph is no option .* torch {re.escape(torch.__version__)}"):
        DDPExtStrategy(static_graph=True)


def test_a_subclass_may_take_arguments_of_its_own() -> None:
    """Only names that nobody takes are refused."""

    class Mine(DDPExtStrategy):
        def __init__(self, colour: str, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.colour = colour

    mine = Mine("red", find_unused_parameters=True)
    assert (mine.colour, mine._ddp_kwargs) == ("red", {"find_unused_parameters": True})
    with pytest.raises(TypeError, match="find_unused"):
        Mine("red", find_unused=True)


def test_the_init_method_is_read_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong one is refused before anything is started, whether it is an argument or a variable."""
    with pytest.raises(InitMethodError, match="needs a port"):
        DDPExtStrategy("tcp://host")
    monkeypatch.setenv("DDPX_INIT_METHOD", "tcp://host")
    with pytest.raises(InitMethodError, match="DDPX_INIT_METHOD"):
        DDPExtStrategy()
