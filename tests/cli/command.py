"""Runs the command in this process, and makes the files that it looks at."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext.cli import main


@dataclass(frozen=True)
class Ended:
    """How the command ended, and what it wrote."""

    status: Any
    stdout: str
    stderr: str


def run(*arguments: str | Path) -> Ended:
    """`lightning-ddp-ext arguments`."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return Ended(ended.value.code, stdout.getvalue(), stderr.getvalue())


def save(path: Path, **entries: Any) -> Path:
    """Save a checkpoint like Lightning's: 3 epochs, 120 steps, a linear layer with its optimiser, and ``entries``."""
    content = {
        "pytorch-lightning_version": "2.6.6",
        "epoch": 3,
        "global_step": 120,
        "state_dict": {"out.weight": torch.arange(6000.0).reshape(60, 100), "out.bias": torch.zeros(60)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(60, 100), "step": torch.tensor(120.0)}}}],
    }
    torch.save({**content, **entries}, path)
    return path
