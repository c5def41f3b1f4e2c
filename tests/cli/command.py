"""Runs the command in this process, and makes the files that it is to look at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from lightning_ddp_ext.cli.app import app


@dataclass(frozen=True)
class Ended:
    """How the command ended, and what it wrote."""

    status: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        """What ``--json`` prints: one document, on one line, and nothing else."""
        assert self.stderr == ""
        assert self.stdout.count("\n") == 1
        return json.loads(self.stdout)

    def row(self, key: str) -> list[str]:
        """The cells of the one row of a table that begins with ``key``."""
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in self.stdout.splitlines()]
        [found] = [row for row in rows if row[:1] == [key]]
        return found


def checkpoint(command: str, *arguments: str | Path) -> Ended:
    """``lightning-ddp-ext checkpoint command arguments``; an exception fails the test instead of being printed."""
    result = CliRunner().invoke(app, ["checkpoint", command, *map(str, arguments)], catch_exceptions=False)
    return Ended(result.exit_code, result.stdout, result.stderr)


def save(path: Path, **entries: Any) -> Path:
    """A checkpoint such as Lightning's: 3 epochs, 120 steps, a linear layer with its optimiser, and ``entries``."""
    content = {
        "pytorch-lightning_version": "2.6.6",
        "epoch": 3,
        "global_step": 120,
        "state_dict": {"out.weight": torch.arange(6000.0).reshape(60, 100), "out.bias": torch.zeros(60)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(60, 100), "step": torch.tensor(120.0)}}}],
    }
    torch.save({**content, **entries}, path)
    return path
