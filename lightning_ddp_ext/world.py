"""Determine this process's place among the ranks, as plain integers.

``read_world`` reads the variables of the innermost launcher, since a process may
inherit those of outer launchers. The order is torchrun, Open MPI, PMI (MPICH, Intel
MPI), SLURM, and then RANK, WORLD_SIZE and LOCAL_RANK if all are set. A single MPI
process is not treated as a world: as Lightning does, the package starts the other ranks
from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_ddp_ext.arguments import integer
from lightning_ddp_ext.errors import ConfigurationError

Environ = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process among all processes of the run.

    Ranks are counted from 0.

    Attributes:
        rank: the number of this process among all processes.
        world_size: the number of all processes.
        local_rank: the number of this process among those of its node.
        local_world_size: the number of processes on this node.
        node_rank: the number of this node among all nodes.
        source: the origin of the numbers, for messages: ``"torchrun"``, ``"SLURM"`` ...

    Raises:
        ConfigurationError: a value is not an integer, or the numbers contradict each
            other.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    source: str

    def __post_init__(self) -> None:
        size = self._as_integer("world_size", 1, None, "count all processes of the run")
        self._as_integer("rank", 0, size - 1, "count the ranks from 0")
        local = self._as_integer("local_world_size", 1, size, "count the processes of this node")
        self._as_integer("local_rank", 0, local - 1, "count the processes of this node from 0")
        # Every other node has at least one rank.
        self._as_integer("node_rank", 0, size - local, "count the nodes from 0")

    @property
    def num_nodes(self) -> int:
        """The number of nodes.

        Every node except the last is assumed to have as many processes as this one.
        """
        return math.ceil(self.world_size / self.local_world_size)

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the first of all ranks."""
        return self.rank == 0

    def _as_integer(self, field: str, low: int, high: int | None, remedy: str) -> int:
        """Convert a field to an ``int`` and return it, or raise if it is out of range."""
        remedy += (
            f" (from {self.source}: world_size {self.world_size}, local_world_size"
            f" {self.local_world_size})"
        )
        number = integer(getattr(self, field), field, at_least=low, at_most=high, remedy=remedy)
        object.__setattr__(self, field, number)  # the dataclass is frozen
        return number


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The names of the variables in which a launcher describes a process's place.

    Of several names for one number, the first that is set counts.
    """

    source: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""
    node_rank: tuple[str, ...] = ()


BY_HAND = Launcher(
    source="RANK, WORLD_SIZE and LOCAL_RANK",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_world_size="LOCAL_WORLD_SIZE",
    node_rank=("NODE_RANK", "GROUP_RANK"),
)
TORCHRUN = replace(BY_HAND, source="torchrun", node_rank=("GROUP_RANK",))
OPEN_MPI = Launcher(
    source="Open MPI",
    rank="OMPI_COMM_WORLD_RANK",
    world_size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
)
PMI = Launcher(  # MPICH, Intel MPI
    source="PMI",
    rank="PMI_RANK",
    world_size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_world_size="MPI_LOCALNRANKS",
)
SLURM = Launcher(
    source="SLURM",
    rank="SLURM_PROCID",
    world_size="SLURM_NTASKS",
    local_rank="SLURM_LOCALID",
    node_rank=("SLURM_NODEID",),
)
# The variables that together name a run, by the launcher's source.
_RUN_VARIABLES = {
    TORCHRUN.source: ("TORCHELASTIC_RUN_ID",),
    OPEN_MPI.source: ("PMIX_NAMESPACE",),
    SLURM.source: ("SLURM_JOB_ID", "SLURM_STEP_ID"),
}


def read_world(environ: Environ, *, devices: int | None = None) -> World | None:
    """Return the world from a launcher's variables, or ``None`` without any.

    Args:
        environ: environment variables, usually ``os.environ``; not changed.
        devices: the Trainer's processes per node, used if no variable sets this number;
            by default as many as the node's rank implies, or ``world_size``.

    Raises:
        ConfigurationError: a variable is missing, not an integer, or out of range.

    >>> variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    >>> read_world(variables).node_rank
    1
    >>> read_world({"RANK": "3"}) is None
    True
    """
    launcher = launcher_of(environ)
    return None if launcher is None else _world_from(environ, launcher, devices)


def read_rank(environ: Environ) -> int | None:
    """Return the rank for log lines before the ranks connect; ``None`` if unknown.

    A script that Lightning started again on the first node has ``LOCAL_RANK`` but no
    ``RANK``.

    >>> first = read_rank({"LOCAL_RANK": "1", "NODE_RANK": "0"})
    >>> first, read_rank({}), read_rank({"NODE_RANK": "1"})
    (1, 0, None)
    """
    try:
        world = read_world(environ)
        if world is not None:
            return world.rank
        if _first_integer(environ, "NODE_RANK", "GROUP_RANK"):  # on another node than the first
            return None
        return _first_integer(environ, "LOCAL_RANK") or 0
    except ConfigurationError:
        return None


def check_devices(world: World, *, devices: int, num_nodes: int) -> None:
    """Raise if a Trainer's devices do not match the processes that were started.

    Raises:
        ConfigurationError: ``devices * num_nodes`` is not ``world.world_size``, or
            there are more ranks on a node than devices.
    """
    if devices * num_nodes != world.world_size:
        per_node = world.local_world_size
        remedy = f"start {devices} processes on each node"
        if world.world_size % per_node == 0:
            remedy = f"write Trainer(devices={per_node}, num_nodes={world.num_nodes}), or {remedy}"
        raise ConfigurationError(
            f"devices * num_nodes must equal world_size (got devices={devices} *"
            f" num_nodes={num_nodes} and world_size={world.world_size}, from {world.source});"
            f" {remedy}"
        )
    if world.local_rank >= devices:
        raise ConfigurationError(
            f"local_rank must be below devices (got local_rank={world.local_rank} from"
            f" {world.source} and devices={devices}); start {devices} processes on each node, or"
            " change the Trainer's devices"
        )


def launcher_of(environ: Environ) -> Launcher | None:
    """Return the innermost launcher that describes the ranks; ``None`` without one.

    Raises:
        ConfigurationError: the world size of Open MPI or PMI is not an integer.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return TORCHRUN
    if _has_several_processes(environ, OPEN_MPI):
        return OPEN_MPI
    # With srun --mpi=pmi2, both are set, but only SLURM's describe the nodes.
    slurm_describes_nodes = _is_slurm(environ) and PMI.local_rank not in environ
    is_pmi = PMI.rank in environ and _has_several_processes(environ, PMI)
    if is_pmi and not slurm_describes_nodes:
        return PMI
    if _is_slurm(environ):
        return SLURM
    is_by_hand = {BY_HAND.rank, BY_HAND.world_size, BY_HAND.local_rank} <= environ.keys()
    return BY_HAND if is_by_hand else None


def _has_several_processes(environ: Environ, launcher: Launcher) -> bool:
    return _first_integer(environ, launcher.world_size) not in (None, 1)


def _is_slurm(environ: Environ) -> bool:
    """Whether SLURM starts the ranks, which it does not in an interactive job.

    This is Lightning's rule: users start the ranks of such a job by other means.
    """
    is_interactive = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_NTASKS" in environ and not is_interactive


def run_of(source: str, environ: Environ) -> str:
    """Return the name that the launcher ``source`` gives to this run, if any.

    It is the same on all ranks of the run, and differs between runs.

    >>> run_of("SLURM", {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"})
    'SLURM_JOB_ID=12 SLURM_STEP_ID=0'
    """
    return " ".join(
        f"{name}={environ[name]}" for name in _RUN_VARIABLES.get(source, ()) if name in environ
    )


def _world_from(environ: Environ, launcher: Launcher, devices: int | None) -> World:
    """Return a World; compute missing numbers as if ranks filled node after node.

    A missing number of processes on this node is that of the Trainer's devices, or what
    the ranks on earlier nodes imply, or ``world_size``.
    """
    rank = _integer(environ, launcher.rank)
    world_size = _integer(environ, launcher.world_size)
    local_rank = _first_integer(environ, launcher.local_rank)
    node_rank = _first_integer(environ, *launcher.node_rank)
    local_world_size = (
        _slurm_tasks_on_node(environ)
        if launcher is SLURM
        else _first_integer(environ, launcher.local_world_size)
    )
    if local_world_size is None:
        ranks_on_earlier_nodes = rank - (local_rank or 0)
        if devices is None and node_rank and ranks_on_earlier_nodes > 0:
            devices = ranks_on_earlier_nodes // node_rank
        # check_devices refuses too many or too few devices, and names the user's numbers.
        known_processes = max(devices or world_size, (local_rank or 0) + 1)
        local_world_size = min(known_processes, world_size)
    per_node = max(local_world_size, 1)  # World raises for numbers below 1
    return World(
        rank=rank,
        world_size=world_size,
        local_rank=rank % per_node if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=rank // per_node if node_rank is None else node_rank,
        source=launcher.source,
    )


def _slurm_tasks_on_node(environ: Environ) -> int | None:
    """Return the number of tasks on this node; ``None`` if it is unknown.

    All nodes are assumed to have equally many, but more than the local rank.
    """
    nodes = _first_integer(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    if not nodes:
        return None
    tasks = math.ceil(_integer(environ, "SLURM_NTASKS") / nodes)
    return max(tasks, _integer(environ, "SLURM_LOCALID") + 1)


def _integer(environ: Environ, name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigurationError(
            f"{name} in the environment must be an integer (got {environ.get(name)!r}); for"
            f" example, set {name}=1, or unset the launcher's variables"
        ) from None


def _first_integer(environ: Environ, *names: str) -> int | None:
    """Return the value of the first variable that is set; ``None`` if all are unset."""
    return next((_integer(environ, name) for name in names if name in environ), None)
