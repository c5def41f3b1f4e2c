"""A training script in which something goes wrong; each rank says when it is in its third step.

Before anything is imported, the ranks that the script's launcher has started say that they are there; one of them can
be told to stay there, and all can be told to go on to training only when their launcher is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import sys
import threading
from collections.abc import Sequence


def started_as() -> int | None:
    """The rank of a process that was started as one, where that can be told before anything is imported."""
    if multiprocessing.current_process().name.startswith("SpawnProcess-"):
        return int(multiprocessing.current_process().name.partition("-")[2]) - 1
    return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None


def begin(options: Sequence[str]) -> None:
    rank = started_as()
    if rank is not None:
        sys.stdout.write(f"harness: rank {rank} is process {os.getpid()}\nrank {rank} begins\n")
        sys.stdout.flush()
    if f"--stay={rank}" in options:
        threading.Event().wait()


if __name__ in ("__main__", "__mp_main__"):
    begin(sys.argv)

import argparse  # noqa: E402

from tests.supervision import model  # noqa: E402


def main(argv: Sequence[str]) -> None:
    options = parse(argv)
    faults = [read_fault(text) for text in options.fault]
    faults += [model.Fault("setup", model.say_who), model.Fault("third_step", model.say_in_third_step)]
    if options.when_orphaned and started_as() is not None:
        wait_until_orphaned()
    trainer = model.make_trainer(
        options.devices,
        strategy=options.strategy,
        max_epochs=-1 if options.endless else 1,
        limit_val_batches=0,
    )
    trainer.fit(model.Model(faults, num_workers=options.num_workers))
    for fault in faults:
        fault.strike("after fit", trainer.global_rank)
    model.say(f"rank {trainer.global_rank} is at the end")


def read_fault(text: str) -> model.Fault:
    place, action, *ranks = text.split(":")
    return model.Fault(place, getattr(model, action), tuple(map(int, ranks)))


def wait_until_orphaned() -> None:
    parent = select.poll()
    parent.register(os.pidfd_open(os.getppid()), select.POLLIN)
    model.say(f"rank {started_as()} waits for the end of its launcher")
    parent.poll()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp_ext")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--fault", action="append", default=[], help="place:action:rank:rank...")
    parser.add_argument("--endless", action="store_true", help="train until something happens")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--stay", type=int, help="the rank that gets no further than its beginning")
    parser.add_argument("--when-orphaned", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
