"""Ranks that differ are found, and named with what they differ in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_ddp_ext.checkpoint.collectives import Ranks
from lightning_ddp_ext.errors import DivergenceError, OptionError
from lightning_ddp_ext.supervision.cross_rank_diff import Difference, describe
from lightning_ddp_ext.supervision.replica_check import ReplicaCheck
from tests.harness.ranks import run_ranks


class Net(nn.Module):
    """Parameters of which one is frozen, constant buffers, one that is not saved, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.norm.weight.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Lab:
    """A rank's model after a step with gradients that all ranks have, and a forward pass with data of its own."""

    def __init__(self, ranks: Ranks, make_optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
        self.ranks, self.others = ranks, {"scheduler 0": "StepLR"}
        self.warnings: list[str] = []
        self.model = Net()
        self.optimizer = make_optimizer(self.model.parameters(), lr=0.1)
        self.check = ReplicaCheck(warn=self.warnings.append, **options)
        self.check.remember_buffers(self.model)
        self.step()
        self.model.norm(torch.randn(5, 4, generator=torch.Generator().manual_seed(ranks.rank)))
        self.compare("after step 1")

    def step(self) -> None:
        def loss() -> Tensor:
            for parameter in self.model.parameters():
                parameter.grad = parameter.detach().clone() if parameter.requires_grad else None
            return self.ranks.rank + self.model.first.weight.detach().square().sum()

        self.optimizer.step(loss)

    def compare(self, when: str = "after step 2") -> None:
        self.check.compare(self.model, [self.optimizer], self.ranks, when=when, others=self.others)

    def values(self) -> Any:
        rate = self.optimizer.param_groups[0]["lr"]
        return rate, [parameter.tolist() for parameter in self.model.parameters()]

    def state(self, parameter: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[parameter]
        return found


Alteration = Callable[[Lab], object]


@dataclass(frozen=True)
class Case:
    """What some ranks do to themselves, and what is said: ``None`` if nothing."""

    alterations: dict[int, Alteration]
    said: str | None
    ranks: tuple[int, ...] = ()
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
    options: dict[str, Any] = field(default_factory=dict)
    is_repaired: bool = True


@torch.no_grad()
def nudge(tensor: Tensor) -> None:
    """The least that can be done to it: a bit of one element."""
    tensor.view(torch.uint8).view(-1)[0] ^= 1


def clear_state(lab: Lab) -> None:
    del lab.optimizer.state[lab.model.last.bias]


def reshape(lab: Lab) -> None:
    lab.model.last.bias = nn.Parameter(torch.zeros(2))


def nudge_all(lab: Lab) -> None:
    for parameter in lab.model.parameters():
        nudge(parameter)


def set_rate(rate: float) -> Alteration:
    return lambda lab: lab.optimizer.param_groups[0].update(lr=rate)


WEIGHT: Alteration = lambda lab: nudge(lab.model.first.weight)  # noqa: E731
MASK: Alteration = lambda lab: lab.model.mask.logical_not_()  # noqa: E731
STATISTICS: Alteration = lambda lab: nudge(lab.model.norm.running_mean)  # noqa: E731
SCRATCH: Alteration = lambda lab: nudge(lab.model.scratch)  # noqa: E731

CASES = {
    "nothing": Case({}, None),
    "a parameter": Case({1: WEIGHT}, "rank 1 in parameter first.weight", (1,)),
    "a frozen one, of rank 0": Case(
        {0: lambda lab: nudge(lab.model.norm.weight)}, "rank 0 in parameter norm.weight", (0,)
    ),
    "optimiser state": Case(
        {2: lambda lab: nudge(lab.state(lab.model.last.bias)["exp_avg"])},
        "rank 2 in optimizer 0: exp_avg of last.bias",
        (2,),
    ),
    "an option of the optimiser": Case(
        {1: set_rate(0.2), 2: set_rate(0.3)},
        "ranks 1 and 2 in optimizer 0: lr of group 0 (0.1 on rank 0, 0.2 on rank 1, 0.3 on rank 2)",
        (1, 2),
    ),
    "state that one rank lacks": Case(
        {0: clear_state},
        "rank 0 in optimizer 0: step of last.bias (nothing on rank 0, float32 () on ranks 1 and 2), ",
        (0,),
        is_repaired=False,
    ),
    "another shape": Case(
        {1: reshape},
        "rank 1 in parameter last.bias (float32 (1,) on ranks 0 and 2, float32 (2,) on rank 1)",
        (1,),
        is_repaired=False,
    ),
    "many": Case(
        {
            1: lambda lab: [
                nudge_all(lab),
                *map(nudge, (lab.state(lab.model.last.bias)[key] for key in ("exp_avg", "exp_avg_sq"))),
                nudge(lab.state(lab.model.first.bias)["exp_avg"]),
            ]
        },
        " and 1 more",
        (1,),
    ),
    "a constant buffer": Case({1: MASK}, "rank 1 in buffer mask", (1,)),
    "a buffer that all write to": Case({0: MASK, 1: MASK, 2: lambda lab: lab.model.mask.zero_()}, None),
    "running statistics": Case({1: STATISTICS}, None),
    "a buffer that is not saved": Case({1: SCRATCH}, None),
    "ignored": Case(
        {1: lambda lab: [WEIGHT(lab), nudge(lab.state(lab.model.first.weight)["exp_avg"]), set_rate(7.0)(lab)]},
        None,
        options={"ignore": ["first.*", "optimizer 0: lr of *"]},
    ),
    "what the caller compares": Case(
        {2: lambda lab: lab.others.update({"scheduler 0": "ExponentialLR"})},
        "rank 2 in scheduler 0 (StepLR on ranks 0 and 1, ExponentialLR on rank 2)",
        (2,),
        is_repaired=False,
    ),
    "LBFGS": Case({}, None, make_optimizer=torch.optim.LBFGS),
    "in lists": Case(
        {1: lambda lab: nudge(lab.state(lab.model.first.weight)["old_dirs"][0])},
        "rank 1 in optimizer 0: old_dirs.0 of first.weight",
        (1,),
        make_optimizer=torch.optim.LBFGS,
    ),
}


@dataclass
class Found:
    """What a rank has to tell of a case."""

    error: DivergenceError | None
    warnings: list[str]
    values: Any


def find(ranks: Ranks, case: Case, on_divergence: str) -> Found:
    lab = Lab(ranks, case.make_optimizer, on_divergence=on_divergence, **case.options)
    case.alterations.get(ranks.rank, lambda _: None)(lab)
    try:
        lab.compare()
        lab.compare("after step 3")
    except DivergenceError as error:
        return Found(error, lab.warnings, lab.values())
    return Found(None, lab.warnings, lab.values())


def find_all(rank: int, world_size: int, directory: Path) -> dict[tuple[str, str], Found]:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    ranks = Ranks(rank, world_size)
    return {
        (name, how): find(ranks, case, how) for name, case in CASES.items() for how in ("raise", "warn", "broadcast")
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Found]]:
    """What three ranks find in each case, by rank."""
    return run_ranks(find_all, 3, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_raised_with_names_on_every_rank(name: str, found: list[dict[tuple[str, str], Found]]) -> None:
    """And with the last step at which all were equal; nothing is raised where ranks may differ."""
    case, errors = CASES[name], [by_case[name, "raise"].error for by_case in found]
    if case.said is None:
        assert errors == [None] * 3
        return
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("the ranks differ after step 2, and did not after step 1: rank")
    assert case.said in str(errors[0])
    assert {error and error.ranks for error in errors} == {case.ranks}


@pytest.mark.parametrize("name", CASES)
def test_a_finding_is_warned_of_once(name: str, found: list[dict[tuple[str, str], Found]]) -> None:
    """Although it is found again at the next check."""
    case = CASES[name]
    for by_case in found:
        found_here = by_case[name, "warn"]
        assert found_here.error is None
        assert [case.said in text for text in found_here.warnings] == ([True] if case.said else [])
        assert found_here.warnings == found[0][name, "warn"].warnings


@pytest.mark.parametrize("name", CASES)
def test_rank_zero_replaces_what_differs(name: str, found: list[dict[tuple[str, str], Found]]) -> None:
    """Then all have the same bits, and the next check finds nothing; what has another form is an error."""
    case, here = CASES[name], [by_case[name, "broadcast"] for by_case in found]
    if case.said is not None and not case.is_repaired:
        assert len({str(each.error) for each in here}) == 1
        assert "cannot make" in str(here[0].error)
        return
    assert [each.error for each in here] == [None] * 3
    assert [len(each.warnings) for each in here] == [case.said is not None] * 3
    assert all(
        case.said in text and "what rank 0 has took its place" in text for each in here for text in each.warnings
    )
    if name != "ignored":
        assert here[0].values == here[1].values == here[2].values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_divergence": "repair"}, "on_divergence must be one of 'raise', 'warn', 'broadcast' (got 'repair')"),
        (
            {"ignore": "data_dir"},
            "ignore must be a list of patterns such as ['data_dir', 'encoder.*'] (got 'data_dir')",
        ),
        ({"ignore": [1]}, "ignore must be a list of patterns"),
    ],
)
def test_arguments_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    """With what could."""
    with pytest.raises(OptionError) as caught:
        ReplicaCheck(warn=print, **options)
    assert str(caught.value).startswith(message)


def test_many_differences_and_ranks_are_counted() -> None:
    """A message names eight of each, and shortens values."""
    texts = tuple("x" * 200 if rank % 2 else "y" for rank in range(50))
    text = describe([Difference(f"option {number}", texts) for number in range(20)])
    assert text.startswith("ranks 1, 3, 5, 7, 9, 11, 13, 15 and 17 more in option 0 (y on ranks 0, 2, ")
    assert text.endswith(" and 12 more")
    assert f"{'x' * 77}... on ranks 1" in text
