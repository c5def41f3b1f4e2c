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
from tests.harness.scripts import start_script
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
        self.log("secret", float(secret))  # line 16
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
LINE = 16


class Editor:
    """The side of the Debug Adapter Protocol that VS Code and PyCharm have."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=90)
        self._file = self._socket.makefile("rwb")
        self._sent = 0
        self._events: list[dict[str, Any]] = []

    def send(self, command: str, **arguments: Any) -> int:
        self._sent += 1
        body = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        content = json.dumps(body).encode()
        self._file.write(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        self._file.flush()
        return self._sent

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self.response(self.send(command, **arguments))

    def response(self, number: int) -> dict[str, Any]:
        while True:
            message = self._read()
            if message["type"] == "response" and message["request_seq"] == number:
                assert message["success"], message
                body: dict[str, Any] = message.get("body", {})
                return body
            self._events.append(message)

    def event(self, name: str) -> dict[str, Any]:
        while True:
            for message in self._events:
                if message.get("event") == name:
                    self._events.remove(message)
                    body: dict[str, Any] = message.get("body", {})
                    return body
            self._events.append(self._read())

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _read(self) -> dict[str, Any]:
        length = int(self._file.readline().split(b":")[1])
        assert self._file.readline() == b"\r\n"
        message: dict[str, Any] = json.loads(self._file.read(length))
        return message


def read_secret(port: int, script: str) -> str:
    """Attach, stop in the training step, read a variable, and go on."""
    editor = Editor(port)
    editor.request("initialize", adapterID="test", pathFormat="path")
    attached = editor.send("attach", justMyCode=True)
    editor.event("initialized")
    editor.request("setBreakpoints", source={"path": script}, breakpoints=[{"line": LINE}])
    editor.request("configurationDone")
    editor.response(attached)
    thread = editor.event("stopped")["threadId"]
    frame = editor.request("stackTrace", threadId=thread)["stackFrames"][0]
    assert (frame["name"], frame["line"]) == ("training_step", LINE)
    scope = editor.request("scopes", frameId=frame["id"])["scopes"][0]
    variables = editor.request("variables", variablesReference=scope["variablesReference"])["variables"]
    editor.request("setBreakpoints", source={"path": script}, breakpoints=[])
    editor.request("continue", threadId=thread)
    editor.event("terminated")
    editor.close()
    return str(next(each["value"] for each in variables if each["name"] == "secret"))


def results(output: str) -> list[Any]:
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [each["weights"] for each in sorted(found, key=lambda each: int(each["rank"]))]


@pytest.mark.slow
def test_an_editor_stops_in_one_rank_while_the_other_waits(tmp_path: Path) -> None:
    """The editor reads that rank's variable, and training ends with the weights that it has without a debugger."""
    script, port = tmp_path / "train.py", free_port()
    script.write_text(SCRIPT)
    with start_script(script, "", env={"DDPX_DEBUG_RANK": "1", "DDPX_DEBUG_PORT": str(port)}, time_limit=100) as run:
        run.wait_for_line(rf"\[rank 1\] waits for a debugger at 127\.0\.0\.1:{port} .*", timeout=90)
        assert read_secret(port, str(script)) == "1010"
        debugged = run.wait()
        run.expect_no_survivors()
    assert debugged.returncode == 0, debugged.output
    assert "HangWatchdog is off while a rank is debugged" in debugged.output
    with start_script(script, "", time_limit=100) as run:
        alone = run.wait()
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


def test_breakpoint_without_a_terminal_goes_on(tmp_path: Path) -> None:
    """A sentence names the variable with which a debugger can be attached."""
    with start_script(SCRIPT, "breakpoint", time_limit=100) as run:
        done = run.wait()
    assert done.returncode == 0, done.output
    for rank in (0, 1):
        assert re.search(
            rf"\[rank {rank}\] goes on from breakpoint\(\) at .*:\d+, as it has no terminal; "
            rf"set DDPX_DEBUG_RANK={rank} for all ranks to attach a debugger to it",
            done.output,
        )


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
