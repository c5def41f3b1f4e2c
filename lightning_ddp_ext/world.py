"""Which rank of how many is this process, and who says so?

``read_world`` believes the innermost launcher, because variables of the outer ones are inherited and then wrong:

=====================================  =======================================================================
source                                 believed when
=====================================  =======================================================================
arguments                              ``rank=`` and ``world_size=`` are given
torchrun                               ``TORCHELASTIC_RUN_ID`` is set
Open MPI                               ``OMPI_COMM_WORLD_SIZE`` is more than 1
PMI                                    ``PMI_RANK`` is set and ``PMI_SIZE`` is more than 1
SLURM                                  ``SLURM_NTASKS`` is set, and the job's name is not "bash" or "interactive"
RANK, WORLD_SIZE and LOCAL_RANK        all three are set
=====================================  =======================================================================

A single MPI process is no world: Lightning starts its own processes there, and so do we.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ddp_ext.errors import WorldError

Environ = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process among all processes of the run. All counts start at 0.

    Attributes:
        rank: this process among all.
        world_size: processes in all.
        local_rank: this process among those of its node.
        local_world_size: processes on this node.
        node_rank: this node among all.
        source: who said so, for messages: ``"torchrun"``, ``"SLURM"``, ``"arguments"`` ...

    Raises:
        WorldError: the numbers contradict one another.

    >>> world = World(rank=1, world_size=4, local_rank=1, local_world_size=2, node_rank=0, source="torchrun")
    >>> world.describe()
    'rank 1 of 4 (local rank 1, node 0; from torchrun)'
    >>> world.num_nodes
    2
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    source: str

    def __post_init__(self) -> None:
        for field in ("world_size", "rank", "local_world_size", "local_rank", "node_rank"):
            _check_integer(field, getattr(self, field))
        size, local_size = self.world_size, self.local_world_size
        _check_size("world_size", size, f"count all processes of the run (source: {self.source})")
        self._check_range("rank", 0, size - 1, "count the ranks from 0")
        self._check_range("local_world_size", 1, size, "count the processes of this node")
        self._check_range("local_rank", 0, local_size - 1, "count the processes of this node from 0")
        # Every other node holds at least one rank.
        self._check_range("node_rank", 0, size - local_size, "count the nodes from 0")

    @property
    def num_nodes(self) -> int:
        """Nodes, if all but the last one hold as many processes as this one."""
        return -(-self.world_size // self.local_world_size)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the first of all ranks."""
        return self.rank == 0

    def describe(self) -> str:
        """One phrase for logs and messages."""
        return (
            f"rank {self.rank} of {self.world_size}"
            f" (local rank {self.local_rank}, node {self.node_rank}; from {self.source})"
        )

    def _check_range(self, field: str, low: int, high: int, remedy: str) -> None:
        value = getattr(self, field)
        if low <= value <= high:
            return
        beside = f"world_size {self.world_size}"
        if field in ("local_rank", "node_rank"):
            beside += f" and local_world_size {self.local_world_size}"
        raise WorldError(
            f"{field} must be in {low}..{high} for {beside} (got {value}); {remedy} (source: {self.source})"
        )


def read_world(
    environ: Environ,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    devices: int | None = None,
) -> World | None:
    """The world that arguments or else a launcher's variables describe, ``None`` where nothing does.

    Args:
        environ: environment variables, usually ``os.environ``; only read.
        rank: this process among all; needs ``world_size``.
        world_size: processes in all; needs ``rank``.
        local_rank: this process on its node; else ``LOCAL_RANK``, else ``rank % devices``.
        devices: processes per node as the Trainer says; used where no variable says so, by default all of the world.

    Raises:
        WorldError: an argument is missing or wrong, or a variable is missing, is no integer, or is out of range.

    >>> read_world({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).node_rank
    1
    >>> read_world({"RANK": "3"}) is None
    True
    """
    if devices is not None:
        _check_integer("devices", devices)
        _check_size("devices", devices, "write Trainer(devices=1) for one process per node")
    if not (rank is None and world_size is None and local_rank is None):
        return _from_arguments(environ, rank, world_size, local_rank, devices)
    for read in (_from_torchrun, _from_open_mpi, _from_pmi, _from_slurm, _from_plain):
        world = read(environ, devices)
        if world is not None:
            return world
    return None


def read_rank(environ: Environ) -> tuple[int | None, int | None]:
    """Rank and world size as far as they can be told before the ranks have met; ``None`` where they cannot.

    For lines of a log: never an error. A script that Lightning has started once more for a device of the first node
    is known as well, which has ``LOCAL_RANK`` but no ``RANK``; and a process of which nobody says anything is rank 0.

    >>> read_rank({"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"})
    (1, 2)
    >>> read_rank({})
    (0, None)
    >>> read_rank({"NODE_RANK": "1"})
    (None, None)
    """
    try:
        world = read_world(environ)
        if world is not None:
            return world.rank, world.world_size
        is_on_first_node = not _known(environ, "NODE_RANK", "GROUP_RANK")
        rank = _known(environ, "LOCAL_RANK") or 0 if is_on_first_node else None
        return rank, _known(environ, "WORLD_SIZE")
    except WorldError:
        return None, None


def check_devices(world: World, *, devices: int, num_nodes: int) -> None:
    """Refuse a Trainer whose processes are not those that were started.

    Args:
        world: what the launcher or the arguments say.
        devices: processes per node as the Trainer says.
        num_nodes: nodes as the Trainer says.

    Raises:
        WorldError: ``devices * num_nodes`` is not ``world.world_size``, or there are more ranks on a node than devices.
    """
    if devices * num_nodes != world.world_size:
        raise WorldError(
            f"devices * num_nodes must equal world_size (got devices={devices} * num_nodes={num_nodes}"
            f" and world_size={world.world_size}, from {world.source}); {_trainer_remedy(world, devices)}"
        )
    if world.local_rank >= devices:
        raise WorldError(
            f"local_rank must be below devices (got local_rank={world.local_rank} from {world.source} and "
            f"devices={devices}); start {devices} processes on each node, or give the Trainer other devices"
        )


def _from_arguments(
    environ: Environ, rank: int | None, world_size: int | None, local_rank: int | None, devices: int | None
) -> World:
    given = {"rank": rank, "world_size": world_size, "local_rank": local_rank}
    present = {field: value for field, value in given.items() if value is not None}
    for field, value in present.items():
        _check_integer(field, value)
    if rank is None or world_size is None:
        missing = "rank" if rank is None else "world_size"
        alone = ", ".join(f"{field}={value}" for field, value in present.items())
        raise WorldError(f"{missing} must be given too (got {alone} alone); write rank=0, world_size=2 on rank 0")
    return _complete(
        rank,
        world_size,
        local_rank=_known(environ, "LOCAL_RANK") if local_rank is None else local_rank,
        local_world_size=_known(environ, "LOCAL_WORLD_SIZE"),
        node_rank=_known(environ, "NODE_RANK", "GROUP_RANK"),
        devices=devices,
        source="arguments",
    )


def _from_torchrun(environ: Environ, devices: int | None) -> World | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    _require(environ, names, beside="TORCHELASTIC_RUN_ID", remedy="start with torchrun, or unset TORCHELASTIC_RUN_ID")
    return _complete(
        _integer(environ, "RANK"),
        _integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=_known(environ, "LOCAL_WORLD_SIZE"),
        node_rank=_known(environ, "GROUP_RANK"),
        devices=devices,
        source="torchrun",
    )


def _from_open_mpi(environ: Environ, devices: int | None) -> World | None:
    if _known(environ, "OMPI_COMM_WORLD_SIZE") in (None, 1):
        return None
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    _require(environ, names, beside="OMPI_COMM_WORLD_SIZE", remedy="start with mpirun, or unset OMPI_COMM_WORLD_SIZE")
    return _complete(
        _integer(environ, "OMPI_COMM_WORLD_RANK"),
        _integer(environ, "OMPI_COMM_WORLD_SIZE"),
        local_rank=_integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=_known(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        devices=devices,
        source="Open MPI",
    )


def _from_pmi(environ: Environ, devices: int | None) -> World | None:
    if "PMI_RANK" not in environ or _known(environ, "PMI_SIZE") in (None, 1):
        return None
    local_rank = _known(environ, "MPI_LOCALRANKID", "PMI_LOCAL_RANK")  # Hydra (MPICH, Intel MPI), Cray
    if local_rank is None and is_slurm(environ):
        return None  # srun --mpi=pmi2: the ranks are the same, but only SLURM's own variables tell the nodes
    return _complete(
        _integer(environ, "PMI_RANK"),
        _integer(environ, "PMI_SIZE"),
        local_rank=local_rank,
        local_world_size=_known(environ, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        devices=devices,
        source="PMI",
    )


def _from_slurm(environ: Environ, devices: int | None) -> World | None:
    if not is_slurm(environ):
        return None
    remedy = "start with srun, or name the job 'interactive' (--job-name=interactive) to start processes otherwise"
    _require(environ, ("SLURM_PROCID", "SLURM_LOCALID"), beside="SLURM_NTASKS", remedy=remedy)
    world_size = _integer(environ, "SLURM_NTASKS")
    local_rank = _integer(environ, "SLURM_LOCALID")
    tasks_on_node = _slurm_tasks_on_node(environ, world_size)
    return _complete(
        _integer(environ, "SLURM_PROCID"),
        world_size,
        local_rank=local_rank,
        # Lightning accepts a local rank beyond what SLURM_NTASKS_PER_NODE says.
        local_world_size=None if tasks_on_node is None else max(tasks_on_node, local_rank + 1),
        node_rank=_known(environ, "SLURM_NODEID"),
        devices=devices,
        source="SLURM",
    )


def _from_plain(environ: Environ, devices: int | None) -> World | None:
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= environ.keys():
        return None
    return _complete(
        _integer(environ, "RANK"),
        _integer(environ, "WORLD_SIZE"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        local_world_size=_known(environ, "LOCAL_WORLD_SIZE"),
        node_rank=_known(environ, "NODE_RANK", "GROUP_RANK"),
        devices=devices,
        source="RANK, WORLD_SIZE and LOCAL_RANK",
    )


def _complete(
    rank: int,
    world_size: int,
    *,
    source: str,
    devices: int | None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    node_rank: int | None = None,
) -> World:
    """A World in which what nobody says is worked out as if ranks filled one node after another."""
    if local_world_size is None:
        # More devices than ranks is for check_devices to refuse: it names both numbers as the user wrote them.
        local_world_size = world_size if devices is None else min(devices, world_size)
    per_node = max(local_world_size, 1)  # what is below 1 is for World to refuse
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank % per_node if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=rank // per_node if node_rank is None else node_rank,
        source=source,
    )


def is_slurm(environ: Environ) -> bool:
    """Lightning's rule: an interactive job is a shell in which people start processes by other means."""
    return "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def _slurm_tasks_on_node(environ: Environ, world_size: int) -> int | None:
    """Tasks on this node: by the layout, unless that is of another step with other tasks, or else as requested."""
    node = _known(environ, "SLURM_NODEID")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        layout = _slurm_layout(environ, name) if name in environ else []
        if node is not None and sum(layout) == world_size and 0 <= node < len(layout):
            return layout[node]
    return _known(environ, "SLURM_NTASKS_PER_NODE")


def _slurm_layout(environ: Environ, name: str) -> list[int]:
    """Tasks of each node: ``"2(x3),1"`` is ``[2, 2, 2, 1]``."""
    layout: list[int] = []
    for part in environ[name].split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise WorldError(f"{name} must read like '2(x3),1' (got {environ[name]!r}); unset it, or start with srun")
        layout += [int(match[1])] * int(match[2] or 1)
    return layout


def _check_integer(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        kind = type(value).__name__
        raise WorldError(f"{field} must be an integer (got {value!r}, of type {kind}); write {field}=1, say")


def _check_size(field: str, value: int, remedy: str) -> None:
    if value < 1:
        raise WorldError(f"{field} must be at least 1 (got {value}); {remedy}")


def _integer(environ: Environ, name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise WorldError(
            f"{name} in the environment must be an integer (got {environ[name]!r}); unset it, or write {name}=1, say"
        ) from None


def _known(environ: Environ, *names: str) -> int | None:
    """The first of the variables that is set."""
    return next((_integer(environ, name) for name in names if name in environ), None)


def _require(environ: Environ, names: tuple[str, ...], *, beside: str, remedy: str) -> None:
    for name in names:
        if name not in environ:
            raise WorldError(f"{name} must be set beside {beside}={environ[beside]!r} (got nothing); {remedy}")


def _trainer_remedy(world: World, devices: int) -> str:
    per_node, nodes = world.local_world_size, world.num_nodes
    if per_node * nodes != world.world_size:
        return "start as many processes on each node, and write Trainer(devices=processes per node, num_nodes=nodes)"
    remedy = f"write Trainer(devices={per_node}, num_nodes={nodes})"
    if world.source == "SLURM":
        return f"{remedy}, or start with srun --ntasks-per-node={devices}"
    if per_node == devices:
        return f"{remedy}, or Trainer(devices={world.world_size}) if all ranks share one node"
    return remedy
