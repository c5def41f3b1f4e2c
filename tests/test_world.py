"""The place of a process among all ranks is read from its launcher's variables."""

from typing import Any

import pytest

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.world import World, check_devices, read_world

# Each launcher describes ``world()``: rank 3 of 4, the second on the second of two nodes.
PLAIN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
TORCHRUN = {
    **PLAIN,
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "77",
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
}
# MPICH and Intel MPI.
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# A batch script, which runs outside of the tasks that SLURM starts.
BATCH_SHELL = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def world(**changes: Any) -> World:
    """Return the place that each launcher above describes, with changes."""
    fields = {
        "rank": 3,
        "world_size": 4,
        "local_rank": 1,
        "local_world_size": 2,
        "node_rank": 1,
        "source": "torchrun",
    }
    return World(**{**fields, **changes})


def read(environ: dict[str, str], **arguments: Any) -> World:
    """Return the world, or fail if no launcher is found."""
    found = read_world(environ, **arguments)
    assert found is not None
    return found


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {other: value for other, value in environ.items() if other != name}


@pytest.mark.parametrize(
    ("environ", "source"),
    [
        pytest.param(TORCHRUN, "torchrun", id="torchrun"),
        pytest.param(SLURM, "SLURM", id="SLURM"),
        pytest.param(OPEN_MPI, "Open MPI", id="Open MPI"),
        pytest.param(HYDRA, "PMI", id="Hydra"),
        pytest.param(
            PLAIN | {"LOCAL_WORLD_SIZE": "2"}, "RANK, WORLD_SIZE and LOCAL_RANK", id="by hand"
        ),
        pytest.param(
            TORCHRUN | SLURM | OPEN_MPI | HYDRA, "torchrun", id="torchrun in all the others"
        ),
        pytest.param(SLURM | PLAIN, "SLURM", id="SLURM that also sets RANK"),
        pytest.param(BATCH_SHELL | OPEN_MPI, "Open MPI", id="Open MPI in a batch script"),
        pytest.param(BATCH_SHELL | HYDRA, "PMI", id="Hydra in a batch script"),
        pytest.param(
            SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "SLURM", id="SLURM that speaks PMI"
        ),
    ],
)
def test_the_innermost_launcher_takes_precedence(environ: dict[str, str], source: str) -> None:
    """The result names this launcher, and has the place that its variables describe."""
    assert read(environ) == world(source=source)


@pytest.mark.parametrize(
    ("further", "devices", "local_world_size", "node_rank"),
    [
        pytest.param({}, None, 4, 0, id="all on one node"),
        pytest.param({}, 2, 2, 1, id="by devices"),
        pytest.param({}, 8, 4, 0, id="more devices than ranks"),
        # check_devices raises later.
        pytest.param({}, 1, 2, 1, id="fewer devices than the local rank needs"),
        pytest.param({"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "2"}, 4, 2, 2, id="by variables"),
        pytest.param({"NODE_RANK": "1"}, None, 2, 1, id="by the node's number"),
    ],
)
def test_variables_by_hand_are_completed(
    further: dict[str, str], devices: int | None, local_world_size: int, node_rank: int
) -> None:
    """The processes on a node and the node's number follow from the Trainer's devices,
    unless variables give them.

    Without devices, the number of processes follows from the node's number.
    """
    by_hand = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **further}
    assert read(by_hand, devices=devices) == world(
        local_world_size=local_world_size,
        node_rank=node_rank,
        source="RANK, WORLD_SIZE and LOCAL_RANK",
    )


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param({}, id="none"),
        pytest.param({"RANK": "zero", "WORLD_SIZE": "2"}, id="a rank that is not a number"),
        pytest.param(
            {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}, id="Lightning's own"
        ),
        pytest.param({"PMI_RANK": "1"}, id="PMI without a size"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, id="one process of PMI"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, id="SLURM without tasks"),
        pytest.param(SLURM | {"SLURM_JOB_NAME": "bash"}, id="an interactive shell of SLURM"),
        pytest.param(SLURM | {"SLURM_JOB_NAME": "interactive"}, id="an interactive job of SLURM"),
        pytest.param(
            {
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "1",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
            },
            id="one process of Open MPI",
        ),
    ],
)
def test_leftover_variables_do_not_name_a_launcher(environ: dict[str, str]) -> None:
    """Incomplete variables, interactive jobs and single MPI processes are left to
    Lightning.
    """
    assert read_world(environ) is None


# A job whose number of nodes each case gives in its own way, or not at all.
JOB_OF_7 = without(SLURM, "SLURM_NNODES") | {"SLURM_NTASKS": "7"}


@pytest.mark.parametrize(
    ("variables", "local_world_size"),
    [
        pytest.param({"SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4"}, 4, id="of the step"),
        pytest.param(
            {"SLURM_NNODES": "4", "SLURM_NODEID": "3", "SLURM_LOCALID": "0", "SLURM_PROCID": "6"},
            2,
            id="of the job",
        ),
        pytest.param(  # Lightning accepts a local rank beyond it
            {"SLURM_NNODES": "7", "SLURM_NODEID": "2"},
            2,
            id="of the job, but fewer than the local rank needs",
        ),
        pytest.param({"SLURM_NODEID": "0"}, 7, id="all tasks"),
    ],
)
def test_slurm_has_the_number_of_processes_on_a_node(
    variables: dict[str, str], local_world_size: int
) -> None:
    """It follows from the nodes of the step or, without those, of the job.

    If neither is known, all tasks are on one node.
    """
    assert read(JOB_OF_7 | variables).local_world_size == local_world_size


def test_the_trainers_devices_complete_a_slurm_job() -> None:
    """Without a number of nodes, each node has as many processes as the Trainer has
    devices.
    """
    assert read(without(SLURM, "SLURM_NNODES"), devices=2) == world(source="SLURM")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param(
            without(TORCHRUN, "RANK"),
            "RANK in the environment must be an integer (got None); for example, set RANK=1, or"
            " unset the launcher's variables",
            id="a missing variable",
        ),
        pytest.param(
            PLAIN | {"NODE_RANK": "a"},
            "NODE_RANK in the environment must be an integer (got 'a'); for example, set"
            " NODE_RANK=1, or unset the launcher's variables",
            id="a variable that is not a number",
        ),
        pytest.param(
            PLAIN | {"WORLD_SIZE": "0"},
            "world_size must be an integer of at least 1 (got 0); count all processes of the run"
            " (from RANK, WORLD_SIZE and LOCAL_RANK: world_size 0, local_world_size 0)",
            id="no ranks",
        ),
        pytest.param(
            TORCHRUN | {"LOCAL_RANK": "2"},
            "local_rank must be an integer from 0 to 1 (got 2); count the processes of this node"
            " from 0 (from torchrun: world_size 4, local_world_size 2)",
            id="a local rank beyond the node",
        ),
    ],
)
def test_contradictory_variables_are_refused(environ: dict[str, str], expected: str) -> None:
    """The error names the field, the rule, the value and the remedy."""
    with pytest.raises(ConfigurationError) as refused:
        read_world(environ)
    assert str(refused.value) == expected


def test_ranks_that_contradict_the_trainers_devices_are_refused() -> None:
    """The error has both numbers, their sources and the remedies."""
    four_on_a_node = world(local_rank=3, local_world_size=4, node_rank=0)
    with pytest.raises(ConfigurationError) as refused:
        check_devices(four_on_a_node, devices=2, num_nodes=2)
    assert str(refused.value) == (
        "local_rank must be below devices (got local_rank=3 from torchrun and devices=2); start 2"
        " processes on each node, or change the Trainer's devices"
    )
