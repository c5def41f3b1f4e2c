"""One injection: a run on real processes, what a plan does to one of them, and what is wrong afterwards."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from tests.faults.plan import Injection
from tests.faults.references import References, Weights, alike, learn
from tests.faults.remains import Remains
from tests.faults.training import Fault, options_of, train
from tests.faults.verdict import Ending, wrong_with
from tests.harness.network import Network
from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, free_port
from tests.harness.scripts import start_script

SCRIPT = Path(__file__).with_name("script.py")
# Seconds that nobody may outlive: not what is promised, but far beyond it, on a busy machine.
TIME_LIMIT = 60.0


def inject(plan: Injection, directory: Path, references: References, hosts: Network | None = None) -> list[str]:
    """Do what a plan says; one line or story for each thing that is wrong afterwards.

    Args:
        plan: what happens.
        directory: an empty one.
        references: what is learnt where nothing happens.
        hosts: two of them, for a plan that needs them.
    """
    reference = references[plan.world_size]
    begin = reference.checkpoint if plan.stage == "restore" else None
    try:
        ending = _run_script(plan, directory, begin) if plan.launch == "script" else _run(plan, directory, begin, hosts)
        remains = Remains.in_directory(directory)
        wrong = [*wrong_with(plan, ending), *remains.wrong_with(plan)]
        for name in remains.partial:
            os.utime(directory / name, (0, 0))  # an hour passes
        if not alike(learn(directory, plan.world_size, remains.newest or begin), reference.weights, plan.world_size):
            wrong.append(f"the run that was resumed from {remains.newest} has learnt something else")
        wrong += [f"{name} is left after the next run" for name in Remains.in_directory(directory).partial]
    except Exception:  # somebody hangs, a moment has not come, the next run fails, ...
        return [traceback.format_exc()]
    return [*wrong, ending.story()] if wrong else []


def _run_script(plan: Injection, directory: Path, begin: Path | None) -> Ending:
    arguments = (str(plan.seed), str(directory), *([] if begin is None else [str(begin)]))
    with start_script(SCRIPT, *arguments, time_limit=TIME_LIMIT) as script:
        status = script.wait().returncode
        script.expect_no_survivors(TIME_LIMIT)
        return Ending({0: status}, dict.fromkeys(range(plan.world_size), script.output))


def _run(plan: Injection, directory: Path, begin: Path | None, hosts: Network | None) -> Ending:
    """On ranks that are started by hand; on two hosts the culprit has one for itself."""
    places = None if hosts is None else [hosts[rank == plan.culprit] for rank in range(plan.world_size)]
    url = _meeting_place(plan, directory, "127.0.0.1" if places is None else places[0].address)
    arguments = (plan, directory, url, begin and str(begin))
    with RankProcesses(one_rank, plan.world_size, *arguments, time_limit=TIME_LIMIT, namespaces=places) as ranks:
        if plan.kind == "cut":
            assert hosts is not None
            ranks.wait_for("cut", plan.striker)
            hosts.cut()
            ranks.release(plan.striker)
        return _ending_of(_wait(plan, ranks))


def _meeting_place(plan: Injection, directory: Path, address: str) -> str:
    if plan.method == "file":
        return f"file://{directory}/store"
    return f"tcp://{address}:{free_port()}"


def _wait(plan: Injection, ranks: RankProcesses) -> list[Outcome]:
    if plan.kind == "stop":
        ranks.wait(*(rank for rank in range(plan.world_size) if rank != plan.culprit))
        ranks.kill(plan.culprit)
    return ranks.wait()


def _ending_of(outcomes: list[Outcome]) -> Ending:
    statuses = {outcome.rank: outcome.exit_code for outcome in outcomes}
    return Ending(statuses, {outcome.rank: outcome.story() for outcome in outcomes})


def one_rank(rank: int, world_size: int, plan: Injection, directory: Path, url: str, checkpoint: str | None) -> Weights:
    return train(
        Fault(plan, rank, directory),
        directory,
        world_size,
        checkpoint,
        init_method=url,
        rank=rank,
        world_size=world_size,
        **options_of(plan),
    )
