"""Checkpoints saved on a GPU, also in the background, are whole and load anywhere."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.gpu.placement import (
    GLOO,
    IS_GPU,
    ONE_EACH_REVERSED,
    Placement,
    Wide,
    on_cpu,
    torch_devices,
)
from tests.harness import training
from tests.integration import checkpointing


@pytest.fixture(params=["one GPU", "two GPUs"])
def ranks_on_gpus(request: pytest.FixtureRequest) -> Placement:
    """Return two ranks that share a GPU, or have one each, where rank 0 has the second."""
    if request.param == "one GPU":
        return GLOO
    if IS_GPU and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return ONE_EACH_REVERSED


def save_in_training(
    rank: int, world_size: int, placement: Placement, path: Path, is_background: bool
) -> None:
    """Save after the second step, and train on; threads read the device meanwhile."""
    L.seed_everything(1)
    save = partial(L.Trainer.save_checkpoint, filepath=path)
    placement.trainer(
        path.parent,
        plugins=[checkpointing.make_io(is_background=is_background)],
        callbacks=[training.At("on_train_batch_end", save, earlier=1)],
    ).fit(Wide())


def content_saved(placement: Placement, path: Path, *, is_background: bool) -> list[Any]:
    """Save in a training, and return the weights and the optimiser's states in the file."""
    placement.run(save_in_training, path, is_background)
    checkpoint = torch.load(path, map_location="cpu")
    return [checkpoint["state_dict"], checkpoint["optimizer_states"]]


def test_a_background_save_has_the_content_of_a_foreground_save(
    ranks_on_gpus: Placement, tmp_path: Path
) -> None:
    """Checkpoints saved in the background while training continues are whole."""
    foreground = content_saved(ranks_on_gpus, tmp_path / "foreground.ckpt", is_background=False)
    background = content_saved(ranks_on_gpus, tmp_path / "background.ckpt", is_background=True)
    training.assert_same(background, foreground)


def save_and_list_gpus(rank: int, world_size: int, placement: Placement, path: Path) -> list[int]:
    """Save in the background; return the GPUs on which this process has a context."""
    save_in_training(rank, world_size, placement, path, is_background=True)
    gpus = range(torch.cuda.device_count())
    return [number for number in gpus if torch._C._cuda_hasPrimaryContext(number)]


def test_each_rank_uses_only_its_own_gpu(ranks_on_gpus: Placement, tmp_path: Path) -> None:
    """Of two GPUs each rank uses its own for a background save, and the file has rank
    0's.
    """
    path = tmp_path / "saved.ckpt"
    gpus_in_use = ranks_on_gpus.run(save_and_list_gpus, path)
    devices = torch_devices(ranks_on_gpus.devices)
    assert gpus_in_use == [[device.index] if IS_GPU else [] for device in devices]
    saved = torch.load(path)["state_dict"].values()
    assert {value.device for value in saved} == {devices[0]}


def devices_of_momenta(
    rank: int, world_size: int, placement: Placement, directory: Path, path: Path
) -> set[str]:
    """Return where a resumed run has the optimiser's states."""
    devices: set[str] = set()

    def record(trainer: L.Trainer) -> None:
        states = trainer.optimizers[0].state.values()
        devices.update(str(state["momentum_buffer"].device) for state in states)

    recording = training.At("on_train_start", record)
    placement.trainer(directory, callbacks=[recording]).fit(Wide(), ckpt_path=path)
    return devices


def test_a_checkpoint_loads_on_a_gpu_and_on_the_cpu(
    ranks_on_gpus: Placement, tmp_path: Path
) -> None:
    """A run that resumes from a background save has its optimiser on its own devices."""
    path = tmp_path / "saved.ckpt"
    ranks_on_gpus.run(save_in_training, path, True)
    for resumed_on in (ranks_on_gpus, on_cpu(2)):
        devices = resumed_on.run(devices_of_momenta, tmp_path, path)
        assert devices == [{device} for device in resumed_on.devices]
