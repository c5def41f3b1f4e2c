"""One rank in a debugger: by the protocol that editors speak, and at torch's own
prompt.
"""

import inspect
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from debugpy.common.messaging import JsonIOStream, JsonMessageChannel
from torch import Tensor

from lightning_ddp_ext import ConfigurationError, RankDebugger
from tests.harness import ranks, training
from tests.harness.training import Net

STDIN = 0
LIMIT = 4.0  # seconds, of collectives


class Secretive(Net):
    """Has a number in a variable of each step, and may stop rank 1 in the first one."""

    def __init__(self, has_breakpoint: bool) -> None:
        super().__init__()
        self.has_breakpoint = has_breakpoint

    def training_step(self, batch: training.Batch, index: int) -> Any:
        loss = super().training_step(batch, index)
        secret = 1000 + 10 * self.global_rank + index
        self.log("secret", float(secret))  # an editor stops here
        if self.has_breakpoint and index == 0:
            dist.breakpoint(rank=1)
        return loss


def train(
    rank: int,
    world_size: int,
    directory: Path,
    *callbacks: L.Callback,
    has_breakpoint: bool = False,
    **strategy: Any,
) -> dict[str, Tensor]:
    """Train one epoch, and return the weights."""
    torch.manual_seed(1)
    model = Secretive(has_breakpoint)
    training.fit("ours", directory, model, *callbacks, strategy=strategy, max_epochs=1)
    return training.weights(model)


def train_with_editor(rank: int, world_size: int, directory: Path, port: int) -> dict[str, Tensor]:
    """Train with time limits that are shorter than the time in the debugger."""
    return train(rank, world_size, directory, RankDebugger(1, port), timeout=LIMIT)


def train_at_prompt(rank: int, world_size: int, directory: Path) -> dict[str, Tensor]:
    """Train with torch's debugger, which reads commands from a file."""
    (directory / f"typed{rank}").write_text("up\np f'secret is {secret}'\nnext\ncontinue\n")
    os.dup2(os.open(directory / f"typed{rank}", os.O_RDONLY), STDIN)
    return train(rank, world_size, directory, has_breakpoint=True)


def assert_trained_as_without_debugger(debugged: list[ranks.Outcome], directory: Path) -> None:
    """Train without a debugger, and assert that the weights are the same."""
    directory.mkdir()
    undisturbed = ranks.run_ranks(train, 2, directory)
    training.assert_same([outcome.result for outcome in debugged], undisturbed)


class Editor:
    """What VS Code and PyCharm do, with debugpy's own half of the Debug Adapter
    Protocol.
    """

    def __init__(self, port: int) -> None:
        self._events: dict[str, SimpleQueue[Any]] = defaultdict(SimpleQueue)
        connected = socket.create_connection(("127.0.0.1", port))
        self._channel = JsonMessageChannel(JsonIOStream.from_socket(connected), self)
        self._channel.start()

    def close(self) -> None:
        self._channel.close()

    def event(self, event: Any) -> None:
        """Called by the channel."""
        self._events[event.event].put(event.body)

    def wait_for(self, event: str) -> Any:
        return self._events[event].get(timeout=90)

    def send(self, command: str, **arguments: Any) -> Any:
        return self._channel.send_request(command, arguments)

    def request(self, command: str, **arguments: Any) -> Any:
        return self._channel.request(command, arguments)

    def set_breakpoints(self, *lines: int) -> None:
        """Set the breakpoints in this file, instead of earlier ones."""
        breakpoints = [{"line": line} for line in lines]
        self.request("setBreakpoints", source={"path": __file__}, breakpoints=breakpoints)


@contextmanager
def attached(port: int) -> Iterator[Editor]:
    """Yield an editor, from when it attaches until the debugged rank exits."""
    with closing(Editor(port)) as editor:
        editor.request("initialize", adapterID="test", pathFormat="path")
        editor.send("attach", justMyCode=True)
        editor.wait_for("initialized")
        yield editor
        editor.wait_for("terminated")


def line_to_stop_in() -> int:
    lines, start = inspect.getsourcelines(Secretive.training_step)
    return start + next(
        number for number, text in enumerate(lines) if "an editor stops here" in text
    )


def read_secret(editor: Editor) -> str:
    """Stop in the training step for longer than the limits, read a variable, and continue."""
    line = line_to_stop_in()
    editor.set_breakpoints(line)
    editor.request("configurationDone")
    thread = editor.wait_for("stopped")["threadId"]
    frame = editor.request("stackTrace", threadId=thread)["stackFrames"][0]
    assert (frame["name"], frame["line"]) == ("training_step", line)
    scope = editor.request("scopes", frameId=frame["id"])["scopes"][0]
    reference = scope["variablesReference"]
    variables = editor.request("variables", variablesReference=reference)["variables"]
    time.sleep(LIMIT + 1)  # waits for nothing: the user thinks, and no limit may end the wait
    editor.set_breakpoints()
    editor.request("continue", threadId=thread)
    return str(next(each["value"] for each in variables if each["name"] == "secret"))


def test_an_editor_stops_in_one_rank_while_the_other_waits(tmp_path: Path) -> None:
    """The editor holds that rank for longer than all time limits, and training then
    ends with the weights that it has without a debugger.
    """
    port = ranks.free_port()
    with ranks.RankProcesses(train_with_editor, 2, tmp_path, port) as processes:
        processes.wait_for_output(f"[rank 1] waiting for a debugger at 127.0.0.1:{port},", 1)
        with attached(port) as editor:
            assert read_secret(editor) == "1010"
        debugged = processes.wait()
    assert_trained_as_without_debugger(debugged, tmp_path / "undisturbed")


def test_torchs_prompt_stops_in_one_rank(tmp_path: Path) -> None:
    """The prompt prints that rank's variable, and training ends with the weights that it
    has without a debugger.
    """
    debugged = ranks.launch_ranks(train_at_prompt, 2, tmp_path)
    assert "(Pdb) 'secret is 1010'" in debugged[1].output
    assert_trained_as_without_debugger(debugged, tmp_path / "undisturbed")


def debug_rank_3(rank: int, world_size: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        training.make_trainer(
            "ddp_ext", devices=1, callbacks=[RankDebugger(0), RankDebugger(3)]
        ).fit(Net())
    return str(caught.value)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    """The error is raised before the ranks wait for each other."""
    assert ranks.run_ranks(debug_rank_3, 1) == ["RankDebugger needs a rank from 0 to 0 (got 3)"]
