"""What a run has left on the disk: whole checkpoints, and none lost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_ddp_ext.checkpoint.atomic_file import find_leftovers
from lightning_ddp_ext.checkpoint.zip_crc import find_damage, open_archive
from lightning_ddp_ext.errors import DamagedCheckpointError
from tests.faults.plan import Injection
from tests.faults.training import JOURNAL


@dataclass(frozen=True)
class Remains:
    """Files of a run.

    Attributes:
        steps: of each checkpoint that is whole.
        damaged: the other checkpoints.
        partial: what is left of saves that were cut short.
        journal: what the ranks have written down.
    """

    steps: dict[Path, int]
    damaged: list[str]
    partial: list[str]
    journal: list[str]

    @classmethod
    def in_directory(cls, directory: Path) -> Remains:
        files = sorted(directory.glob("*.ckpt"))
        whole = [path for path in files if _is_whole(path)]
        return cls(
            {path: int(torch.load(path, weights_only=False)["global_step"]) for path in whole},
            [path.name for path in files if path not in whole],
            [leftover.path.name for leftover in find_leftovers(directory)],
            (directory / JOURNAL).read_text().splitlines(),
        )

    @property
    def newest(self) -> Path | None:
        """The checkpoint to go on from."""
        return max(self.steps, key=lambda path: self.steps[path], default=None)

    @property
    def last_saved(self) -> int:
        """The step after which the last save has returned."""
        return max((int(line.split()[1]) for line in self.journal if line.startswith("saved ")), default=0)

    def wrong_with(self, plan: Injection) -> list[str]:
        """What should be otherwise."""
        wrong = [f"{name} is damaged" for name in self.damaged]
        if "struck" not in self.journal:
            wrong.append("the moment has not come")
        if len(self.partial) > 1:
            wrong.append(f"more than one rest of a save: {self.partial}")
        if max(self.steps.values(), default=0) < self.last_saved:
            wrong.append(f"step {self.last_saved} had been saved, and is lost")
        if plan.stops_together and self.is_preempted != plan.saves_when_it_stops:
            wrong.append("no checkpoint of the stop" if plan.saves_when_it_stops else "a checkpoint without a step")
        return wrong

    @property
    def is_preempted(self) -> bool:
        """Whether the ranks have saved when they were asked to stop."""
        return any(path.name == "preempted.ckpt" for path in self.steps)


def _is_whole(path: Path) -> bool:
    try:
        archive = open_archive(path)
    except DamagedCheckpointError:
        return False
    return archive.records is not None and not find_damage(archive, archive.records)
