"""A training script, ``script.py STRATEGY [WHAT ...]``; each rank prints at its start
and in its third step.

It says that it begins before anything is imported. Rank 1 then ``stays`` there, or
``lingers`` after the training, or ``raises`` or ``dies`` there; ``endless`` has all
train for ever.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import sys
import threading


def started_as() -> int | None:
    """Return the rank of a process from its variables, before any import."""
    found = re.match(r"SpawnProcess-(?:.*:)?(\d+)$", multiprocessing.current_process().name)
    if found:
        return int(found[1]) - 1
    return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None


def print_line(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ in ("__main__", "__mp_main__") and (started := started_as()) is not None:
    print_line(f"rank {started} begins as process {os.getpid()}")
    if started == 1 and "stays" in sys.argv:
        threading.Event().wait()

import torch.distributed as dist  # noqa: E402

from tests.harness.training import Net  # noqa: E402
from tests.supervision import model  # noqa: E402


def announce_third_step() -> None:
    print_line(f"rank {dist.get_rank()} in step 3")


def main(strategy: str, *what: str) -> None:
    faults = [model.Fault("on_train_batch_start", announce_third_step, earlier=2)]
    max_epochs = -1 if "endless" in what else 1
    trainer = model.make_trainer(2, strategy, *faults, max_epochs=max_epochs, limit_val_batches=0)
    if {"raises", "dies"}.intersection(what):
        atexit.register(print, "exit handlers ran")  # buffered, and registered before ours
    trainer.fit(Net())
    if "lingers" in what and trainer.global_rank == 1:
        model.wait_for_another_ranks_end()
    if trainer.global_rank == 1:
        for each in {"raises", "dies"}.intersection(what):
            {"raises": model.boom, "dies": model.die}[each]()
    print_line(f"rank {trainer.global_rank} is at the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
