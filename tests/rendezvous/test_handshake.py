"""The handshake between rank 0 and the others accepts all ranks, or all of them raise
the same error.
"""

import contextlib
import re
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rendezvous.channel import encode
from lightning_ddp_ext.rendezvous.endpoint import Address, FileEndpoint
from lightning_ddp_ext.rendezvous.init_method import File, Tcp
from lightning_ddp_ext.rendezvous.request import RankInfo, Timeouts
from tests.harness.ranks import HOST, RankProcesses, free_port, message_of, rank_name
from tests.rendezvous.connecting import (
    LONG,
    Answer,
    common_message,
    connect,
    outcomes_at,
    place,
    server,
    silent,
    web,
)

CLAIMED = (
    r"two processes claim rank {}: pid \d+ on host .+ and pid \d+ on .+; set a different RANK .*"
    r" for each process"
)
DIFFERENT = r"{} must be the same on all ranks: .+; start every rank with the same settings"
SOON = Timeouts(after_refusal=1.0, answer=3.0, connect=2.0)


@pytest.mark.parametrize(
    ("kind", "third", "expected"),
    [
        pytest.param("tcp", {"rank": 1}, CLAIMED.format(1), id="two ranks 1"),
        pytest.param("tcp", {"rank": 0}, CLAIMED.format(0), id="two ranks 0 at a port"),
        pytest.param("file", {"world_size": 4}, DIFFERENT.format("world_size"), id="world size"),
    ],
)
def test_ranks_or_settings_that_conflict_are_named(
    kind: str, third: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """The error of every rank names both processes or the setting, and the remedy."""
    settings = [{"timeouts": SOON, **fields} for fields in ({}, {}, third)]
    outcomes = outcomes_at(place(kind, tmp_path), settings, init_timeout=LONG)
    assert re.fullmatch(expected, common_message(outcomes, RendezvousError))


def test_a_second_rank_zero_does_not_replace_the_first_ones_file(tmp_path: Path) -> None:
    """It looks once before it writes its address, and the error of every rank names both."""
    settings = [
        {"timeouts": SOON, "init_timeout": LONG, **fields} for fields in ({}, {}, {"rank": 0})
    ]
    with RankProcesses(connect, 3, place("file", tmp_path), settings) as ranks:
        ranks.release(0, 1)
        ranks.wait_for("connected", 1)
        ranks.release(2)
        outcomes = ranks.wait()
    assert re.fullmatch(CLAIMED.format(0), common_message(outcomes, RendezvousError))


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_a_late_rank_does_not_find_a_run_that_has_started(kind: str, tmp_path: Path) -> None:
    """Rank 0's address is open only until all ranks have connected.

    ``srun bash -c "python fit.py; python test.py"`` starts the second script on a rank
    while the first one may still be running on rank 0.
    """
    running = [{"world_size": 2, "init_timeout": LONG, "hold_before": "all_reduce"}] * 2
    late = {"rank": 1, "world_size": 2, "init_timeout": 2.0}
    with RankProcesses(connect, 3, place(kind, tmp_path), [*running, late]) as ranks:
        ranks.release(0, 1)
        ranks.wait_for_all("in front", 0, 1)
        ranks.release(2)
        (refused,) = ranks.wait(2)
        # Each rank of the run has two collectives: that which checks the new group, and
        # that which counts the ranks.
        ranks.release(0, 1, 0, 1)
        finished = ranks.wait(0, 1)
    assert "did not find rank 0 at" in message_of(refused, RendezvousError)
    assert [outcome.exit_code for outcome in finished] == [0, 0]


def test_two_named_runs_at_one_address_do_not_mix(tmp_path: Path) -> None:
    """The run whose rank 0 listens first starts, and refuses the ranks of the other one.

    Two steps of a SLURM job get the same port.
    """
    where = place("tcp", tmp_path)
    common = {"world_size": 2, "init_timeout": LONG}
    settings = [
        {"rank": rank, "run": run, **common} for run in ("STEP=0", "STEP=1") for rank in (0, 1)
    ]
    with RankProcesses(connect, 4, where, settings) as ranks:
        ranks.release(0)
        for seat in (3, 2):
            ranks.release(seat)
            (refused,) = ranks.wait(seat)
            assert message_of(refused, RendezvousError) == (
                f"rank 0 at {where} belongs to another run (STEP=0) than"
                f" {rank_name(seat - 2, refused.pid)} (STEP=1); give each run its own"
                " MASTER_PORT or init_method"
            )
        ranks.release(1)
        assert [outcome.result for outcome in ranks.wait(0, 1)] == [2.0, 2.0]


def test_rank_zero_raises_if_it_cannot_write_the_file(tmp_path: Path) -> None:
    """The error names the process, the reason and a remedy."""
    path = tmp_path / "removed" / "run"
    (outcome,) = outcomes_at(File(str(path)), [{"world_size": 2, "timeouts": SOON}])
    assert message_of(outcome, RendezvousError) == (
        f"init_method 'file://{path}': rank 0 on {HOST} (pid {outcome.pid}) cannot"
        " write its address there: No such file or directory; create the directory, free disk"
        " space, or choose another file"
    )


def test_rank_zero_at_a_loopback_address_listens_on_this_host_only() -> None:
    """Other hosts reach neither rank 0 nor its store."""
    where = Tcp("127.0.0.1", free_port())
    with RankProcesses(connect, 2, where, [{"init_timeout": LONG}] * 2) as ranks:
        ranks.release(0)
        ranks.wait_for("listens", 0)
        connections = psutil.Process(ranks.pids[0]).net_connections()
        listening = [entry for entry in connections if entry.status == psutil.CONN_LISTEN]
        assert {entry.laddr.ip for entry in listening} == {"127.0.0.1"}


RANK_BEYOND_ITS_WORLD = asdict(RankInfo(7, world_size=4))
RANK_OF_ANOTHER_RUN = asdict(RankInfo(1, world_size=2))
SENT_BY_STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0" * 9000,
    b'["a", 1]\n',
    b"\xff\xfe\n",
    b"[" * 9999 + b"\n",
    encode("x", {}),
    encode("hello", {"nonce": ""}),
    encode("hello", {"nonce": "", **RANK_BEYOND_ITS_WORLD}),
    encode("hello", {"nonce": "of a killed run", **RANK_OF_ANOTHER_RUN}),
    *[b""] * 300,
]


def test_other_connections_do_not_disturb_a_start() -> None:
    """Two ranks connect despite port scanners, malformed hellos and many silent
    connections.
    """
    where = Tcp("127.0.0.1", free_port())
    with (
        contextlib.ExitStack() as strangers,
        RankProcesses(connect, 2, where, [{"init_timeout": LONG}] * 2) as ranks,
    ):
        ranks.release(0)
        ranks.wait_for("listens", 0)
        for data in SENT_BY_STRANGERS:
            stranger = socket.create_connection((where.host, where.port))
            strangers.enter_context(stranger).sendall(data)
        ranks.release(1)
        assert [outcome.result for outcome in ranks.wait()] == [2.0, 2.0]


@pytest.mark.parametrize("answer", [silent, web])
def test_a_killed_runs_address_does_not_disturb_the_next_run(
    answer: Answer, tmp_path: Path
) -> None:
    """The next run starts even if another program listens at the address in the file,
    which only this user can read; it removes the file at its end.
    """
    path = tmp_path / "run"
    path.touch()  # as ``tempfile.mkstemp`` makes it
    with server(answer) as where:
        FileEndpoint(str(path)).publish(
            Address((where.host,), where.port, "of a killed run", "network")
        )
        assert path.stat().st_mode & 0o777 == 0o600
        outcomes = outcomes_at(File(str(path)), [{"timeouts": SOON}] * 2, init_timeout=LONG)
    assert [outcome.result for outcome in outcomes] == [2.0, 2.0]
    assert list(tmp_path.iterdir()) == []
