"""The training script that every launcher of these tests starts: a few steps of a small
model for each init method.

Its only argument has the options of ``main`` as JSON. Each rank prints a line at the
end of training: who it was, its weights, the files of the init methods, and whether its
environment names the host of rank 0. Each process that returns from the Trainer prints
the weights that it has then, and what the Trainer has returned.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.rendezvous.process_context import leave
from tests.harness.scripts import print_line
from tests.harness.training import At, Net, make_trainer


def main(
    urls: Sequence[str | None],
    calls: Sequence[str] = ("fit",),
    death: Sequence[int] = (),
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train once for each URL; before each training the ranks leave each other.

    Args:
        urls: init methods; None for none.
        calls: methods of each Trainer.
        death: a rank, and the restart and training in which its process is killed in
            the second step.
        strategy: further options of the strategy.
        options: of the Trainer.
    """
    for run, url in enumerate(urls):
        leave()
        kill = At("on_train_batch_start", partial(die, death, run), earlier=1)
        tell = At("on_train_end", partial(report_rank, run, url))
        chosen = {**(strategy or {}), **({} if url is None else {"init_method": url})}
        ours = DDPExtStrategy(**chosen) if chosen else "ddp_ext"
        weights, returned = learn(ours, calls, callbacks=[kill, tell], **options)
        report("returned", run=run, weights=weights, results=returned[1:])


def learn(strategy: Any, calls: Sequence[str], **options: Any) -> tuple[str, list[Any]]:
    """Call a Trainer's methods one after another; fingerprint of the weights, and what
    the methods returned.
    """
    L.seed_everything(5)
    model = Net()
    trainer = make_trainer(strategy, **options)
    returned = [getattr(trainer, name)(model) for name in calls]
    return fingerprint(model), returned


def die(death: Sequence[int], run: int, trainer: L.Trainer) -> None:
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if [trainer.global_rank, restart, run] == list(death):
        os.kill(os.getpid(), signal.SIGKILL)


def report_rank(run: int, url: str | None, trainer: L.Trainer) -> None:
    place = [trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.node_rank]
    scheme, _, path = (url or "").partition("://")
    files = os.listdir(os.path.dirname(path)) if scheme == "file" else []
    report(
        "trained",
        run=run,
        place=place,
        pid=os.getpid(),
        weights=fingerprint(trainer.lightning_module),
        files=files,
        has_address="MASTER_ADDR" in os.environ,
    )


def fingerprint(module: nn.Module) -> str:
    """Return a text that is equal for weights that are equal to the last bit."""
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def report(what: str, **facts: Any) -> None:
    print_line(json.dumps({"what": what, **facts}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
