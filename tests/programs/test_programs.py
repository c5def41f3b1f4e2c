"""Programs that other people wrote train with ``ddp_ext`` as with ``ddp``, unchanged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.scripts import run_script

_HERE = Path(__file__).parent

CLI = [
    "fit",
    "--trainer.strategy={}",
    "--trainer.accelerator=cpu",
    "--trainer.devices=2",
    "--trainer.max_epochs=1",
    "--trainer.logger=false",
    "--trainer.callbacks=tests.programs.train.LightningNumbers",
    "--seed_everything=1",
]
# Each script, and its arguments with the strategy's name in the place of {}.
PROGRAMS = {
    "chemprop": ["train", "chemprop", "{}"],
    "scvi-tools": ["train", "scvi", "{}"],
    "darts": ["train", "darts", "{}"],
    "pytorch-forecasting": ["train", "pytorch_forecasting", "{}"],
    "neuralforecast": ["train", "neuralforecast", "{}"],
    "gluonts": ["train", "gluonts", "{}"],
    "LightningCLI": ["train_cli", *CLI],
    "Hydra": ["train_hydra", "strategy={}"],
    "Hydra's multirun": ["train_hydra", "--multirun", "strategy={}", "lr=0.1,0.01"],
    "Optuna": ["train", "optuna", "{}"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_are_those_of_ddp(program: str) -> None:
    """Each training of the program ends with the parameters, steps and metrics of stock."""
    script, *words = PROGRAMS[program]
    stock = numbers(script, [word.format("ddp") for word in words])
    ours = numbers(script, [word.format("ddp_ext") for word in words])
    assert stock, "the program did not train"
    assert ours == stock


def numbers(script: str, words: list[str]) -> list[dict[str, Any]]:
    """Return the outcome of each training of the script; fail unless all used two ranks
    and the script succeeds.
    """
    outcome = run_script(_HERE / f"{script}.py", *words)
    assert outcome.exit_code == 0, outcome.story()
    lines = re.findall(r"^numbers (.*)$", outcome.output, re.MULTILINE)
    trainings = [json.loads(line) for line in lines]
    assert all(training["ranks"] == 2 for training in trainings), trainings
    return trainings
