"""The world is read from the launcher's variables, and contradictions are named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.world import World, check_devices, read_world

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
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
BATCH_SHELL = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


def world(**changes: Any) -> World:
    """Rank 3 of 4, the second on the second of two nodes."""
    facts = {
        "rank": 3,
        "world_size": 4,
        "local_rank": 1,
        "local_world_size": 2,
        "node_rank": 1,
        "source": "torchrun",
    }
    return World(**{**facts, **changes})


def read(environ: dict[str, str], **arguments: Any) -> World:
    """Return a world, which must exist."""
    found = read_world(environ, **arguments)
    assert found is not None
    return found


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {other: value for other, value in environ.items() if other != name}


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_rank_is_node_times_processes_plus_local_rank(
    nodes: int, per_node: int, data: st.DataObject
) -> None:
    """For every source of a world, node rank and local rank give the rank."""
    size = nodes * per_node
    rank = data.draw(st.integers(0, size - 1))
    plain = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % per_node)}
    found = [
        read({}, rank=rank, world_size=size, devices=per_node),
        read(plain, devices=per_node),
        read({**plain, "LOCAL_WORLD_SIZE": str(per_node)}),
        *(
            [read({"PMI_RANK": str(rank), "PMI_SIZE": str(size)}, devices=per_node)]
            if size > 1
            else []
        ),
    ]
    for each in found:
        assert each.rank == each.node_rank * each.local_world_size + each.local_rank
        assert each.num_nodes == nodes


@pytest.mark.parametrize(
    ("layers", "source"),
    [
        ([TORCHRUN], "torchrun"),
        ([SLURM], "SLURM"),
        ([OPEN_MPI], "Open MPI"),
        ([HYDRA], "PMI"),
        ([PLAIN, {"LOCAL_WORLD_SIZE": "2"}], "RANK, WORLD_SIZE and LOCAL_RANK"),
        ([TORCHRUN, SLURM, OPEN_MPI, HYDRA], "torchrun"),
        ([SLURM, PLAIN], "SLURM"),
        ([BATCH_SHELL, OPEN_MPI], "Open MPI"),
        ([BATCH_SHELL, HYDRA], "PMI"),
        ([SLURM, {"PMI_RANK": "3", "PMI_SIZE": "4"}], "SLURM"),
    ],
)
def test_the_innermost_launcher_takes_precedence(layers: list[dict[str, str]], source: str) -> None:
    """All launchers describe the same world; an outer one's variables do not override
    those of the inner one.
    """
    assert read(dict(itertools.chain.from_iterable(layer.items() for layer in layers))) == world(
        source=source
    )


@pytest.mark.parametrize(
    ("further", "devices", "local_world_size", "node_rank"),
    [
        ({}, None, 4, 0),
        ({}, 2, 2, 1),
        ({}, 8, 4, 0),
        ({}, 1, 2, 1),  # the local rank shows that there are two; check_devices raises
        ({"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "2"}, 4, 2, 2),
    ],
)
def test_variables_by_hand_are_completed(
    further: dict[str, str], devices: int | None, local_world_size: int, node_rank: int
) -> None:
    """The processes on a node and the node's number follow from the Trainer's devices,
    unless variables give them.
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
        {},
        {"RANK": "zero", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"},
        {"PMI_RANK": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
        {**SLURM, "SLURM_JOB_NAME": "bash"},
        {**SLURM, "SLURM_JOB_NAME": "interactive"},
        {
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        },
    ],
)
def test_leftover_variables_do_not_name_a_launcher(environ: dict[str, str]) -> None:
    """Incomplete variables, interactive jobs and single MPI processes are left to
    Lightning.
    """
    assert read_world(environ) is None


@pytest.mark.parametrize(
    ("changes", "local_world_size"),
    [
        ({"SLURM_NNODES": "4", "SLURM_NODEID": "3", "SLURM_LOCALID": "0", "SLURM_PROCID": "6"}, 2),
        ({"SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        (
            {"SLURM_NTASKS_PER_NODE": "1", "SLURM_NODEID": "0"},
            2,
        ),  # Lightning accepts a local rank beyond it
        ({"SLURM_NODEID": "0"}, 7),
    ],
)
def test_slurm_has_the_number_of_processes_on_a_node(
    changes: dict[str, str], local_world_size: int
) -> None:
    """It is taken from the step, else the job, else the request, else all tasks, or the
    Trainer's devices.
    """
    job = without(SLURM, "SLURM_NNODES")
    assert read({**job, "SLURM_NTASKS": "7", **changes}).local_world_size == local_world_size
    assert read(job, devices=2) == world(source="SLURM")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: world(local_rank=2),
            (
                "local_rank must be in 0..1 for world_size 4 and local_world_size 2 (got 2); count"
                " the processes of this node from 0 (source: torchrun)"
            ),
        ),
        (
            lambda: read(without(TORCHRUN, "RANK")),
            (
                "RANK in the environment must be an integer (got None); for example, set RANK=1, or"
                " unset the launcher's variables"
            ),
        ),
        (
            lambda: read({**PLAIN, "NODE_RANK": "a"}),
            (
                "NODE_RANK in the environment must be an integer (got 'a'); for example, set"
                " NODE_RANK=1, or unset the launcher's variables"
            ),
        ),
        (
            lambda: read_world({**PLAIN, "WORLD_SIZE": "0"}),
            (
                "world_size must be at least 1 (got 0); count all processes of the run (source:"
                " RANK, WORLD_SIZE and LOCAL_RANK)"
            ),
        ),
        (
            lambda: check_devices(
                world(local_rank=3, local_world_size=4, node_rank=0), devices=2, num_nodes=2
            ),
            (
                "local_rank must be below devices (got local_rank=3 from torchrun and devices=2);"
                " start 2 processes on each node, or change the Trainer's devices"
            ),
        ),
    ],
)
def test_a_world_that_cannot_be_is_refused(make: Callable[[], object], expected: str) -> None:
    """Field, rule, value, source and remedy, for variables and the Trainer."""
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert str(refused.value) == expected
