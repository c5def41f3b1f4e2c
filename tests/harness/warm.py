"""Run a script on rank processes that have imported torch and Lightning already: a fifth of what ``run_script`` takes.

The script runs as under a launcher that sets ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``, or on one process from where
it forks its ranks. How a script starts its ranks, and how its processes end, is tested with ``scripts``.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.harness.outcomes import output_of_all
from tests.harness.ranks import by_hand_env, free_port, launch_ranks


def run_on_ranks(
    script: Path, *argv: str, cwd: Path, world_size: int = 2, returncode: int = 0, time_limit: float = 60.0
) -> str:
    """Run a script on each rank to its end, and return what all of them have printed, rank by rank.

    Args:
        script: its path.
        argv: its arguments.
        cwd: its working directory.
        world_size: number of ranks; 1 for scripts that start theirs by functions.
        returncode: how each rank must end.
        time_limit: seconds.
    """
    env = by_hand_env(world_size, free_port()) if world_size > 1 else {}
    outcomes = launch_ranks(_be_the_script, world_size, script, argv, cwd, env=env, time_limit=time_limit)
    return output_of_all(outcomes, exit_code=returncode)


def _be_the_script(rank: int, world_size: int, script: Path, argv: tuple[str, ...], cwd: Path) -> None:
    os.chdir(cwd)
    sys.argv = [str(script), *argv]
    runpy.run_path(str(script), run_name="__main__")
