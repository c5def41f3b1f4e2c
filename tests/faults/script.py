"""The same run as a script that starts its other ranks by itself: ``script.py SEED DIRECTORY [CHECKPOINT]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.faults.plan import draw
from tests.faults.training import Fault, options_of, train


def main(seed: str, place: str, checkpoint: str | None = None) -> None:
    plan, directory = draw(int(seed)), Path(place)
    fault = Fault(plan, int(os.environ.get("LOCAL_RANK", 0)), directory)
    url = f"file://{directory}/store" if plan.method == "file" else None
    train(fault, directory, plan.world_size, checkpoint, init_method=url, **options_of(plan))


if __name__ == "__main__":
    main(*sys.argv[1:])
