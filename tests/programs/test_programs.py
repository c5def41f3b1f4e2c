"""Programs of other people train with ``ddp_ext`` as with ``ddp``, unchanged."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.harness.scripts import run_script

_HERE = Path(__file__).parent

# Each script, and its arguments with {} in the place of the strategy's name.
PROGRAMS = {
    "chemprop": ["train", "chemprop", "{}"],
    "scvi-tools": ["train", "scvi", "{}"],
    "darts": ["train", "darts", "{}"],
    "pytorch-forecasting": ["train", "pytorch_forecasting", "{}"],
    "neuralforecast": ["train", "neuralforecast", "{}"],
    "gluonts": ["train", "gluonts", "{}"],
    "LightningCLI": ["train", "lightning_cli", "{}"],
    "Hydra": ["train_hydra", "strategy={}"],
    "Hydra's multirun": ["train_hydra", "--multirun", "strategy={}", "lr=0.1,0.01"],
    "Optuna": ["train", "optuna", "{}"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_the_numbers_of_ddp(program: str) -> None:
    """Each training of the program ends with stock's parameters, steps and metrics."""
    script, *words = PROGRAMS[program]
    stock = numbers(script, [word.format("ddp") for word in words])
    ours = numbers(script, [word.format("ddp_ext") for word in words])
    assert stock, "the program did not train"
    assert ours == stock


def numbers(script: str, words: list[str]) -> list[dict[str, Any]]:
    """Return the numbers of each training of the script; fail unless the script succeeds
    and all trainings use two ranks.
    """
    outcome = run_script(_HERE / f"{script}.py", *words)
    assert outcome.exit_code == 0, outcome.story()
    lines = re.findall(r"^numbers (.*)$", outcome.output, re.MULTILINE)
    trainings = [json.loads(line) for line in lines]
    assert all(training["ranks"] == 2 for training in trainings), trainings
    return trainings
