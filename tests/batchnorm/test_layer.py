"""The synchronised BatchNorm layer: in one process, in groups of ranks, and its errors.

``test_joined_batch`` compares its results on all ranks.
"""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_ddp_ext import (
    BatchNormError,
    ConfigurationError,
    SyncBatchNorm,
    convert_sync_batchnorm,
)
from tests.harness.training import Kind, on_ranks


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
def test_in_one_process_the_layer_is_torchs(options: dict[str, Any]) -> None:
    """Without a process group the layer is torch's, to the last bit.

    The state dict of one fits the other.
    """
    ours = SyncBatchNorm(3, **options)
    plain = nn.BatchNorm2d(3, **options)
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(ours(x), plain(x))
    assert list(ours.state_dict()) == list(plain.state_dict())
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)
    ours.load_state_dict(plain.state_dict())
    plain.load_state_dict(ours.state_dict())


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(
            lambda layer, group: SyncBatchNorm(layer.num_features, process_group=group),
            id="by a new layer",
        ),
        pytest.param(
            lambda layer, group: convert_sync_batchnorm(layer, process_group=group),
            id="by a conversion",
        ),
    ],
)
@pytest.mark.parametrize("group", ["node", [0, 1], -100])
def test_what_cannot_be_a_group_is_refused(use: Any, group: Any) -> None:
    """The error has the value and the allowed ones; a layer is not converted.

    Torch's placeholder for a group without this rank is the same number as -100.
    """
    layer = nn.BatchNorm1d(3)
    with pytest.raises(ConfigurationError) as raised:
        use(layer, group)
    assert str(raised.value).startswith(
        "process_group must be a torch.distributed.ProcessGroup, as dist.new_group returns it, or"
        f" None for all ranks (got {group!r})"
    )
    assert type(layer) is nn.BatchNorm1d


# On two ranks: ``on_ranks`` forms the process group of stock, and calls a function in it.


def normalises_alone(kind: Kind, directory: Path) -> None:
    rank = dist.get_rank()
    batch = torch.randn(4 + rank, 3)
    if rank == 0:  # it must not wait for the other rank
        options: Any = {"track_running_stats": False}
        evaluated = SyncBatchNorm(3, **options).eval()(batch)
        assert torch.equal(evaluated, nn.BatchNorm1d(3, **options)(batch))
    first: Any = dist.new_group([0])
    normalised = SyncBatchNorm(3, process_group=first)(batch)
    torch.testing.assert_close(normalised, nn.BatchNorm1d(3)(batch))


def test_evaluation_and_a_group_of_one_rank_wait_for_no_other_rank(tmp_path: Path) -> None:
    """There, and on a rank outside of the group, the layer normalises as torch's does."""
    on_ranks("stock", normalises_alone, tmp_path)


def refuses_inputs(kind: Kind, directory: Path) -> None:
    with pytest.raises(ValueError, match=r"expected 2D to 5D input \(got 1D input\)"):
        SyncBatchNorm(3)(torch.ones(3))
    for channels in (1, 5):
        message = rf"expects inputs with 3 channels \(got shape \(2, {channels}\)"
        with pytest.raises(BatchNormError, match=message):
            SyncBatchNorm(3, affine=False)(torch.ones(2, channels))


def test_an_input_that_does_not_fit_the_layer_is_refused_on_every_rank(tmp_path: Path) -> None:
    """The error has the dimensions or the shape of the input."""
    on_ranks("stock", refuses_inputs, tmp_path)


def refuses_one_value(kind: Kind, directory: Path) -> None:
    rank = dist.get_rank()
    layer = SyncBatchNorm(3)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        BatchNormError, match="a BatchNorm layer needs more than 1 value per channel in training"
    ):
        layer(torch.ones(1 if rank == 1 else 0, 3))
    assert torch.equal(layer.running_mean, before["running_mean"])
    assert torch.equal(layer.running_var, before["running_var"])
    assert layer(torch.full((1, 3), float(rank))).shape == (1, 3)


def test_one_value_on_all_ranks_together_is_refused_on_every_rank(tmp_path: Path) -> None:
    """The layers keep their running statistics, and take more values later."""
    on_ranks("stock", refuses_one_value, tmp_path)


def refuses_second_derivative(kind: Kind, directory: Path) -> None:
    batch = torch.randn(4 + dist.get_rank(), 3, requires_grad=True)
    loss = SyncBatchNorm(3)(batch).square().sum()
    [gradient] = torch.autograd.grad(loss, batch, create_graph=True)
    with pytest.raises(RuntimeError, match="trying to differentiate twice a function"):
        gradient.square().sum().backward()


def test_a_second_derivative_is_refused_on_every_rank(tmp_path: Path) -> None:
    """The layer raises, instead of computing a wrong gradient."""
    on_ranks("stock", refuses_second_derivative, tmp_path)


# Groups.


def mean_of(*ranks: int) -> float:
    """Return the mean of these ranks' batches; the batch of rank r has the mean 2 ** r."""
    return sum(2.0**rank for rank in ranks) / len(ranks)


def means_of_groups(kind: Kind, directory: Path) -> dict[str, float]:
    """Return the mean over this rank's group, for each form of the argument."""
    rank = dist.get_rank()
    outer = dist.new_group([0, 3])
    inner = dist.new_group([1, 2])
    groups: dict[str, Any] = {
        "None": None,
        "own group": outer if rank in (0, 3) else inner,
        "group of 0 and 1": dist.new_group([0, 1]),
    }
    layers: dict[str, Any] = {
        form: convert_sync_batchnorm(nn.BatchNorm1d(1, momentum=1.0), process_group=group)
        for form, group in groups.items()
    }
    layers["pickled"] = pickle.loads(pickle.dumps(layers["own group"]))
    for layer in layers.values():
        layer(torch.tensor([[-1.0], [1.0]]) + mean_of(rank))
    return {form: layer.running_mean.item() for form, layer in layers.items()}


def test_statistics_are_those_of_the_ranks_in_the_group(tmp_path: Path) -> None:
    """Only ranks of the group count; a rank outside of it is alone.

    A pickled layer uses all ranks.
    """
    of_all = {"None": mean_of(0, 1, 2, 3), "pickled": mean_of(0, 1, 2, 3)}
    assert on_ranks("stock", means_of_groups, tmp_path, world_size=4) == [
        {**of_all, "own group": mean_of(0, 3), "group of 0 and 1": mean_of(0, 1)},
        {**of_all, "own group": mean_of(1, 2), "group of 0 and 1": mean_of(0, 1)},
        {**of_all, "own group": mean_of(1, 2), "group of 0 and 1": mean_of(2)},
        {**of_all, "own group": mean_of(0, 3), "group of 0 and 1": mean_of(3)},
    ]
