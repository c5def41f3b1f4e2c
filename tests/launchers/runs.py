"""One run of the training script: how its ranks meet, how it is told so, and what it must have come to.

=============  =========================================================================================
method         where the ranks meet
=============  =========================================================================================
``env``        at ``MASTER_ADDR`` and ``MASTER_PORT``, whoever sets them
``tcp``        at a port of 127.0.0.1; ``ipv6``: of ::1
``file``       in a file
``directory``  in a file of a directory, named after the run
=============  =========================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.ranks import Environment, free_port, launch_ranks
from tests.harness.scripts import Completed
from tests.launchers import train

SCRIPT = Path(train.__file__)
METHODS = ("env", "tcp", "file")


@dataclass(frozen=True)
class Learned:
    """What training came to: the weights to the last bit, and the results of a test, as they are printed."""

    weights: str
    test_results: str


Reference = Callable[[int], Learned]


class Run:
    """A run of the training script below ``directory``.

    Args:
        directory: a fresh one; ranks write below it, and meet below it if they do so in files.
        method: see above.
        url: another one than that of the method.
        world_size: its number of ranks.
        local_world_size: the number on each node; None: all.
    """

    def __init__(
        self,
        directory: Path,
        method: str,
        *,
        url: str | None = None,
        world_size: int = 2,
        local_world_size: int | None = None,
    ) -> None:
        self.method = method
        self.world_size = world_size
        self.local_world_size = local_world_size or world_size
        self.records = _made(directory / "records")
        self._files = _made(directory / "files")
        self.url = url or self._url()

    @property
    def argv(self) -> tuple[str, ...]:
        """The script's arguments, the init method among them."""
        return str(self.records), "--init-method", self.url, "--devices", str(self.local_world_size)

    @property
    def then(self) -> tuple[str, ...]:
        """Arguments for the script to do this run, too, after one or several others."""
        return "--then", str(self.records), self.url

    def expect_trained(self, learned: Learned, output: str, *, returns: int | None = None, launches: int = 1) -> None:
        """Fail unless every rank has taken part, met the others where it was told to, and learned just that.

        Args:
            learned: what the reference run has learned.
            output: what all processes have printed.
            returns: how often a process has returned from training, in all runs; None: once on each rank.
            launches: how often ranks have met.
        """
        self.expect_records(self.records, learned)
        returned = re.findall(r"^learned (\w+)$", output, re.MULTILINE)
        assert returned == [learned.weights] * (self.world_size if returns is None else returns), output
        greeting = f"process group: gloo, {self.world_size} ranks, {self.url}\n"
        assert output.count(greeting) == launches, output
        self._expect_met()

    def expect_records(self, records: Path, learned: Learned) -> None:
        """Fail unless just the ranks of this run have written that they have learned that, each in its own process."""
        found = read_records(records)
        ranks, per_node = range(self.world_size), self.local_world_size
        assert [record["rank"] for record in found] == list(ranks)
        assert {record["world_size"] for record in found} == {self.world_size}
        assert [record["local_rank"] for record in found] == [rank % per_node for rank in ranks]
        assert [record["node_rank"] for record in found] == [rank // per_node for rank in ranks]
        assert len({record["pid"] for record in found}) == self.world_size
        assert {record["weights"] for record in found} == {learned.weights}

    def _expect_met(self) -> None:
        # The last rank has its place from whoever started it; a launching process, rank 0, has no variables for it.
        seen = read_records(self.records)[-1]["meeting_place"]
        if self.method == "file":
            assert seen == ["store"]
        elif self.method == "directory":
            assert [re.fullmatch(r"ddpx-.+\.store", name) is not None for name in seen] == [True]
        else:
            assert seen is True, "nobody listens where the ranks are to meet"
        assert not list(self._files.iterdir()), "the last rank to leave removes the file"

    def _url(self) -> str:
        if self.method == "tcp":
            return f"tcp://127.0.0.1:{free_port()}"
        if self.method == "ipv6":
            return f"tcp://[::1]:{free_port('::1')}"
        urls = {"env": "env://", "file": f"file://{self._files}/store", "directory": f"file://{self._files}/"}
        return urls[self.method]


def runs_by(methods: Iterable[str], directory: Path, **options: Any) -> list[Run]:
    """A run by each method, for one script that does them one after another."""
    return [Run(_made(directory / method), method, **options) for method in methods]


def argv_of(runs: Sequence[Run]) -> tuple[str, ...]:
    """The arguments of a script that does these runs one after another."""
    return (*runs[0].argv, *(word for run in runs[1:] for word in run.then))


def read_records(records: Path) -> list[dict[str, Any]]:
    """What the ranks have written, by rank."""
    found = [json.loads(path.read_text()) for path in records.glob("rank-*.json")]
    return sorted(found, key=lambda record: int(record["rank"]))


def results_of_tests(output: str) -> list[str]:
    """The results of tests that processes have printed."""
    return re.findall(r"^tested (.+)$", output, re.MULTILINE)


def be_the_script(rank: int, world_size: int, *argv: str) -> None:
    """A rank process in which the training script runs; ``{rank}`` in an argument becomes its rank."""
    train.main([argument.format(rank=rank) for argument in argv])


def run_by_hand(
    argv: Iterable[str],
    env: Environment,
    world_size: int = 2,
    *,
    function: Callable[..., None] = be_the_script,
    **options: Any,
) -> str:
    """Run the script once in each of several processes that nobody has launched, to a good end; what they print."""
    outcomes = launch_ranks(function, world_size, *argv, env=env, **options)
    stories = "\n".join(outcome.story() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [0] * world_size, stories
    return "".join(outcome.output for outcome in outcomes)


def output_of(done: Completed) -> str:
    """What a script has printed; fails unless it has ended well."""
    assert done.returncode == 0, done.output
    return done.output


def _made(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory
