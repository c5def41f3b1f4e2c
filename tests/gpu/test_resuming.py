"""Training on a GPU continues after stops and deaths as if they had not happened, and its
checkpoints load anywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from tests.gpu.conftest import (
    ALONE,
    GLOO,
    GPU,
    IS_GPU,
    NCCL,
    ONE_EACH_REVERSED,
    Placement,
    Wide,
    on_cpu,
    torch_devices,
)
from tests.harness import training
from tests.harness.ranks import run_ranks
from tests.integration import checkpointing, continuing, early_ends

ON_ANY_DEVICE = {"accelerator": "auto", "devices": "auto"}  # the strategy names them


def resume_with_dropout(
    rank: int, world_size: int, placement: Placement, directory: Path
) -> dict[str, str]:
    """Return how a run that is resumed after its third step differs from a whole one."""
    run = continuing.Training(
        continuing.shuffled(16), directory, world_size, ON_ANY_DEVICE, placement.options
    )
    return continuing.generations(run, ["train_batch_end-3"])


@pytest.mark.parametrize("placement", [GLOO, ALONE], ids=["gloo", "1 rank"])
def test_a_resumed_run_draws_the_random_numbers_that_were_next(
    placement: Placement, tmp_path: Path
) -> None:
    """A resumed run with dropout ends with the weights of a run without a stop."""
    assert placement.run(resume_with_dropout, tmp_path) == [{}] * len(placement.devices)


def plan_on(placement: Placement, **strategy: Any) -> early_ends.Plan:
    """Return the plan of a run in float32 on these devices, with more options of the
    strategy.
    """
    strategy = {
        "parallel_devices": torch_devices(placement.devices),
        "process_group_backend": placement.backend,
        **strategy,
    }
    return early_ends.Plan(strategy=strategy, trainer=ON_ANY_DEVICE)


class Scaled(early_ends.Net):
    """Has the scale of a ``GradScaler`` in a buffer, so that it is compared as a weight
    is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))

    def training_step(self, batch: training.Batch, index: int) -> torch.Tensor:
        # Users get the scaler of a run from its precision plugin.
        self.scale.fill_(self.trainer.precision_plugin.scaler.get_scale())
        return super().training_step(batch, index)


def float16_plan_on(placement: Placement) -> early_ends.Plan:
    """Return the plan of a run in float16 on these devices; the scale grows every eight
    steps.
    """
    device_type = torch.device(GPU).type
    scaler = torch.amp.GradScaler(device_type, init_scale=256.0, growth_interval=8)
    precision = MixedPrecision("16-mixed", device_type, scaler)
    return replace(
        plan_on(placement), trainer={**ON_ANY_DEVICE, "plugins": [precision]}, model=Scaled
    )


def weights_after(
    kills: Sequence[early_ends.Kill], plan: early_ends.Plan, placement: Placement, directory: Path
) -> list[dict[str, torch.Tensor]]:
    """Run the plan on ranks started by hand, again after each kill; return the weights
    of each rank.

    Ranks that use NCCL save nothing when another one dies, so that the steps after the last
    checkpoint are lost, and trained again.
    """
    return early_ends.survive(
        2, plan, kills, directory, may_lose=placement.backend == NCCL, env=placement.variables
    )


AFTER_BACKWARD = early_ends.Kill("on_after_backward", 9, [0])
IN_A_SAVE = early_ends.Kill("writing", 1, [0])
STOP = early_ends.Kill("on_train_batch_end", 3, by="sigterm")


@pytest.mark.parametrize(
    ("placement", "make_plan", "kills"),
    [
        pytest.param(
            "gloo",
            plan_on,
            [AFTER_BACKWARD, early_ends.Kill("on_validation_batch_end", 1), IN_A_SAVE, STOP],
            id="gloo",
        ),
        pytest.param("NCCL", plan_on, [AFTER_BACKWARD, IN_A_SAVE, STOP], id="NCCL"),
        pytest.param("gloo", float16_plan_on, [AFTER_BACKWARD, STOP], id="float16"),
    ],
    indirect=["placement"],
)
def test_a_killed_rank_costs_no_step(
    placement: Placement,
    make_plan: Callable[[Placement], early_ends.Plan],
    kills: Sequence[early_ends.Kill],
    tmp_path: Path,
) -> None:
    """A run that is resumed after each kill and after SIGTERM ends as an undisturbed
    run, to the last bit; with NCCL it is resumed from its last checkpoint.
    """
    plan = make_plan(placement)
    undisturbed = weights_after([], plan, placement, tmp_path / "undisturbed")
    disturbed = weights_after(kills, plan, placement, tmp_path / "disturbed")
    training.assert_same(disturbed, undisturbed)


@pytest.mark.parametrize("start_method", ["spawn", "forkserver", "fork"])
def test_each_start_method_trains_on_a_gpu(start_method: str, tmp_path: Path) -> None:
    """Ranks started by spawn, forkserver and fork learn as ranks that were started by
    hand.
    """
    by_hand, _ = weights_after([], plan_on(GLOO), GLOO, tmp_path / "by hand")
    del by_hand["steps"]  # which only ranks that are started by hand return
    plan = plan_on(GLOO, start_method=start_method)
    [started] = run_ranks(early_ends.train, 1, plan, tmp_path / "started", env={})
    training.assert_same(started, by_hand)


# Checkpoints.


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
) -> list[int]:
    """Save after the second step, and train on; threads read the device meanwhile.

    Return the GPUs on which this process has a context.
    """
    L.seed_everything(1)
    save = partial(L.Trainer.save_checkpoint, filepath=path)
    placement.trainer(
        path.parent,
        plugins=[checkpointing.make_io(is_background=is_background)],
        callbacks=[training.At("on_train_batch_end", save, earlier=1)],
    ).fit(Wide())
    gpus = range(torch.cuda.device_count())
    # A context takes hundreds of MB of a GPU; no public function of torch tells who has one.
    return [number for number in gpus if torch._C._cuda_hasPrimaryContext(number)]


def test_a_background_save_has_the_content_of_a_foreground_save(
    ranks_on_gpus: Placement, tmp_path: Path
) -> None:
    """Checkpoints saved in the background while training continues are whole.

    Of two GPUs each rank uses its own, and the file has rank 0's.
    """
    foreground = tmp_path / "foreground.ckpt"
    background = tmp_path / "background.ckpt"
    ranks_on_gpus.run(save_in_training, foreground, False)
    gpus_in_use = ranks_on_gpus.run(save_in_training, background, True)
    devices = torch_devices(ranks_on_gpus.devices)
    assert gpus_in_use == [[device.index] if IS_GPU else [] for device in devices]
    saved = torch.load(background)
    assert {value.device for value in saved["state_dict"].values()} == {devices[0]}
    for name in ("state_dict", "optimizer_states"):
        training.assert_same(saved[name], torch.load(foreground)[name])


def devices_of_momenta(
    rank: int, world_size: int, placement: Placement, directory: Path, path: Path
) -> set[str]:
    """Return where a resumed run has the optimiser's states."""
    devices: set[str] = set()

    def record(trainer: L.Trainer) -> None:
        states = trainer.optimizers[0].state.values()
        devices.update(str(state["momentum_buffer"].device) for state in states)

    callbacks = [training.At("on_train_start", record)]
    placement.trainer(directory, callbacks=callbacks).fit(Wide(), ckpt_path=path)
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
