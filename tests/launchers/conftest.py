"""What all launchers have to equal: stock Lightning."""

from __future__ import annotations

import functools
import gc
import os
import re
import socket
from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.harness.ranks import by_hand_env, free_port
from tests.launchers.runs import Learned, be_the_script, results_of_tests, run_by_hand


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Learned]:
    """What ``strategy="ddp"`` learns on so many ranks."""

    @functools.cache
    def learned(world_size: int) -> Learned:
        records = tmp_path_factory.mktemp("stock")
        arguments = (str(records), "--strategy", "ddp", "--devices", str(world_size), "--calls", "fit", "test")
        env = {**by_hand_env(world_size, free_port()), "NODE_RANK": "0"}
        output = run_by_hand(arguments, env, world_size, function=be_stock)
        (weights,) = set(re.findall(r"^learned (\w+)$", output, re.MULTILINE))
        (results,) = set(results_of_tests(output))
        return Learned(weights, results)

    return learned


def be_stock(rank: int, world_size: int, *argv: str) -> None:
    be_the_script(rank, world_size, *argv)
    gc.collect()
    dist.destroy_process_group()  # stock Lightning does not, and then some processes abort at their end


@pytest.fixture
def ipv6() -> None:
    """Skips where ::1 is no address of this machine, but never in CI."""
    try:
        with socket.socket(socket.AF_INET6) as listener:
            listener.bind(("::1", 0))
    except OSError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must run this test: {error}")
        pytest.skip(f"this machine has no ::1: {error}")
