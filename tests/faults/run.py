"""One injection: a run on real processes, what a plan does to one of them, and what is wrong afterwards."""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.faults.plan import Injection
from tests.faults.training import Fault, options_of, train
from tests.faults.verdict import Ending, Remains
from tests.harness.network import Network
from tests.harness.ranks import RankProcesses, free_port, run_ranks
from tests.harness.scripts import start_script

SCRIPT = Path(__file__).with_name("training.py")
# Seconds that no rank may outlive: not what is promised, but far beyond it, on a busy machine.
TIME_LIMIT = 60.0

Weights = list[float]
# By world size: the weights at the end of a run that nothing happens to, and a checkpoint of its second step.
References = Callable[[int], tuple[Weights, Path]]


def references_in(parent: Path) -> References:
    """Runs that nothing happens to, for comparison, each made once."""

    @functools.cache
    def reference(world_size: int) -> tuple[Weights, Path]:
        directory = parent / f"{world_size}-ranks"
        directory.mkdir()
        return _learn(directory, world_size, keep=-1), directory / "step=2.ckpt"

    return reference


def inject(plan: Injection, directory: Path, references: References, hosts: Network | None = None) -> list[str]:
    """Do what a plan says in an empty directory; one line or story for each thing that is wrong afterwards."""
    weights, checkpoint = references(plan.world_size)
    begin = checkpoint if plan.stage == "restore" else None
    try:
        ending = _run_script(plan, directory, begin) if plan.launch == "script" else _run(plan, directory, begin, hosts)
        remains = Remains.in_directory(directory)
        wrong = [*ending.wrong_with(plan), *remains.wrong_with(plan)]
        for name in remains.partial:
            os.utime(directory / name, (0, 0))  # an hour passes
        learnt = _learn(directory, plan.world_size, remains.newest or begin)
        # DDP lays its buckets out anew after the first step in a process, so a resumed run may add up otherwise.
        tolerance = 0.0 if plan.world_size == 2 else 1e-6
        if any(abs(mine - other) > tolerance for mine, other in zip(learnt, weights, strict=True)):
            wrong.append(f"the run that was resumed from {remains.newest} has learnt something else")
        wrong += [f"{name} is left after the next run" for name in Remains.in_directory(directory).partial]
    except Exception:  # a rank hangs, a moment has not come, the next run fails, ...
        return [traceback.format_exc()]
    return [*wrong, *dict.fromkeys(ending.stories.values())] if wrong else []


def _run_script(plan: Injection, directory: Path, begin: Path | None) -> Ending:
    arguments = (str(plan.seed), str(directory), *([] if begin is None else [str(begin)]))
    with start_script(SCRIPT, *arguments, time_limit=TIME_LIMIT) as script:
        status = script.wait().returncode
        script.expect_no_survivors(TIME_LIMIT)
        return Ending({0: status}, dict.fromkeys(range(plan.world_size), script.output))


def _run(plan: Injection, directory: Path, begin: Path | None, hosts: Network | None) -> Ending:
    """On ranks that are started by hand; on two hosts the culprit has one for itself."""
    places = None if hosts is None else [hosts[rank == plan.culprit] for rank in range(plan.world_size)]
    address = "127.0.0.1" if places is None else places[0].address
    url = f"file://{directory}/store" if plan.method == "file" else f"tcp://{address}:{free_port()}"
    arguments = (plan, directory, url, begin and str(begin))
    with RankProcesses(one_rank, plan.world_size, *arguments, time_limit=TIME_LIMIT, namespaces=places) as ranks:
        if plan.kind == "cut":
            assert hosts is not None
            ranks.wait_for("cut", plan.striker)
            hosts.cut()
            ranks.release(plan.striker)
        if plan.kind == "stop":
            ranks.wait(*(rank for rank in range(plan.world_size) if rank != plan.culprit))
            ranks.kill(plan.culprit)
        outcomes = ranks.wait()
    statuses = {outcome.rank: outcome.exit_code for outcome in outcomes}
    return Ending(statuses, {outcome.rank: outcome.story() for outcome in outcomes})


def _learn(directory: Path, world_size: int, checkpoint: Path | None = None, keep: int = 1) -> Weights:
    """What a run learns that nothing happens to, from its beginning or from a checkpoint on."""
    arguments = (None, directory, f"file://{directory}/store", checkpoint and str(checkpoint), keep)
    first, *others = run_ranks(one_rank, world_size, *arguments)
    assert all(other == first for other in others), "ranks have different weights"
    weights: Weights = first
    return weights


def one_rank(
    rank: int, world_size: int, plan: Injection | None, directory: Path, url: str, checkpoint: str | None, keep: int = 1
) -> Weights:
    fault, options = Fault(plan, rank, directory), {"init_method": url, "rank": rank, **options_of(plan)}
    return train(fault, directory, world_size, checkpoint, keep, world_size=world_size, **options)
