"""The environment variables of the ranks that this package starts.

The launcher passes its process id to each rank in a variable. A program that a rank
starts inherits the rank's variables, although it is not that rank. So the rank adds its
own process id to them, which the program then finds to be another one.
"""

from __future__ import annotations

import multiprocessing
import os

# The variable with the process id of the launcher, until the rank has read it.
LAUNCHER_PID = "DDPX_LAUNCHER_PID"
# The variable with the process id of the rank for which the others were set.
_RANK_PID = "DDPX_RANK_PID"
# The variables that a rank has from its launcher, except for RANK.
RANK_VARIABLES = (
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    _RANK_PID,
)
# The variable with the file of rank 0's address, if this package chose the file.
PRIVATE_FILE = "DDPX_PRIVATE_FILE"


def set_rank_variables(local_rank: str) -> None:
    """Set this process's local rank, and mark the rank's variables as its own."""
    os.environ["LOCAL_RANK"] = local_rank
    os.environ[_RANK_PID] = str(os.getpid())


def has_set_rank_variables() -> bool:
    """Whether the rank's variables are from :func:`set_rank_variables` in this process."""
    return os.environ.get(_RANK_PID) == str(os.getpid())


def drop_inherited_variables() -> None:
    """Remove a rank's variables in a program that it started.

    The program may start ranks itself. Do nothing in the rank and in its children of
    multiprocessing.
    """
    is_program = multiprocessing.parent_process() is None
    if is_program and _RANK_PID in os.environ and not has_set_rank_variables():
        for name in (PRIVATE_FILE, *RANK_VARIABLES):
            os.environ.pop(name, None)
