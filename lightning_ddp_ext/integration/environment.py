"""A Lightning cluster environment that says what a World says."""

from __future__ import annotations

import os

from typing_extensions import override

from lightning_ddp_ext.world import World, check_devices

from .lightning_tree import (
    ClusterEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)


class WorldEnvironment(ClusterEnvironment):
    """For processes that somebody else started and that Lightning's own environments do not know.

    That is: one process per rank by hand (``rank=`` and ``world_size=``, or the variables ``RANK``, ``WORLD_SIZE`` and
    ``LOCAL_RANK``), and MPI launchers where mpi4py is not installed.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    @override
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self.world.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """Nothing: the world size is what the processes were started with."""

    @override
    def global_rank(self) -> int:
        return self.world.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Nothing: the rank is what the process was started with."""

    @override
    def local_rank(self) -> int:
        return self.world.local_rank

    @override
    def node_rank(self) -> int:
        return self.world.node_rank

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        check_devices(self.world, devices=num_devices, num_nodes=num_nodes)


def source_of(environment: ClusterEnvironment) -> str:
    """Who says which rank this process is, in a user's words."""
    if isinstance(environment, WorldEnvironment):
        return environment.world.source
    words = {SLURMEnvironment: "SLURM", TorchElasticEnvironment: "torchrun"}
    return words.get(type(environment), type(environment).__name__)
