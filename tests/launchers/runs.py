"""Runs of the training script: how their ranks meet, how they are told so, and what they must have come to.

=============  ======================================================================
method         where the ranks meet
=============  ======================================================================
``none``       where nobody has chosen: as ``env``
``env``        at ``MASTER_ADDR`` and ``MASTER_PORT``, whoever sets them
``tcp``        at a port of 127.0.0.1
``file``       in a file
``directory``  in a file of a directory, named after the run
=============  ======================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.harness.outcomes import output_of_all
from tests.harness.ranks import Environment, free_port, launch_ranks
from tests.harness.scripts import Completed
from tests.launchers import train

SCRIPT = Path(train.__file__)
METHODS = ("env", "tcp", "file", "directory")

# What stock learns on so many ranks: a fingerprint of the weights, and the results of a test.
Learned = tuple[str, list[Any]]
Reference = Callable[[int], Learned]


class Runs:
    """Runs one after another in one script, a method each, on ``nodes`` nodes with two ranks each.

    Args:
        directory: ranks meet here if they do so in files; a fresh one.
        methods: see above.
        urls: others than those of the methods.
    """

    def __init__(self, directory: Path, *methods: str, nodes: int = 1, **urls: str) -> None:
        self._directory, self._nodes = directory, nodes
        made = {"none": "env://", "env": "env://", "tcp": f"tcp://127.0.0.1:{free_port()}"}
        made |= {"file": f"file://{directory}/store", "directory": f"file://{directory}/", **urls}
        self._urls = {method: made[method] for method in methods}

    @property
    def argv(self) -> tuple[str, ...]:
        """The script's arguments."""
        chosen = ["-" if method == "none" else url for method, url in self._urls.items()]
        runs = (word for url in chosen for word in ("--url", url))
        return *runs, "--devices", "2", "--num-nodes", str(self._nodes)

    def expect_trained(
        self, learned: Learned, output: str, *, returns: int | None = None, launches: Sequence[int] | None = None
    ) -> None:
        """Fail unless in each run every rank has taken part, met the others where it was told to, and learned that.

        Args:
            learned: what the reference run has learned.
            output: what all processes have printed.
            returns: how often a process has returned from training, in all runs; None: once on each rank.
            launches: how often ranks have met in each run; None: once.
        """
        size = 2 * self._nodes
        told = [json.loads(line) for line in re.findall(r"^{.*}$", output, re.MULTILINE)]
        returned = [report for report in told if report["what"] == "returned"]
        assert len(returned) == (size * len(self._urls) if returns is None else returns), output
        assert {report["weights"] for report in told} == {learned[0]}
        assert all(report["results"] in ([], [learned[1]]) for report in returned)
        for run, method in enumerate(self._urls):
            trained = [report for report in told if (report["what"], report["run"]) == ("trained", run)]
            places = {(*report["place"], report["pid"]) for report in trained}
            assert len(places) == len(trained) >= size, output
            assert {place[:4] for place in places} == {(rank, size, rank % 2, rank // 2) for rank in range(size)}
            files = {"file": "store", "directory": r"ddpx-.+\.store"}.get(method, "")
            assert all(re.fullmatch(files, " ".join(report["files"])) for report in trained), output
        met = re.findall(rf"process group: gloo, {size} ranks, (\S+)$", output, re.MULTILINE)
        expected = zip(self._urls.values(), launches or [1] * len(self._urls), strict=True)
        assert sorted(met) == sorted(url for url, times in expected for _ in range(times)), output
        assert not list(self._directory.iterdir()), "the last rank to leave removes the file"


def be_the_script(rank: int, world_size: int, *argv: str) -> None:
    """A rank process in which the training script runs; ``{rank}`` in an argument becomes its rank."""
    train.main([argument.format(rank=rank) for argument in argv])


def run_by_hand(argv: Iterable[str], env: Environment, world_size: int = 2, **options: Any) -> str:
    """Run the script once in each of several processes that nobody has launched, to a good end; what they print."""
    return output_of_all(launch_ranks(be_the_script, world_size, *argv, env=env, **options))


def output_of(done: Completed) -> str:
    """What a script has printed; fails unless it has ended well."""
    assert done.returncode == 0, done.output
    return done.output
