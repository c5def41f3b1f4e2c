"""Programs of other people train with ``ddp_ext`` as with ``ddp``, unchanged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.scripts import run_script

TRAIN = Path(__file__).with_name("train.py")
# A Hydra application, which may run several jobs, one after another.
HYDRA_APP = """
import hydra
import torch
from hydra.core.config_store import ConfigStore
from lightning import pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ddp_ext
from tests.programs.train import ON_TWO_RANKS, LightningNumbers

ConfigStore.instance().store("app", {"strategy": "ddp", "lr": 0.1})


class Model(BoringModel):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


@hydra.main(version_base=None, config_name="app")
def main(config):
    pl.seed_everything(1)
    trainer = pl.Trainer(
        strategy=config.strategy,
        max_epochs=1,
        limit_train_batches=8,
        logger=False,
        callbacks=[LightningNumbers()],
        **ON_TWO_RANKS,
    )
    trainer.fit(Model(config.lr))


if __name__ == "__main__":
    main()
"""


# A script, by its path or its text, and its arguments, with {} in the place of the
# strategy's name.
PROGRAMS = {
    "chemprop": (TRAIN, ["chemprop", "{}"]),
    "scvi-tools": (TRAIN, ["scvi", "{}"]),
    "darts": (TRAIN, ["darts", "{}"]),
    "LightningCLI": (TRAIN, ["lightning_cli", "{}"]),
    "Hydra": (HYDRA_APP, ["strategy={}"]),
    "Hydra's multirun": (HYDRA_APP, ["--multirun", "strategy={}", "lr=0.1,0.01"]),
    "Optuna": (TRAIN, ["optuna", "{}"]),
}


@pytest.mark.parametrize(("script", "arguments"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_has_the_numbers_of_ddp(script: Path | str, arguments: list[str]) -> None:
    """Each training of the program ends with stock's parameters, steps and metrics."""
    stock = numbers(script, arguments, "ddp")
    ours = numbers(script, arguments, "ddp_ext")
    assert stock, "the program did not train"
    assert ours == stock


def numbers(script: Path | str, arguments: list[str], strategy: str) -> list[dict[str, Any]]:
    """Return the numbers of each training of the program; fail unless it succeeds and
    all trainings use two ranks.
    """
    output = run_script(script, *(argument.format(strategy) for argument in arguments))
    lines = re.findall(r"^numbers (.*)$", output, re.MULTILINE)
    trainings = [json.loads(line) for line in lines]
    assert all(training["ranks"] == 2 for training in trainings), trainings
    return trainings
