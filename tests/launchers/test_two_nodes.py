"""Two nodes with two ranks each: hosts of their own network, which gloo must find among their interfaces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness.network import Network
from tests.harness.ranks import Environment
from tests.harness.scripts import start_script
from tests.launchers.runs import SCRIPT, Reference, Run, argv_of, output_of, run_by_hand, runs_by

pytestmark = pytest.mark.netns

PORT = 29500  # free on every host, as each has a network of its own


@pytest.fixture
def nodes(two_hosts: Network) -> Network:
    """Two hosts that take their own name for 127.0.1.1, as Debian and Ubuntu install them: gloo would stay there."""
    for host in two_hosts:
        hosts_file = Path("/etc/netns", host.namespace, "hosts")  # see ip-netns(8)
        text = hosts_file.read_text()
        hosts_file.write_text(text.replace(f"{host.address} {host.name}", f"127.0.1.1 {host.name}"))
    return two_hosts


def run_on(hosts: Network, directory: Path, method: str, on_each: int = 2) -> Run:
    """A run whose ranks meet on the first host, or in a file that both see."""
    urls = {"tcp": f"tcp://{hosts[0].address}:{PORT}", "ipv6": f"tcp://[{hosts[0].address6}]:{PORT}"}
    (run,) = runs_by([method], directory, url=urls.get(method), world_size=2 * on_each, local_world_size=on_each)
    return run


def run_ranks_by_hand(hosts: Network, run: Run, exported: Environment) -> str:
    """Run the script once for each rank, two on each host, to a good end; what they print."""
    env: Environment = {"RANK": str, "WORLD_SIZE": "4", "LOCAL_RANK": lambda rank: str(rank % 2), **exported}
    places = [hosts[rank // 2] for rank in range(4)]
    return run_by_hand([*run.argv, "--num-nodes", "2"], bare(env), 4, namespaces=places)


def run_scripts(
    hosts: Network, runs: Sequence[Run], launcher: Callable[[int], Sequence[str]], env: Callable[[int], Environment]
) -> str:
    """Run the script on each host to a good end; what they print."""
    arguments = (*argv_of(runs), "--num-nodes", "2")
    with ExitStack() as stack:
        scripts = [
            stack.enter_context(
                start_script(
                    SCRIPT,
                    *arguments,
                    launcher=(*host.prefix, *launcher(node)),
                    env=bare(env(node)),
                    time_limit=90.0,
                )
            )
            for node, host in enumerate(hosts)
        ]
        return "".join(output_of(script.wait()) for script in scripts)


def bare(env: Environment) -> Environment:
    """Nobody helps gloo to find the network."""
    return {**env, "GLOO_SOCKET_IFNAME": None}


ELASTIC = ("--rdzv-backend=c10d", f"--rdzv-endpoint=host-a:{PORT + 1}", "--rdzv-id=run42")

# What a user exports beside the rank.
EXPORTED: dict[str, Environment] = {
    "env": {"MASTER_ADDR": "host-a", "MASTER_PORT": str(PORT)},
    "directory": {"DDPX_RUN_ID": "run 42"},
}


def test_torchrun_on_two_nodes(nodes: Network, shared_dir: Path, reference: Reference) -> None:
    """An agent on each node starts its rank, and both of them learn together."""
    runs = [run_on(nodes, shared_dir, method, 1) for method in ("tcp", "directory")]

    def launcher(node: int) -> Sequence[str]:
        return "torchrun", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", *ELASTIC

    output = run_scripts(nodes, runs, launcher, lambda node: {})
    for run in runs:
        run.expect_trained(reference(2), output, returns=4)


@pytest.mark.parametrize("method", ["env", "tcp", "file", "directory"])
def test_by_hand_on_two_nodes(method: str, nodes: Network, shared_dir: Path, reference: Reference) -> None:
    """One process per rank, started by hand on the node where it shall run."""
    run = run_on(nodes, shared_dir, method)
    run.expect_trained(reference(4), run_ranks_by_hand(nodes, run, EXPORTED.get(method, {})))


def test_by_hand_on_two_nodes_over_ipv6(ipv6: None, nodes: Network, shared_dir: Path, reference: Reference) -> None:
    """The network between the nodes may be one of IPv6."""
    run = run_on(nodes, shared_dir, "ipv6")
    run.expect_trained(reference(4), run_ranks_by_hand(nodes, run, {}))


def test_a_script_on_each_node(nodes: Network, shared_dir: Path, reference: Reference) -> None:
    """A plain script, started by hand on each node with its NODE_RANK, starts the other ranks of its node."""
    run = run_on(nodes, shared_dir, "tcp")
    output = run_scripts(nodes, [run], lambda node: ("python",), lambda node: {"NODE_RANK": str(node)})
    run.expect_trained(reference(4), output)
