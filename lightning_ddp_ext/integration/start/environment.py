"""Determine a process's rank from a launcher's variables or Lightning's environment."""

from __future__ import annotations

import os

from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.supervision.started_ranks import started_ranks
from lightning_ddp_ext.world import SLURM, TORCHRUN, World, check_devices, read_world

from ..private.lightning_tree import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
    pl,
)

# The number of tasks that srun has started; only they have this variable.
_TASKS_OF_STEP = "SLURM_STEP_NUM_TASKS"


class WorldEnvironment(LightningEnvironment):
    """The environment of processes whose launcher Lightning does not detect.

    Examples are MPI without mpi4py and a user's shell.

    Attributes:
        world: the place of this process among all ranks.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def world_size(self) -> int:
        return self.world.world_size

    @override
    def global_rank(self) -> int:
        return self.world.rank

    @override
    def local_rank(self) -> int:
        return self.world.local_rank

    @override
    def node_rank(self) -> int:
        return self.world.node_rank

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        check_devices(self.world, devices=num_devices, num_nodes=num_nodes)

    @override
    def teardown(self) -> None:
        """Leave the variables unchanged."""


def source_of(environment: ClusterEnvironment) -> str:
    """Return the name of the launcher that set this process's rank, for messages."""
    if isinstance(environment, WorldEnvironment):
        return environment.world.source
    names = {SLURMEnvironment: SLURM.source, TorchElasticEnvironment: TORCHRUN.source}
    return names.get(type(environment), type(environment).__name__)


def world_of(strategy: pl.strategies.DDPStrategy) -> World:
    """Return the place of this strategy's process among all ranks."""
    environment = strategy.cluster_environment
    assert environment is not None
    if isinstance(environment, WorldEnvironment):
        return environment.world
    return World(
        rank=strategy.global_rank,
        world_size=strategy.num_nodes * strategy.num_processes,
        local_rank=strategy.local_rank,
        local_world_size=strategy.num_processes,
        node_rank=strategy.node_rank,
        source=source_of(environment),
    )


def choose_environment(
    environment: ClusterEnvironment | None, *, devices: int, num_nodes: int
) -> ClusterEnvironment | None:
    """Return the environment that determines this process's rank.

    It is the given one, or one of ours for launchers that Lightning does not detect.

    Args:
        environment: the environment that the user or Lightning chose.
        devices: the Trainer's ranks on each node.
        num_nodes: the Trainer's nodes.

    Raises:
        ConfigurationError: the processes that a launcher started do not match these
            numbers, or its variables are invalid.
    """
    is_from_user_or_torchrun = type(environment) not in (LightningEnvironment, SLURMEnvironment)
    if is_from_user_or_torchrun or started_ranks() is not None:
        return environment
    world = read_world(os.environ, devices=devices)
    if world is None:
        _check_ignored_tasks(devices * num_nodes)
        _check_local_rank(environment, devices)
        return environment
    check_devices(world, devices=devices, num_nodes=num_nodes)
    is_lightnings = type(environment) is SLURMEnvironment and world.source == SLURM.source
    return environment if is_lightnings else WorldEnvironment(world)


def _check_local_rank(environment: ClusterEnvironment | None, devices: int) -> None:
    """Raise if this process was started for a rank that this Trainer does not have."""
    if type(environment) is LightningEnvironment and environment.local_rank() >= devices:
        raise ConfigurationError(
            f"this process is local rank {environment.local_rank()}, but this Trainer has"
            f" devices={devices}; use the same devices for all Trainers of a script, or"
            " strategy='auto' for a Trainer with one device"
        )


def _check_ignored_tasks(ranks: int) -> None:
    """Raise if srun started this Trainer's ranks in a job in which Lightning ignores SLURM."""
    job_name = os.environ.get("SLURM_JOB_NAME")
    tasks = os.environ.get(_TASKS_OF_STEP)
    if job_name is not None and tasks == str(ranks) and ranks > 1:
        raise ConfigurationError(
            f"srun started {tasks} tasks, but Lightning ignores SLURM in a job named {job_name!r},"
            " so each task would train alone; use srun --job-name=train, or unset"
            f" {_TASKS_OF_STEP} if each task has to start its own ranks"
        )
