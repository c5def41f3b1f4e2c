"""A training script, ``script.py STRATEGY [END]``, which prints that it begins before
anything is imported.

Rank 1 then ``stays`` there; or, after the training, it ``lingers``, ``raises`` or
``dies``.
"""

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

from tests.harness.training import Net  # noqa: E402
from tests.supervision import model  # noqa: E402

AFTER_FIT = {
    "lingers": model.wait_for_another_ranks_end,
    "raises": model.boom,
    "dies": model.die,
}


def main(strategy: str, end: str = "") -> None:
    trainer = model.make_trainer(2, strategy, limit_val_batches=0)
    if end in AFTER_FIT:
        atexit.register(print, "exit handlers ran")  # buffered, and registered before ours
    trainer.fit(Net())
    if trainer.global_rank == 1 and end in AFTER_FIT:
        AFTER_FIT[end]()
    print_line(f"rank {trainer.global_rank} is at the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
