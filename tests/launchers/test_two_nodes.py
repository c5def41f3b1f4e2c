"""Two nodes with two ranks each: hosts of their own network, which gloo must find among their interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.harness.network import Network
from tests.harness.ranks import Environment
from tests.harness.scripts import start_script
from tests.launchers.runs import METHODS, SCRIPT, Reference, Runs, output_of, run_by_hand

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


def run_scripts(nodes: Network, argv: Sequence[str], *launcher: str, **env: Any) -> str:
    """Run the script on each host to a good end; what they print. ``{node}`` in a word becomes the host's number."""
    with ExitStack() as stack:
        scripts = []
        for node, host in enumerate(nodes):
            words = (*host.prefix, *(word.format(node=node) for word in launcher))
            variables = {"GLOO_SOCKET_IFNAME": None, **env}
            script = start_script(SCRIPT, *argv, launcher=words, env=variables, rank=node, time_limit=90.0)
            scripts.append(stack.enter_context(script))
        return "".join(output_of(script.wait()) for script in scripts)


def test_torchrun_on_two_nodes(nodes: Network, shared_dir: Path, reference: Reference) -> None:
    """An agent on each node starts its ranks, and starts them again when one of them was killed."""
    runs = Runs(shared_dir, "tcp", "directory", nodes=2, tcp=f"tcp://{nodes[0].address}:{PORT}")
    launcher = ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--node-rank={node}", "--max-restarts=1"]
    launcher += ["--rdzv-backend=c10d", f"--rdzv-endpoint=host-a:{PORT + 1}", "--rdzv-id=run42"]
    output = run_scripts(nodes, [*runs.argv, "--die", "3", "0", "1"], *launcher)
    runs.expect_trained(reference(4), output, returns=12, launches=[2, 2])


def test_by_hand_on_two_nodes(nodes: Network, shared_dir: Path, reference: Reference) -> None:
    """One process per rank, started by hand on the node where it shall run; the network may be one of IPv6."""
    urls = {"tcp": f"tcp://{nodes[0].address}:{PORT + 1}", "ipv6": f"tcp://[{nodes[0].address6}]:{PORT + 2}"}
    runs = Runs(shared_dir, *METHODS, "ipv6", nodes=2, **urls)
    env: Environment = {
        "RANK": str,
        "WORLD_SIZE": "4",
        "LOCAL_RANK": lambda rank: str(rank % 2),
        "MASTER_ADDR": "host-a",
        "MASTER_PORT": str(PORT),
        "DDPX_RUN_ID": "run 42",
        "GLOO_SOCKET_IFNAME": None,
    }
    places = [nodes[rank // 2] for rank in range(4)]
    output = run_by_hand(runs.argv, env, 4, namespaces=places, time_limit=60.0)
    runs.expect_trained(reference(4), output)


def test_a_script_on_each_node(nodes: Network, shared_dir: Path, reference: Reference) -> None:
    """A plain script, started by hand on each node with its NODE_RANK, starts the other ranks of its node."""
    runs = Runs(shared_dir, "tcp", nodes=2, tcp=f"tcp://{nodes[0].address}:{PORT}")
    output = run_scripts(nodes, runs.argv, "python", NODE_RANK=str)
    runs.expect_trained(reference(4), output)
