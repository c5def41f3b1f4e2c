"""The script that `launching.py` starts: a few training steps with any strategy.

python benchmarks/worker.py STRATEGY WORLD_SIZE [endless]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from torch import Tensor
from training import Net, make_trainer


class Noted(Net):
    """Records when its first step begins, and in which process."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 0:
            path = Path(os.environ["FIRST_STEP_DIRECTORY"], str(self.global_rank))
            path.with_suffix(".part").write_text(f"{time.monotonic()} {os.getpid()}")
            path.with_suffix(".part").rename(path.with_suffix(".step"))
        return super().training_step(batch, index)


if __name__ == "__main__":
    strategy = sys.argv[1]
    world_size = int(sys.argv[2])
    if strategy.startswith("ddp_ext"):
        import lightning_ddp_ext  # noqa: F401
    make_trainer(strategy, world_size, max_steps=-1 if "endless" in sys.argv else 4).fit(Noted())
