"""One rank in a debugger: by the protocol that editors speak, and at torch's own
prompt.
"""

import os
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from debugpy.common.messaging import JsonIOStream, JsonMessageChannel

from lightning_ddp_ext import ConfigurationError, RankDebugger
from tests.harness import ranks, training

STDIN = 0
LIMIT = 4.0  # seconds, of collectives


class Secretive(training.Net):
    """Has a number in a variable of each step; may stop rank 1 in the first one.

    Args:
        stop: stops in a debugger.
    """

    def __init__(self, stop: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.stop = stop

    def training_step(self, batch: training.Batch, index: int) -> Any:
        secret = 1000 + 10 * self.global_rank + index
        if self.stop is not None and index == 0:
            self.stop()
        self.log("secret", float(secret))
        return super().training_step(batch, index)


def stop_in_editor() -> None:
    if dist.get_rank() == 1:
        breakpoint()


def type_at_prompt() -> None:
    """Stop rank 1 in torch's debugger, which reads commands from a file."""
    with tempfile.TemporaryFile("w+") as typed:
        typed.write("up\nup\np f'secret is {secret}'\nnext\ncontinue\n")
        typed.seek(0)
        os.dup2(typed.fileno(), STDIN)
    dist.breakpoint(rank=1)


def assert_trained_as_without_debugger(
    debugged: list[ranks.Outcome], model: Secretive, directory: Path
) -> None:
    model.stop = None
    undisturbed = training.fit_on(2, directory, model, max_epochs=1)
    training.assert_same(
        [outcome.result for outcome in debugged], [outcome.result for outcome in undisturbed]
    )


class Editor:
    """What VS Code and PyCharm do, with debugpy's own half of the Debug Adapter
    Protocol.
    """

    def __init__(self, port: int) -> None:
        self._events: dict[str, SimpleQueue[Any]] = defaultdict(SimpleQueue)
        connected = socket.create_connection(("127.0.0.1", port))
        self.channel = JsonMessageChannel(JsonIOStream.from_socket(connected), self)
        self.channel.start()

    def event(self, event: Any) -> None:
        """Called by the channel."""
        self._events[event.event].put(event.body)

    def wait_for(self, event: str) -> Any:
        return self._events[event].get(timeout=90)

    def request(self, command: str, **arguments: Any) -> Any:
        return self.channel.request(command, arguments)


def read_secret(port: int) -> str:
    """Attach, stop in the training step for longer than the limits, read a variable, and
    continue until the debugged rank exits.
    """
    editor = Editor(port)
    with closing(editor.channel):
        editor.request("initialize", adapterID="test", pathFormat="path")
        editor.channel.send_request("attach", {"justMyCode": True})
        editor.wait_for("initialized")
        editor.request("configurationDone")
        thread = editor.wait_for("stopped")["threadId"]
        frames = editor.request("stackTrace", threadId=thread)["stackFrames"]
        step = next(frame["id"] for frame in frames if frame["name"] == "training_step")
        secret = editor.request("evaluate", expression="secret", frameId=step)["result"]
        time.sleep(LIMIT + 1)  # waits for nothing: the user thinks, and no limit may end the wait
        editor.request("continue", threadId=thread)
        editor.wait_for("terminated")
    return str(secret)


def test_an_editor_stops_in_one_rank_while_the_other_waits(tmp_path: Path) -> None:
    """The editor holds that rank for longer than all time limits, and training then
    ends with the weights that it has without a debugger.
    """
    port = ranks.free_port()
    model = Secretive(stop_in_editor)
    options: dict[str, Any] = {"strategy": {"timeout": LIMIT}, "max_epochs": 1}
    with training.start_fit(2, tmp_path, model, RankDebugger(1, port), **options) as processes:
        processes.wait_for_output(f"[rank 1] waiting for a debugger at 127.0.0.1:{port},", 1)
        assert read_secret(port) == "1010"
        debugged = processes.wait()
    assert_trained_as_without_debugger(debugged, model, tmp_path / "undisturbed")


def test_torchs_prompt_stops_in_one_rank(tmp_path: Path) -> None:
    """The prompt prints that rank's variable, and training ends with the weights that it
    has without a debugger.
    """
    model = Secretive(type_at_prompt)
    debugged = training.fit_on(2, tmp_path, model, max_epochs=1)
    assert "(Pdb) 'secret is 1010'" in debugged[1].output
    assert_trained_as_without_debugger(debugged, model, tmp_path / "undisturbed")


def debug_rank_3(rank: int, world_size: int) -> str:
    trainer = training.make_trainer(
        "ddp_ext", devices=1, callbacks=[RankDebugger(0), RankDebugger(3)]
    )
    return str(training.raised(ConfigurationError, trainer.fit, training.Net()))


def test_a_rank_that_does_not_exist_is_refused() -> None:
    """The error is raised before the ranks wait for each other."""
    assert ranks.run_ranks(debug_rank_3, 1) == ["RankDebugger needs a rank from 0 to 0 (got 3)"]
