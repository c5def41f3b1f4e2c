"""x"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import torch
from measuring import Figures, on_ranks, ratio, spread, take_turns
from torch import nn
from training import Net, make_trainer

from lightning_ddp_ext import DDPExtStrategy


class Noisy(Net):
    def __init__(self, norm, noise):
        super().__init__()
        self.noise = noise
        if norm:
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)))

    def training_step(self, batch, index):
        if self.noise:
            batch = batch + torch.from_numpy(np.random.randn(64).astype(np.float32))
        return super().training_step(batch, index)


def step(name, norm, noise, ranks, steps) -> Figures:
    def work(rank: int, directory: Path) -> Figures:
        model = Noisy(norm, noise)
        make_trainer(DDPExtStrategy(rescue_checkpoint=name), ranks, max_steps=steps + 20).fit(model)
        return model.milliseconds_a_step(steps)

    return on_ranks(work, ranks)[0]


if __name__ == "__main__":
    for ranks in (2,):
        for norm, noise in ((0, 0), (1, 0), (0, 1), (1, 1)):
            r = take_turns(
                {
                    "on": partial(step, "rescue.ckpt", norm, noise, ranks, 400),
                    "off": partial(step, None, norm, noise, ranks, 400),
                },
                7,
            )
            print(
                ranks,
                norm,
                noise,
                "clock",
                spread(r["off"]["clock"]),
                ratio(r["on"]["clock"], r["off"]["clock"]),
                "cpu",
                ratio(r["on"]["processor"], r["off"]["processor"]),
                flush=True,
            )
