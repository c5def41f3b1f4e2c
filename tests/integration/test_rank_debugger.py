"""One rank in a debugger, by the protocol that editors speak; and `breakpoint()` on any rank, in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext import OptionError, RankDebugger
from tests.harness.ranks import free_port, run_ranks
from tests.harness.scripts import run_script, start_script
from tests.harness.training import Net, make_trainer

SCRIPT = """
import json
import sys

import lightning as L
import torch

import lightning_ddp_ext as ddpx
from tests.harness.training import Net, make_trainer


class Stopping(Net):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        secret = 1000 + 10 * self.global_rank + index
        self.log("secret", float(secret))
        if sys.argv[1] == "breakpoint" and index == 0:
            breakpoint()
        return loss


if __name__ == "__main__":
    torch.manual_seed(1)
    model = Stopping()
    strategy = ddpx.DDPExtStrategy(timeout=20)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[ddpx.HangWatchdog(timeout=20)])
    trainer.fit(model)
    weights = [parameter.sum().item().hex() for parameter in model.parameters()]
    sys.stdout.write(json.dumps({"rank": trainer.global_rank, "weights": weights}) + "\\n")
    sys.stdout.flush()
"""


def attach(port: int) -> None:
    """Attach as VS Code and PyCharm do, by the Debug Adapter Protocol, and stay until training has ended."""
    with socket.create_connection(("127.0.0.1", port), timeout=90) as connection, connection.makefile("rwb") as file:

        def send(number: int, command: str, **arguments: Any) -> None:
            request = {"seq": number, "type": "request", "command": command, "arguments": arguments}
            content = json.dumps(request).encode()
            file.write(b"Content-Length: %d\r\n\r\n" % len(content) + content)
            file.flush()

        def wait_for(event: str) -> None:
            found = None
            while found != event:
                length = int(file.readline().split(b":")[1])
                file.readline()
                found = json.loads(file.read(length)).get("event")

        send(1, "initialize", adapterID="test", pathFormat="path")
        send(2, "attach", justMyCode=True)
        wait_for("initialized")
        send(3, "configurationDone")
        wait_for("terminated")


def results(output: str) -> list[Any]:
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [each["weights"] for each in sorted(found, key=lambda each: int(each["rank"]))]


@pytest.mark.slow
def test_a_debugger_is_attached_to_one_rank_while_the_other_waits() -> None:
    """Training ends with the weights that it has without a debugger, where `breakpoint()` has no terminal to ask in.

    A sentence names the variable with which a debugger can be attached.
    """
    port = free_port()
    with start_script(SCRIPT, "", env={"DDPX_DEBUG_RANK": "1", "DDPX_DEBUG_PORT": str(port)}, time_limit=100) as run:
        run.wait_for_line(rf"\[rank 1\] waits for a debugger at 127\.0\.0\.1:{port} .*", timeout=90)
        attach(port)
        debugged = run.wait()
        run.expect_no_survivors()
    assert debugged.returncode == 0, debugged.output
    assert "HangWatchdog is off while a rank is debugged" in debugged.output
    alone = run_script(SCRIPT, "breakpoint", time_limit=100)
    assert alone.returncode == 0, alone.output
    for rank in (0, 1):
        assert re.search(
            rf"\[rank {rank}\] goes on from breakpoint\(\) at .*:\d+, as it has no terminal; "
            rf"set DDPX_DEBUG_RANK={rank} for all ranks to attach a debugger to it",
            alone.output,
        )
    assert results(debugged.stdout) == results(alone.stdout)
    assert len(results(alone.stdout)) == 2


@pytest.mark.slow
def test_breakpoint_asks_in_the_terminal_on_each_rank_in_turn(tmp_path: Path) -> None:
    """The prompt says which rank it is; no rank is cut off while another one asks."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    mine, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, str(script), "breakpoint"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    asked: list[str] = []
    output = ""
    deadline = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < deadline:
        if not select.select([mine], [], [], 0.1)[0]:
            continue
        try:
            output += os.read(mine, 1 << 16).decode()
        except OSError:  # all ranks have ended
            break
        for rank in re.findall(r"\(Pdb of rank (\d)\) ", output)[len(asked) :]:
            asked.append(rank)
            os.write(mine, b"p f'secret is {secret}'\n" if asked.count(rank) == 1 else b"c\n")
    os.close(mine)
    if process.poll() is None:
        process.wait(20)
    assert process.returncode == 0, output
    assert asked in (["0", "0", "1", "1"], ["1", "1", "0", "0"]), output
    assert {"'secret is 1000'", "'secret is 1010'"} <= set(re.findall(r"'secret is \d+'", output))


@pytest.mark.parametrize(
    ("rank", "port", "message"),
    [
        (-1, 5678, r"the debugged rank must be a whole number from 0 on \(got -1\)"),
        (0, 0, r"the debugger's port must be from 1 to 65535 \(got 0\)"),
    ],
)
def test_a_rank_or_port_that_cannot_be_is_refused(rank: int, port: int, message: str) -> None:
    """At once, with field, rule and value."""
    with pytest.raises(OptionError, match=message):
        RankDebugger(rank, port)


def debug_rank_3(rank: int, world_size: int) -> str:
    with pytest.raises(OptionError) as caught:
        make_trainer("ddp_ext", devices=1, callbacks=[RankDebugger(3)]).fit(Net())
    return str(caught.value)


def test_a_rank_that_there_is_not_is_refused() -> None:
    """Before the ranks wait for each other; and so is a variable that contradicts the callback."""
    assert run_ranks(debug_rank_3, 1, env={"DDPX_DEBUG_RANK": None}) == [
        "the debugged rank must be one of 1, counted from 0 (got 3); change DDPX_DEBUG_RANK or RankDebugger(rank=)"
    ]
    assert run_ranks(debug_rank_3, 1, env={"DDPX_DEBUG_RANK": "1"}) == [
        "RankDebugger and DDPX_DEBUG_RANK must name one rank (got 1, 3); leave the others out"
    ]
