"""NCCL's settings are checked, and become the variables that NCCL reads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext import DDPExtStrategy, NCCLOptions
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rendezvous.nccl_options import apply
from tests.harness.outcomes import output_of_all
from tests.harness.ranks import by_hand_env, launch_ranks
from tests.harness.training import Net, make_trainer

SETTINGS: list[tuple[str, Any, str, str]] = [
    ("p2p_level", "NVL", "NCCL_P2P_LEVEL", "NVL"),
    ("ib_hca", "=mlx5_0:1", "NCCL_IB_HCA", "=mlx5_0:1"),
    ("algorithm", "Ring,Tree", "NCCL_ALGO", "Ring,Tree"),
    ("protocol", "Simple", "NCCL_PROTO", "Simple"),
    ("buffer_size", 2**23, "NCCL_BUFFSIZE", "8388608"),
    ("min_channels", 2, "NCCL_MIN_NCHANNELS", "2"),
    ("max_channels", 8, "NCCL_MAX_NCHANNELS", "8"),
    ("socket_threads", 4, "NCCL_SOCKET_NTHREADS", "4"),
    ("sockets_per_thread", 2, "NCCL_NSOCKS_PERTHREAD", "2"),
    ("gdr_level", "PHB", "NCCL_NET_GDR_LEVEL", "PHB"),
    ("check_pointers", True, "NCCL_CHECK_POINTERS", "1"),
    ("debug", "INFO", "NCCL_DEBUG", "INFO"),
    ("debug_subsystems", "^INIT,NET", "NCCL_DEBUG_SUBSYS", "^INIT,NET"),
    ("blocking_wait", False, "TORCH_NCCL_BLOCKING_WAIT", "0"),
    ("high_priority_streams", True, "TORCH_NCCL_HIGH_PRIORITY", "1"),
]


def test_settings_become_variables() -> None:
    """Beside those that are there; the interface is gloo's, too."""
    environ = {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
    apply(NCCLOptions(**{name: value for name, value, _, _ in SETTINGS}), "eth1", environ)
    interface = {"NCCL_SOCKET_IFNAME": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}
    assert environ == {"PATH": "/bin", **{variable: text for _, _, variable, text in SETTINGS}, **interface}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"p2p_level": "NVLINK"}, r"NCCLOptions.p2p_level must be one of LOC, NVL, .* \(got 'NVLINK'\)"),
        ({"algorithm": "Ring,Star"}, r"algorithm must be one of Tree, .*, with commas between \(got 'Ring,Star'\)"),
        ({"debug": "info"}, r"debug must be one of VERSION, WARN, INFO, TRACE \(got 'info'\)"),
        ({"socket_threads": 17}, r"socket_threads must be from 1 to 16 \(got 17\)"),
        ({"buffer_size": 0}, r"buffer_size must be at least 1 \(got 0\)"),
        ({"socket_threads": 16, "sockets_per_thread": 5}, r"must be at most 64 \(got 16 × 5\)"),
        ({"min_channels": 4, "max_channels": 2}, r"min_channels must not be above max_channels \(got 4 and 2\)"),
    ],
)
def test_values_that_nccl_does_not_take_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        NCCLOptions(**wrong)


def test_the_environment_must_not_say_something_else() -> None:
    with pytest.raises(
        ConfigurationError, match=r"nccl= of the strategy says NCCL_DEBUG=INFO, .* NCCL_DEBUG=WARN; leave"
    ):
        apply(NCCLOptions(debug="INFO"), None, {"NCCL_DEBUG": "WARN"})
    with pytest.raises(ConfigurationError, match=r"interface= of the strategy says NCCL_SOCKET_IFNAME=eth1"):
        apply(None, "eth1", {"NCCL_SOCKET_IFNAME": "eth0"})


def train(rank: int, world_size: int, directory: Path) -> list[str]:
    strategy = DDPExtStrategy(f"file://{directory}/meet", nccl=NCCLOptions(debug="WARN"), interface="lo")
    make_trainer(strategy).fit(Net())
    return [os.environ[name] for name in ("GLOO_SOCKET_IFNAME", "NCCL_DEBUG")]


def test_a_strategy_sets_them_for_its_group(tmp_path: Path) -> None:
    """Gloo takes the interface, too. Misspelt ones are warned of once; one like no other may be somebody's own."""
    nearest = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT")
    misspelt = {f"{name}S": "1" for name in nearest}
    outcomes = launch_ranks(train, 2, tmp_path, env={**by_hand_env(2), **misspelt, "NCCL_OWN": "1"})
    assert [outcome.result for outcome in outcomes] == [["lo", "WARN"]] * 2
    warnings = re.findall(r"(\w+) in the environment has no effect .*did you mean (\w+)\?", output_of_all(outcomes))
    assert warnings == [(f"{name}S", name) for name in nearest]
