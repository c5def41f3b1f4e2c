"""NCCL's settings are checked, and become the variables that NCCL reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext import DDPExtStrategy, NCCLOptions
from lightning_ddp_ext.errors import OptionError
from lightning_ddp_ext.rendezvous.nccl_options import apply, misspelt
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import Net, make_trainer


def test_settings_become_variables() -> None:
    options = NCCLOptions(
        p2p_level="NVL",
        ib_hca="=mlx5_0:1",
        algorithm="Ring,Tree",
        protocol="Simple",
        buffer_size=2**23,
        min_channels=2,
        max_channels=8,
        socket_threads=4,
        sockets_per_thread=2,
        gdr_level="PHB",
        check_pointers=True,
        debug="INFO",
        debug_subsystems="^INIT,NET",
        blocking_wait=False,
        high_priority_streams=True,
    )
    environ = {"PATH": "/bin", "NCCL_DEBUG": "INFO"}
    apply(options, "eth1", environ)
    assert environ == {
        "PATH": "/bin",
        "NCCL_P2P_LEVEL": "NVL",
        "NCCL_IB_HCA": "=mlx5_0:1",
        "NCCL_ALGO": "Ring,Tree",
        "NCCL_PROTO": "Simple",
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_MIN_NCHANNELS": "2",
        "NCCL_MAX_NCHANNELS": "8",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "2",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_CHECK_POINTERS": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "^INIT,NET",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"p2p_level": "NVLINK"}, r"NCCLOptions.p2p_level must be one of LOC, NVL, .* \(got 'NVLINK'\)"),
        (
            {"algorithm": "Ring,Star"},
            r"algorithm must be one of Tree, .*, with commas between \(got 'Ring,Star'\)",
        ),
        ({"debug": "info"}, r"debug must be one of VERSION, WARN, INFO, TRACE \(got 'info'\)"),
        ({"socket_threads": 17}, r"socket_threads must be from 1 to 16 \(got 17\)"),
        ({"buffer_size": 0}, r"buffer_size must be at least 1 \(got 0\)"),
        ({"socket_threads": 16, "sockets_per_thread": 5}, r"must be at most 64 \(got 16 × 5\)"),
        ({"min_channels": 4, "max_channels": 2}, r"min_channels must not be above max_channels \(got 4 and 2\)"),
    ],
)
def test_values_that_nccl_does_not_take_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        NCCLOptions(**wrong)


def test_the_environment_must_not_say_something_else() -> None:
    with pytest.raises(OptionError, match=r"nccl= of the strategy says NCCL_DEBUG=INFO, .* NCCL_DEBUG=WARN; leave"):
        apply(NCCLOptions(debug="INFO"), None, {"NCCL_DEBUG": "WARN"})
    with pytest.raises(OptionError, match=r"interface= of the strategy says NCCL_SOCKET_IFNAME=eth1"):
        apply(None, "eth1", {"NCCL_SOCKET_IFNAME": "eth0"})


def test_misspelt_variables_are_named_with_the_nearest() -> None:
    environ = {
        "NCCL_SOCKET_IFNAM": "eth0",
        "TORCH_NCCL_BLOCKING_WAITS": "1",
        "GLOO_SOCKET_IFNAMES": "a",
        "NCCL_OWN": "1",
    }
    assert [sentence.rsplit(" ", 1)[-1] for sentence in misspelt({**environ, "NCCL_DEBUG": "INFO"})] == [
        "GLOO_SOCKET_IFNAME?",
        "NCCL_SOCKET_IFNAME?",
        "TORCH_NCCL_BLOCKING_WAIT?",
    ]


def train(rank: int, world_size: int, directory: Path) -> None:
    options = {"nccl": NCCLOptions(debug="WARN"), "interface": "lo"}
    make_trainer(DDPExtStrategy(f"file://{directory}/meet", **options)).fit(Net())


def test_gloo_uses_the_interface(tmp_path: Path) -> None:
    """A group over the loopback interface trains; one over an interface that does not exist could not be formed."""
    run_ranks(train, 2, tmp_path, env=by_hand_env(2))
