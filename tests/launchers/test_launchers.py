"""Training with each launcher and init method, on one node and on two, equals stock.

This module is also the script that trains: ``main`` and the functions below it run in the
ranks. The tests start the script, or the launcher that starts it, in processes of the
harness, which have imported torch and Lightning already.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import psutil
import pytest
import torch.distributed as dist
import torch.distributed.run

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.rendezvous.process_context import leave
from tests.harness.environment import Network, by_mpirun, by_srun
from tests.harness.ranks import (
    Environment,
    by_hand_env,
    free_port,
    launch_ranks,
    output_of_all,
)
from tests.harness.scripts import be_the_script, print_line
from tests.harness.training import (
    At,
    Kind,
    Net,
    die,
    fingerprint,
    make_strategy,
    make_trainer,
    on_ranks,
)

METHODS = ("env", "tcp", "file")


# The script. Its only argument has the options of ``main`` as JSON. It prints reports as
# lines of JSON: with the "place" on each rank at the end of training, and with the "results"
# in each process after the calls of the Trainer.


def main(
    urls: Sequence[str | None],
    calls: Sequence[str] = ("fit",),
    death: dict[str, int] | None = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train once for each URL; the ranks disconnect before each training.

    Args:
        urls: the init methods; ``None`` for no choice.
        calls: the methods of each Trainer that are called; the first one is ``fit``.
        death: the "rank" that is killed in the second step, the number of torchrun's
            "restart", and the index of the "run" among the trainings; by default none.
        strategy: further options of the strategy.
        options: the Trainer's options.
    """
    for run, url in enumerate(urls):
        leave()
        chosen = {**(strategy or {}), **({} if url is None else {"init_method": url})}
        ours = DDPExtStrategy(**chosen) if chosen else "ddp_ext"
        callbacks = [
            At("on_train_batch_start", partial(die_as_chosen, death, run), earlier=1),
            At("on_train_end", partial(report_rank, run)),
        ]
        weights, results = call_trainer(ours, calls, callbacks=callbacks, **options)
        print_line(json.dumps({"run": run, "weights": weights, "results": results}))


def call_trainer(strategy: Any, calls: Sequence[str], **options: Any) -> tuple[str, list[Any]]:
    """Call a Trainer's methods, of which the first is ``fit``.

    Return the fingerprint of the weights, and the results of the methods after ``fit``.
    """
    L.seed_everything(5)
    model = Net()
    trainer = make_trainer(strategy, **options)
    _, *results = [getattr(trainer, name)(model) for name in calls]
    return fingerprint(model), results


def die_as_chosen(death: dict[str, int] | None, run: int, trainer: L.Trainer) -> None:
    """Kill this process if ``death`` names its rank, restart and run."""
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if death == {"rank": trainer.global_rank, "restart": restart, "run": run}:
        die()


def report_rank(run: int, trainer: L.Trainer) -> None:
    """Report this rank's place and weights."""
    place = trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.node_rank
    weights = fingerprint(trainer.lightning_module)
    print_line(json.dumps({"run": run, "place": place, "weights": weights}))


# The tests' side.


class Runs:
    """The training runs of one script: one for each init method.

    Args:
        directory: an empty directory for the init method ``file``.
        methods: the names of the init methods: ``env``, ``tcp``, ``file``, ``none`` (no
            choice, which means ``env``), or another one in ``urls``.
        nodes: the number of nodes, which have two ranks each.
        urls: URLs that replace the usual ones of the methods.
    """

    def __init__(self, directory: Path, *methods: str, nodes: int = 1, **urls: str) -> None:
        self._directory = directory
        self._nodes = nodes
        self._ranks = 2 * nodes
        url_of = {
            "none": "env://",
            "env": "env://",
            "tcp": f"tcp://127.0.0.1:{free_port()}",
            "file": f"file://{directory}/store",
            **urls,
        }
        self._urls = {method: url_of[method] for method in methods}

    def argument(self, **options: Any) -> str:
        """Return the script's argument, with further options of ``main``."""
        urls = [None if method == "none" else url for method, url in self._urls.items()]
        return json.dumps({"urls": urls, "devices": 2, "num_nodes": self._nodes, **options})

    def expect_trained(
        self,
        output: str,
        *,
        returns: int | None = None,
        connections: Mapping[str, int] = MappingProxyType({}),
        results: Sequence[Any] = (),
    ) -> None:
        """Fail unless every rank took part in each run and learned the same as with stock.

        Args:
            output: the output of all processes.
            returns: how often a process returned from the calls of a run; by default each
                rank once in each run.
            connections: how often the ranks connected, by init method; by default once.
            results: what the Trainer's calls after ``fit`` returned in each process.
        """
        reports = [json.loads(line) for line in re.findall(r"^{.*}$", output, re.MULTILINE)]
        weights, _ = results_of_stock(self._ranks)
        assert {report["weights"] for report in reports} == {weights}, output

        # Each rank trained at its place.
        places = {(report["run"], *report["place"]) for report in reports if "place" in report}
        assert places == {
            (run, rank, self._ranks, rank % 2, rank // 2)
            for run in range(len(self._urls))
            for rank in range(self._ranks)
        }, output

        # The calls returned what they return with stock.
        returned = [report["results"] for report in reports if "results" in report]
        returns = self._ranks * len(self._urls) if returns is None else returns
        assert returned == [list(results)] * returns, output

        # The ranks connected by each init method, and left nothing there.
        connected = re.findall(
            rf"process group: gloo, {self._ranks} ranks, (\S+)$", output, re.MULTILINE
        )
        expected_urls = [
            url for method, url in self._urls.items() for _ in range(connections.get(method, 1))
        ]
        assert sorted(connected) == sorted(expected_urls), output
        assert not list(self._directory.iterdir()), "the last rank to leave removes the file"


@cache
def results_of_stock(world_size: int) -> tuple[str, list[Any]]:
    """Return the fingerprint of the weights and the test results with stock ``ddp``."""
    with tempfile.TemporaryDirectory() as directory:
        by_rank = on_ranks("stock", call_stock_trainer, Path(directory), world_size=world_size)
        return by_rank[0]


def call_stock_trainer(kind: Kind, directory: Path) -> tuple[str, list[Any]]:
    return call_trainer(
        make_strategy(kind, directory), ("fit", "test"), devices=dist.get_world_size()
    )


def output_of_script(argument: str, env: Environment, processes: int = 2, **options: Any) -> str:
    """Run the script in several processes of the harness, which must succeed; return their
    output.
    """
    return output_of_all(launch_ranks(run_main, processes, argument, env=env, **options))


def run_main(rank: int, world_size: int, argument: str) -> None:
    """Run ``main`` in a process of the harness, as if the script had started it."""
    sys.argv = [__file__, argument]  # a rank that starts others starts them with it
    main(**json.loads(argument))


@pytest.mark.lowest
def test_processes_with_three_variables_train_as_ranks(tmp_path: Path) -> None:
    """With RANK, WORLD_SIZE and LOCAL_RANK, any process is a rank."""
    runs = Runs(tmp_path, "none", *METHODS)
    # A month is longer than the kernel's timers can count.
    limits = dict.fromkeys(
        ("init_timeout", "heartbeat_timeout", "timeout", "save_deadline"), 30 * 86400
    )
    runs.expect_trained(
        output_of_script(runs.argument(strategy=limits), by_hand_env(2, free_port()))
    )


def test_tasks_of_srun_train_as_ranks(tmp_path: Path) -> None:
    """A task of srun is a rank; the job gives the address."""
    runs = Runs(tmp_path, "none", "tcp")
    runs.expect_trained(output_of_script(runs.argument(), by_srun()))


def test_processes_of_mpirun_train_as_ranks(tmp_path: Path) -> None:
    """A process of Open MPI's mpirun is a rank, also where mpi4py is not installed;
    rank 0 may have an IPv6 address.
    """
    of_this_host = [each.address for each in psutil.net_if_addrs()["lo"]]
    host = "::1" if "::1" in of_this_host else "127.0.0.1"
    address = f"[{host}]" if ":" in host else host
    runs = Runs(tmp_path, "tcp", "file", tcp=f"tcp://{address}:{free_port(host)}")
    runs.expect_trained(output_of_script(runs.argument(), by_mpirun()))


@pytest.mark.parametrize(
    ("start_method", "methods", "calls"),
    [
        pytest.param("spawn", ("tcp",), ["fit"], marks=pytest.mark.nightly),
        pytest.param("forkserver", METHODS, ["fit"], marks=pytest.mark.nightly),
        ("fork", METHODS, ["fit", "test"]),
    ],
)
def test_each_start_method_returns_weights_and_results(
    start_method: str, methods: tuple[str, ...], calls: list[str], tmp_path: Path
) -> None:
    """The launching process gets the ranks' weights and results; a second call
    continues with these weights.

    The ranks use the init method, also if no script started the process.
    """
    runs = Runs(tmp_path, *methods)
    argument = runs.argument(strategy={"start_method": start_method}, calls=calls)
    _, test_results = results_of_stock(2)
    runs.expect_trained(
        output_of_script(argument, {}, processes=1),
        returns=len(methods),  # only the launching process returns
        connections=dict.fromkeys(methods, len(calls)),
        results=test_results if "test" in calls else [],
    )


def test_ranks_that_torchrun_restarts_connect_again(tmp_path: Path) -> None:
    """The ranks connect by the init method, and again when torchrun restarts them.

    The restart follows the death of rank 0, which the other rank reports.
    """
    runs = Runs(tmp_path, "env", "tcp", "file")
    death = {"rank": 0, "restart": 0, "run": 1}
    torchrun = Path(torch.distributed.run.__file__)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = [*options, __file__, runs.argument(death=death)]
    env: Environment = {"GLOO_SOCKET_IFNAME": None}
    output = output_of_all(
        launch_ranks(be_the_script, 1, torchrun, words, tmp_path.parent, env=env)
    )
    # Both ranks return from the first run, and after the restart from all three.
    runs.expect_trained(output, returns=2 * (1 + 3), connections={"env": 2, "tcp": 2, "file": 1})
    died = r"rank 0 \(host .+, pid \d+\) died: its process ended unexpectedly; every rank stops\."
    told = re.findall(rf"^\[rank (\d)\] RankDiedError: {died}", output, re.MULTILINE)
    assert told == ["1"], output


PORT = 29500  # free on every host, as each has its own network


@pytest.fixture
def nodes(two_hosts: Network) -> Network:
    """Return two hosts without ``::1`` whose own name resolves to 127.0.1.1, as on Debian.

    By default, gloo would use that address, which the other host cannot reach.
    """
    for host in two_hosts:
        host.name_as_loopback()
        if host.address6:
            host.ip("addr del ::1/128 dev lo")
    return two_hosts


@pytest.mark.netns
def test_processes_on_two_nodes_train_as_ranks(nodes: Network, shared_dir: Path) -> None:
    """Each rank is a process that a user starts on its node; the network may use IPv6."""
    urls = {
        "tcp": f"tcp://{nodes[0].address}:{PORT + 1}",
        "ipv6": f"tcp://[{nodes[0].address6}]:{PORT + 2}",
    }
    runs = Runs(shared_dir, *METHODS, "ipv6", nodes=2, **urls)
    env: Environment = {
        "RANK": str,
        "WORLD_SIZE": "4",
        "LOCAL_RANK": lambda rank: str(rank % 2),
        # Some operators give rank 0 a loopback address, and the other ranks its host's name.
        "MASTER_ADDR": lambda rank: "host-a" if rank else "localhost",
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": None,
    }
    places = [nodes[rank // 2] for rank in range(4)]
    runs.expect_trained(output_of_script(runs.argument(), env, 4, namespaces=places))


@pytest.mark.nightly
@pytest.mark.netns
def test_a_script_on_each_node_starts_its_ranks(nodes: Network, shared_dir: Path) -> None:
    """A script started by hand with NODE_RANK starts the other ranks of its node."""
    runs = Runs(shared_dir, "tcp", nodes=2, tcp=f"tcp://{nodes[0].address}:{PORT}")
    env: Environment = {"NODE_RANK": str, "GLOO_SOCKET_IFNAME": None}
    runs.expect_trained(output_of_script(runs.argument(), env, namespaces=list(nodes)))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
