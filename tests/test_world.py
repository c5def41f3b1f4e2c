"""The world is read from whoever started the processes, and contradictions are named."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_ddp_ext.world
from lightning_ddp_ext.errors import WorldError
from lightning_ddp_ext.run_id import run_id_from_launcher, sanitise
from lightning_ddp_ext.world import World, check_devices, read_world

PLAIN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
TORCHRUN = {
    **PLAIN,
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-99@1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
CRAY = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PMI_JOBID": "a.b/c"}
BATCH_SHELL = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def world(**changes: Any) -> World:
    """Rank 3 of 4, the second on the second of two nodes."""
    facts = {"rank": 3, "world_size": 4, "local_rank": 1, "local_world_size": 2, "node_rank": 1, "source": "torchrun"}
    return World(**{**facts, **changes})


def read(environ: dict[str, str], **arguments: Any) -> World:
    """A world that is there."""
    found = read_world(environ, **arguments)
    assert found is not None
    return found


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    """All variables but these."""
    return {name: value for name, value in environ.items() if name not in names}


def message(environ: dict[str, str], **arguments: Any) -> str:
    """What a user reads when the world is refused."""
    with pytest.raises(WorldError) as refused:
        read_world(environ, **arguments)
    return str(refused.value)


# What a World is


def test_describe_says_where_and_from_whom() -> None:
    """A world introduces itself in one phrase."""
    assert world().describe() == "rank 3 of 4 (local rank 1, node 1; from torchrun)"


@pytest.mark.parametrize(("size", "local_size", "nodes"), [(4, 2, 2), (4, 4, 1), (5, 2, 3), (1, 1, 1), (7, 3, 3)])
def test_num_nodes_rounds_up(size: int, local_size: int, nodes: int) -> None:
    """A last node that is not full counts as one."""
    found = world(rank=0, world_size=size, local_rank=0, local_world_size=local_size, node_rank=0)
    assert found.num_nodes == nodes


def test_only_rank_zero_is_rank_zero() -> None:
    """The first on its node is not the first of all."""
    assert world(rank=0, local_rank=0, node_rank=0).is_rank_zero
    assert not world(rank=2, local_rank=0).is_rank_zero


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rank": 2, "world_size": 2, "local_world_size": 1, "local_rank": 0},
            "rank must be in 0..1 for world_size 2 (got 2); count the ranks from 0 (source: torchrun)",
        ),
        ({"rank": -1}, "rank must be in 0..3 for world_size 4 (got -1); count the ranks from 0 (source: torchrun)"),
        (
            {"world_size": 0},
            "world_size must be at least 1 (got 0); count all processes of the run (source: torchrun)",
        ),
        (
            {"local_world_size": 5},
            "local_world_size must be in 1..4 for world_size 4 (got 5);"
            " count the processes of this node (source: torchrun)",
        ),
        (
            {"local_rank": 2},
            "local_rank must be in 0..1 for world_size 4 and local_world_size 2 (got 2);"
            " count the processes of this node from 0 (source: torchrun)",
        ),
        (
            {"node_rank": 3},
            "node_rank must be in 0..2 for world_size 4 and local_world_size 2 (got 3);"
            " count the nodes from 0 (source: torchrun)",
        ),
        ({"rank": "3"}, "rank must be an integer (got '3', of type str); write rank=1, say"),
        ({"local_rank": True}, "local_rank must be an integer (got True, of type bool); write local_rank=1, say"),
    ],
)
def test_a_world_that_contradicts_itself_is_refused(changes: dict[str, Any], expected: str) -> None:
    """Each number that cannot be names its field, its range, its value and its source."""
    with pytest.raises(WorldError) as refused:
        world(**changes)
    assert str(refused.value) == expected


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_rank_is_node_times_processes_plus_local_rank(nodes: int, per_node: int, data: st.DataObject) -> None:
    """However a world is told, its node and local rank lead back to its rank."""
    rank = data.draw(st.integers(0, nodes * per_node - 1))
    size = nodes * per_node
    plain = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % per_node)}
    found = [
        read({}, rank=rank, world_size=size, devices=per_node),
        read(plain, devices=per_node),
        read({**plain, "LOCAL_WORLD_SIZE": str(per_node)}),
        read({"PMI_RANK": str(rank), "PMI_SIZE": str(size)}, devices=per_node) if size > 1 else world(),
    ]
    for each in found:
        assert each.rank == each.node_rank * each.local_world_size + each.local_rank
    assert {each.num_nodes for each in found[:3]} == {nodes}


# Where it is read


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        (TORCHRUN, "torchrun"),
        (SLURM, "SLURM"),
        (OPEN_MPI, "Open MPI"),
        (HYDRA, "PMI"),
        (CRAY, "PMI"),
        ({**PLAIN, "LOCAL_WORLD_SIZE": "2"}, "RANK, WORLD_SIZE and LOCAL_RANK"),
    ],
)
def test_every_launcher_says_the_same_in_its_own_words(environ: dict[str, str], source: str) -> None:
    """The fourth process of two nodes is recognised from each launcher's variables."""
    assert read(environ) == world(source=source)


@pytest.mark.parametrize(
    ("layers", "source"),
    [
        ([TORCHRUN, SLURM, OPEN_MPI, HYDRA], "torchrun"),
        ([SLURM, PLAIN], "SLURM"),
        ([BATCH_SHELL, OPEN_MPI], "Open MPI"),
        ([BATCH_SHELL, HYDRA], "PMI"),
        ([OPEN_MPI, PLAIN], "Open MPI"),
        ([SLURM, {"PMI_RANK": "3", "PMI_SIZE": "4"}], "SLURM"),
    ],
)
def test_the_innermost_launcher_is_believed(layers: list[dict[str, str]], source: str) -> None:
    """Variables that an outer launcher left behind do not overrule the one that started this process."""
    environ = dict(itertools.chain.from_iterable(layer.items() for layer in layers))
    assert read(environ) == world(source=source, local_world_size=2)


def test_arguments_go_before_every_launcher() -> None:
    """What the user writes is believed first."""
    assert read(SLURM, rank=0, world_size=2, devices=2).describe() == (
        "rank 0 of 2 (local rank 0, node 0; from arguments)"
    )


@pytest.mark.parametrize(
    ("arguments", "environ", "local_rank", "local_world_size", "node_rank"),
    [
        ({"devices": 2}, {}, 1, 2, 1),
        ({}, {}, 3, 4, 0),
        ({"devices": 2, "local_rank": 0}, {}, 0, 2, 1),
        ({"devices": 2}, {"LOCAL_RANK": "0"}, 0, 2, 1),
        ({"devices": 4}, {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "2"}, 1, 2, 2),
        ({"devices": 8}, {}, 3, 4, 0),
    ],
)
def test_arguments_are_completed(
    arguments: dict[str, int], environ: dict[str, str], local_rank: int, local_world_size: int, node_rank: int
) -> None:
    """Local rank and node come from arguments, else from variables, else from the Trainer's devices."""
    expected = world(local_rank=local_rank, local_world_size=local_world_size, node_rank=node_rank, source="arguments")
    assert read(environ, rank=3, world_size=4, **arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"rank": 1}, "world_size must be given too (got rank=1 alone); write rank=0, world_size=2 on rank 0"),
        ({"world_size": 2}, "rank must be given too (got world_size=2 alone); write rank=0, world_size=2 on rank 0"),
        ({"local_rank": 0}, "rank must be given too (got local_rank=0 alone); write rank=0, world_size=2 on rank 0"),
        (
            {"rank": 2, "world_size": 2},
            "rank must be in 0..1 for world_size 2 (got 2); count the ranks from 0 (source: arguments)",
        ),
        (
            {"rank": 0, "world_size": -1},
            "world_size must be at least 1 (got -1); count all processes of the run (source: arguments)",
        ),
        ({"rank": "0", "world_size": 2}, "rank must be an integer (got '0', of type str); write rank=1, say"),
        ({"devices": 0}, "devices must be at least 1 (got 0); write Trainer(devices=1) for one process per node"),
        ({"devices": "auto"}, "devices must be an integer (got 'auto', of type str); write devices=1, say"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], expected: str) -> None:
    """A rank without a world size, or one out of range, names field, value and remedy."""
    assert message({}, **arguments) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"},
        {"RANK": "zero"},
        {"PMIX_RANK": "1"},
        {"PMI_RANK": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
        {**SLURM, "SLURM_JOB_NAME": "bash"},
        {**SLURM, "SLURM_JOB_NAME": "interactive"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_leftovers_are_no_launcher(environ: dict[str, str]) -> None:
    """Variables that do not make a whole world, interactive jobs and single MPI processes leave it to Lightning."""
    assert read_world(environ) is None


@pytest.mark.parametrize(
    ("environ", "name", "beside", "remedy"),
    [
        (TORCHRUN, "LOCAL_RANK", "TORCHELASTIC_RUN_ID='none'", "start with torchrun, or unset TORCHELASTIC_RUN_ID"),
        (TORCHRUN, "WORLD_SIZE", "TORCHELASTIC_RUN_ID='none'", "start with torchrun, or unset TORCHELASTIC_RUN_ID"),
        (SLURM, "SLURM_PROCID", "SLURM_NTASKS='4'", "start with srun, or unset SLURM_NTASKS"),
        (
            OPEN_MPI,
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE='4'",
            "start with mpirun, or unset OMPI_COMM_WORLD_SIZE",
        ),
    ],
)
def test_a_half_set_launcher_is_refused(environ: dict[str, str], name: str, beside: str, remedy: str) -> None:
    """Where a launcher is certain, a variable that it forgot is named."""
    assert message(without(environ, name)) == f"{name} must be set beside {beside} (got nothing); {remedy}"


@pytest.mark.parametrize(
    ("environ", "name", "value"),
    [
        (PLAIN, "RANK", "zero"),
        (PLAIN, "WORLD_SIZE", ""),
        (PLAIN, "LOCAL_WORLD_SIZE", "2.0"),
        (PLAIN, "NODE_RANK", "a"),
        (TORCHRUN, "GROUP_RANK", "x"),
        (SLURM, "SLURM_NTASKS", "4 tasks"),
        (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "four"),
        (HYDRA, "PMI_SIZE", "?"),
    ],
)
def test_a_variable_that_is_no_integer_is_refused(environ: dict[str, str], name: str, value: str) -> None:
    """The variable and what stands in it are named."""
    assert message({**environ, name: value}) == (
        f"{name} in the environment must be an integer (got {value!r}); unset it, or write {name}=1, say"
    )


def test_a_variable_out_of_range_names_its_launcher() -> None:
    """A rank beyond the world size says which launcher claims it."""
    assert message({**TORCHRUN, "RANK": "4"}) == (
        "rank must be in 0..3 for world_size 4 (got 4); count the ranks from 0 (source: torchrun)"
    )


@pytest.mark.parametrize("size", ["0", "-2"])
def test_a_local_world_size_below_one_is_refused(size: str) -> None:
    """No process on this node cannot be: this one runs there."""
    assert f"local_world_size must be in 1..4 for world_size 4 (got {size})" in message(
        {**PLAIN, "LOCAL_WORLD_SIZE": size}
    )


# SLURM


@pytest.mark.parametrize(
    ("changes", "local_world_size"),
    [
        ({"SLURM_NNODES": "4", "SLURM_NODEID": "3", "SLURM_LOCALID": "0", "SLURM_PROCID": "6"}, 2),
        ({"SLURM_NNODES": "2", "SLURM_LOCALID": "4", "SLURM_PROCID": "4", "SLURM_NODEID": "0"}, 5),
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NODEID": "0"}, 7),
    ],
)
def test_slurm_tells_the_processes_of_a_node(changes: dict[str, str], local_world_size: int) -> None:
    """The step's nodes go before the job's, then comes what was asked for; a local rank may be beyond that."""
    environ = {**without(SLURM, "SLURM_NNODES"), "SLURM_NTASKS": "7", **changes}
    assert read(environ).local_world_size == local_world_size


def test_slurm_without_nodes_takes_the_trainers_devices() -> None:
    """Where SLURM does not say how many processes a node has, the Trainer does."""
    assert read(without(SLURM, "SLURM_NNODES"), devices=2) == world(source="SLURM")


# The Trainer's devices


@pytest.mark.parametrize(("devices", "num_nodes"), [(2, 2), (4, 1)])
def test_devices_that_make_the_world_pass(devices: int, num_nodes: int) -> None:
    """Any product that equals the world size will do, if there are devices for all ranks of a node."""
    check_devices(world(), devices=devices, num_nodes=num_nodes)


@pytest.mark.parametrize(
    ("found", "devices", "num_nodes", "expected"),
    [
        (
            world(),
            4,
            2,
            "(got devices=4 * num_nodes=2 and world_size=4, from torchrun);"
            " write Trainer(devices=2, num_nodes=2), or start 4 processes on each node",
        ),
        (
            world(world_size=5),
            2,
            2,
            "(got devices=2 * num_nodes=2 and world_size=5, from torchrun); start 2 processes on each node",
        ),
    ],
)
def test_devices_that_do_not_make_the_world_are_refused(
    found: World, devices: int, num_nodes: int, expected: str
) -> None:
    """Both products, who told the world size, and what to write are named."""
    with pytest.raises(WorldError) as refused:
        check_devices(found, devices=devices, num_nodes=num_nodes)
    assert str(refused.value) == f"devices * num_nodes must equal world_size {expected}"


def test_more_ranks_on_a_node_than_devices_are_refused() -> None:
    """Also where the product fits: the process would ask for a device that is not there."""
    crowded = World(rank=3, world_size=4, local_rank=3, local_world_size=4, node_rank=0, source="torchrun")
    with pytest.raises(WorldError) as refused:
        check_devices(crowded, devices=2, num_nodes=2)
    assert str(refused.value) == (
        "local_rank must be below devices (got local_rank=3 from torchrun and devices=2); start 2 processes on each "
        "node, or give the Trainer other devices"
    )


# Run ids


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (PLAIN, None),
        ({"DDPX_RUN_ID": ""}, None),
        ({**SLURM, "DDPX_RUN_ID": "my run/7"}, "my-run-7"),
        (TORCHRUN, "torchrun-none-29500"),
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "1"}, "torchrun-none-29500-1"),
        (SLURM, "slurm-77-0-0"),
        (
            {**SLURM, "SLURM_ARRAY_TASK_ID": "5", "SLURM_STEP_ID": "2", "SLURM_RESTART_COUNT": "1"},
            "slurm-77-5-2-1",
        ),
        ({**without(SLURM, "SLURM_STEP_ID"), "SLURM_STEPID": "3"}, "slurm-77-3-0"),
        (without(SLURM, "SLURM_STEP_ID"), "slurm-77-batch-0"),
        (without(SLURM, "SLURM_JOB_ID"), None),
        ({**SLURM, "SLURM_JOB_NAME": "bash"}, None),
        (OPEN_MPI, "mpi-prterun-host-99-1"),
        ({**without(OPEN_MPI, "PMIX_NAMESPACE"), "OMPI_MCA_ess_base_jobid": "1234"}, "mpi-1234"),
        (without(OPEN_MPI, "PMIX_NAMESPACE"), None),
        ({**BATCH_SHELL, "SLURM_JOB_ID": "77", **OPEN_MPI}, "mpi-prterun-host-99-1"),
        (CRAY, "mpi-a.b-c"),
        (HYDRA, None),
        ({"PMIX_NAMESPACE": "alone"}, None),
    ],
)
def test_run_ids_name_this_start(environ: dict[str, str], expected: str | None) -> None:
    """Job, step and restart make a name; what cannot stand in a file name becomes a dash."""
    assert run_id_from_launcher(environ) == expected


def test_torchrun_agents_that_count_their_own_restarts_agree_on_the_run() -> None:
    """On several nodes the restart count, which each agent keeps for itself, is no part of the name."""
    first, second = ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": count} for count in ("0", "1"))
    assert run_id_from_launcher(first) == run_id_from_launcher(second)


@given(st.text())
def test_sanitised_names_stand_in_file_names(name: str) -> None:
    """Nothing but letters, digits, dot, underscore and dash is left, and doing it twice changes nothing."""
    clean = sanitise(name)
    assert len(clean) == len(name)
    assert all(sign.isascii() and (sign.isalnum() or sign in "._-") for sign in clean)
    assert sanitise(clean) == clean


def test_reading_the_world_needs_neither_torch_nor_lightning() -> None:
    """The world can be read before anything heavy is imported, and where it cannot be."""
    code = (
        "import sys, types; package = types.ModuleType('lightning_ddp_ext'); package.__path__ = [sys.argv[1]];"
        "sys.modules['lightning_ddp_ext'] = package;"
        "sys.modules.update(dict.fromkeys(('torch', 'lightning', 'pytorch_lightning')));"
        "from lightning_ddp_ext.world import read_world; print(read_world({}, rank=1, world_size=2).describe())"
    )
    command = [sys.executable, "-c", code, str(Path(lightning_ddp_ext.world.__file__).parent)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == "rank 1 of 2 (local rank 1, node 0; from arguments)\n"


def test_slurm_with_a_local_rank_beyond_the_tasks_of_a_node() -> None:
    """As Lightning's own tests have it, and as it accepts it."""
    job = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "1"}
    world = read_world({**job, "SLURM_NODEID": "0", "SLURM_JOB_NAME": "train"}, devices=1)
    assert world is not None
    assert (world.rank, world.world_size, world.local_rank, world.node_rank) == (1, 2, 1, 0)
