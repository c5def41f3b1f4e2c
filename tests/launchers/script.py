"""The script that the tests of launchers start: train once for each init method.

Its only argument has the options of ``main`` as JSON. It prints reports as lines of
JSON: "trained" on each rank at the end of training, and "returned" in each process after
the calls of the Trainer.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.rendezvous.process_context import leave
from tests.harness.scripts import print_line
from tests.harness.training import At, Net, fingerprint, make_trainer


def main(
    urls: Sequence[str | None],
    calls: Sequence[str] = ("fit",),
    death: dict[str, int] | None = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train once for each URL; the ranks disconnect before each training.

    Args:
        urls: the init methods; ``None`` for no choice.
        calls: the methods of each Trainer that are called; the first one is ``fit``.
        death: the "rank" that is killed in the second step, the number of torchrun's
            "restart", and the index of the "run" among the trainings; by default none.
        strategy: further options of the strategy.
        options: the Trainer's options.
    """
    for run, url in enumerate(urls):
        leave()
        kill = At("on_train_batch_start", partial(die, death, run), earlier=1)
        tell = At("on_train_end", partial(report_rank, run))
        chosen = {**(strategy or {}), **({} if url is None else {"init_method": url})}
        ours = DDPExtStrategy(**chosen) if chosen else "ddp_ext"
        weights, results = learn(ours, calls, callbacks=[kill, tell], **options)
        report("returned", run=run, weights=weights, results=results)


def learn(strategy: Any, calls: Sequence[str], **options: Any) -> tuple[str, list[Any]]:
    """Call a Trainer's methods, of which the first is ``fit``.

    Return the fingerprint of the weights, and the results of the methods after ``fit``.
    """
    L.seed_everything(5)
    model = Net()
    trainer = make_trainer(strategy, **options)
    _, *results = [getattr(trainer, name)(model) for name in calls]
    return fingerprint(model), results


def die(death: dict[str, int] | None, run: int, trainer: L.Trainer) -> None:
    """Kill this process if ``death`` names its rank, restart and run."""
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if death == {"rank": trainer.global_rank, "restart": restart, "run": run}:
        os.kill(os.getpid(), signal.SIGKILL)


def report_rank(run: int, trainer: L.Trainer) -> None:
    """Report this rank's place and weights."""
    place = trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.node_rank
    report("trained", run=run, place=place, weights=fingerprint(trainer.lightning_module))


def report(what: str, **facts: Any) -> None:
    print_line(json.dumps({"what": what, **facts}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
