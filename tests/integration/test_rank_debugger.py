"""One rank in a debugger, by the protocol that editors speak; and `breakpoint()` on any rank, in a terminal."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import pty
import re
import select
import socket
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext import ConfigurationError, HangWatchdog, RankDebugger
from tests.harness.ranks import RankProcesses, announce, by_hand_env, free_port, launch_ranks, run_ranks
from tests.harness.training import Batch, Net, assert_same, make_strategy, make_trainer, weights


class Secretive(Net):
    """Has a number in a variable of each step, and may call ``breakpoint()`` in the first one."""

    def __init__(self, is_interrupted: bool) -> None:
        super().__init__()
        self.is_interrupted = is_interrupted

    def training_step(self, batch: Batch, index: int) -> Any:
        loss = super().training_step(batch, index)
        secret = 1000 + 10 * self.global_rank + index
        self.log("secret", float(secret))  # an editor stops here
        if self.is_interrupted and index == 0:
            announce("at its breakpoint")
            breakpoint()
        return loss


def train(rank: int, world_size: int, directory: Path, terminal: str | None = None, is_attached: bool = False) -> Any:
    """The weights after an epoch; with a terminal that all ranks share, or none; with an editor, in little time."""
    with suppress(OSError), open("/dev/tty") as tests_own:
        fcntl.ioctl(tests_own, termios.TIOCNOTTY)
    os.dup2(os.open(terminal or os.devnull, os.O_RDWR | os.O_NOCTTY), 0)
    torch.manual_seed(1)
    timeout, debuggers = (2, [RankDebugger(1)]) if is_attached else (20, [])
    model, strategy = Secretive(not is_attached), make_strategy("ours", directory, timeout=timeout)
    make_trainer(strategy, max_epochs=1, callbacks=[*debuggers, HangWatchdog(timeout=timeout)]).fit(model)
    return weights(model)


class Editor:
    """The side of the Debug Adapter Protocol that VS Code and PyCharm have."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=90)
        self._file = self._socket.makefile("rwb")
        self._sent = 0
        self._unread: list[dict[str, Any]] = []

    def send(self, command: str, **arguments: Any) -> int:
        self._sent += 1
        body = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        content = json.dumps(body).encode()
        self._file.write(b"Content-Length: %d\r\n\r\n" % len(content) + content)
        self._file.flush()
        return self._sent

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        response = self._wait_for("request_seq", self.send(command, **arguments))
        assert response["success"], response
        body: dict[str, Any] = response.get("body", {})
        return body

    def event(self, name: str) -> dict[str, Any]:
        body: dict[str, Any] = self._wait_for("event", name).get("body", {})
        return body

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _wait_for(self, key: str, value: object) -> dict[str, Any]:
        while not (found := [message for message in self._unread if message.get(key) == value]):
            self._unread.append(self._read())
        self._unread.remove(found[0])
        return found[0]

    def _read(self) -> dict[str, Any]:
        length = int(self._file.readline().split(b":")[1])
        assert self._file.readline() == b"\r\n"
        message: dict[str, Any] = json.loads(self._file.read(length))
        return message


@contextmanager
def attached(port: int) -> Iterator[Editor]:
    """An editor, from the moment when it attaches until the debugged rank has ended."""
    editor = Editor(port)
    editor.request("initialize", adapterID="test", pathFormat="path")
    editor.send("attach", justMyCode=True)
    editor.event("initialized")
    yield editor
    editor.event("terminated")
    editor.close()


def read_secret(editor: Editor) -> str:
    """Stop in the training step, read a variable, and go on."""
    lines, start = inspect.getsourcelines(Secretive.training_step)
    line = start + next(number for number, text in enumerate(lines) if "an editor stops here" in text)
    editor.request("setBreakpoints", source={"path": __file__}, breakpoints=[{"line": line}])
    editor.request("configurationDone")
    thread = editor.event("stopped")["threadId"]
    frame = editor.request("stackTrace", threadId=thread)["stackFrames"][0]
    assert (frame["name"], frame["line"]) == ("training_step", line)
    scope = editor.request("scopes", frameId=frame["id"])["scopes"][0]
    variables = editor.request("variables", variablesReference=scope["variablesReference"])["variables"]
    threading.Event().wait(3)  # a user thinks, for longer than any time limit of the run
    editor.request("setBreakpoints", source={"path": __file__}, breakpoints=[])
    editor.request("continue", threadId=thread)
    return str(next(each["value"] for each in variables if each["name"] == "secret"))


def test_an_editor_stops_in_one_rank_while_the_other_waits(tmp_path: Path) -> None:
    """The editor reads that rank's variable, and training ends with the weights that it has without a debugger."""
    port = free_port()
    env = {**by_hand_env(2), "DDPX_DEBUG_PORT": str(port)}
    with RankProcesses(train, 2, tmp_path, None, True, env=env, time_limit=100) as ranks:
        ranks.wait_for_output(f"[rank 1] waits for a debugger at 127.0.0.1:{port} ", 1)
        with attached(port) as editor:
            assert read_secret(editor) == "1010"
        debugged = ranks.wait()
    assert "HangWatchdog is off while a rank is debugged" in debugged[0].output
    # Without a terminal `breakpoint()` says how a debugger can be attached, and training goes on.
    (tmp_path / "alone").mkdir()
    alone = launch_ranks(train, 2, tmp_path / "alone", env=by_hand_env(2))
    assert_same([each.result for each in debugged], [each.result for each in alone])
    for rank, outcome in enumerate(alone):
        assert re.search(
            rf"\[rank {rank}\] goes on from breakpoint\(\) at .*:\d+, as it has no terminal; "
            rf"set DDPX_DEBUG_RANK={rank} for all ranks to attach a debugger to it",
            outcome.output,
        )


def test_breakpoint_asks_in_the_terminal_on_each_rank_in_turn(tmp_path: Path) -> None:
    """The prompt says which rank it is; no rank is cut off while another one asks."""
    terminal, theirs = pty.openpty()
    asked, output = list[str](), ""
    with RankProcesses(train, 2, tmp_path, os.ttyname(theirs), env=by_hand_env(2), time_limit=60) as ranks:
        for rank in range(2):
            ranks.wait_for("at its breakpoint", rank)
        while len(asked) < 4:
            assert select.select([terminal], [], [], 60)[0], output
            output += os.read(terminal, 1 << 16).decode()
            for who in re.findall(r"\(Pdb of rank (\d)\) ", output)[len(asked) :]:
                asked.append(who)
                os.write(terminal, b"p f'secret is {secret}'\n" if asked.count(who) == 1 else b"c\n")
        outcomes = ranks.wait()
    os.close(terminal)
    os.close(theirs)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert asked in (["0", "0", "1", "1"], ["1", "1", "0", "0"]), output
    assert {"'secret is 1000'", "'secret is 1010'"} <= set(re.findall(r"'secret is \d+'", output))


def debug_rank_3(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
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
