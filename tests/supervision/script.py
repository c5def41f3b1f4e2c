"""A training script in which something goes wrong; each rank says when it begins and when it is in its third step.

It says that it begins before anything is imported, and can be told to stay there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence


def started_as() -> int | None:
    """The rank of a process that was started as one, where that can be told before anything is imported."""
    if multiprocessing.current_process().name.startswith("SpawnProcess-"):
        return int(multiprocessing.current_process().name.partition("-")[2]) - 1
    return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ in ("__main__", "__mp_main__") and (started := started_as()) is not None:
    say(f"harness: rank {started} is process {os.getpid()}\nrank {started} begins")
    if f"--stay={started}" in sys.argv:
        threading.Event().wait()

import argparse  # noqa: E402

import torch.distributed as dist  # noqa: E402

from tests.supervision import model  # noqa: E402


def say_who() -> None:
    """For the harness, which cannot tell apart the ranks of all launchers."""
    say(f"harness: rank {dist.get_rank()} is process {os.getpid()}")


def say_in_third_step() -> None:
    say(f"rank {dist.get_rank()} in step 3")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp_ext")
    parser.add_argument("--fault", action="append", default=[], help="place:action:rank")
    parser.add_argument("--endless", action="store_true", help="train until something happens")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--stay", type=int, help="the rank that gets no further than its beginning")
    options = parser.parse_args(argv)
    chosen = [text.split(":") for text in options.fault]
    faults = [model.Fault(place, getattr(model, action), (int(rank),)) for place, action, rank in chosen]
    faults += [model.Fault("setup", say_who), model.Fault("third_step", say_in_third_step)]
    max_epochs = -1 if options.endless else 1
    trainer = model.make_trainer(2, strategy=options.strategy, max_epochs=max_epochs, limit_val_batches=0)
    trainer.fit(model.Model(faults, num_workers=options.num_workers))
    for fault in faults:
        fault.strike("after fit", trainer.global_rank)
    say(f"rank {trainer.global_rank} is at the end")


if __name__ == "__main__":
    main(sys.argv[1:])
