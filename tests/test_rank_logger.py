"""Loggers for some ranks only."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rank_logger import rank_logger
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "7",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}


# Each is the name of a line, and the ranks that log it.
LINES: dict[str, Any] = {
    "of all ranks": "all",
    "of rank 0": 0,
    "of ranks 0 and 3": [0, 3],
    "of an array of ranks 0 and 3": np.array([0, 3]),
}
OF_RANK_3 = {"of all ranks", "of ranks 0 and 3", "of an array of ranks 0 and 3"}


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        pytest.param({}, {*LINES}, id="no variables"),
        pytest.param(TORCHRUN, OF_RANK_3, id="rank 3 of torchrun"),
        pytest.param(
            {"LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2"},
            {"of all ranks"},
            id="rank 1 of a script",
        ),
        pytest.param(
            {"LOCAL_RANK": "0", "NODE_RANK": "1", "WORLD_SIZE": "4"},
            {"of all ranks"},
            id="first rank of a script's second node",
        ),
        pytest.param({"TORCHELASTIC_RUN_ID": "7"}, {"of all ranks"}, id="torchrun without ranks"),
    ],
)
def test_lines_appear_on_their_ranks(
    variables: dict[str, str],
    shown: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The launcher's variables give the rank; without any, the process is rank 0."""
    for name in (*TORCHRUN, "NODE_RANK", "GROUP_RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for line, ranks in LINES.items():
        rank_logger("tests.some", ranks=ranks).warning(line)
    assert set(caplog.messages) == shown


def test_a_line_is_as_if_the_logger_had_been_called(caplog: pytest.LogCaptureFixture) -> None:
    """Function, file, `stacklevel` and `extra` are the caller's."""

    def helper() -> None:
        rank_logger("tests.some").warning("of the caller", stacklevel=2)

    rank_logger("tests.some", ranks=0).error("%s", "text", extra={"mine": 1})
    helper()
    assert caplog.record_tuples == [
        ("tests.some", logging.ERROR, "text"),
        ("tests.some", logging.WARNING, "of the caller"),
    ]
    assert caplog.records[0].mine == 1
    name = test_a_line_is_as_if_the_logger_had_been_called.__name__
    places = [(record.pathname, record.funcName) for record in caplog.records]
    assert places == [(__file__, name)] * 2


@pytest.mark.parametrize(
    ("ranks", "refused_rank"), [("0", "0"), ([0, -1], -1), (True, True), (1.5, 1.5), (None, None)]
)
def test_other_ranks_are_refused(ranks: Any, refused_rank: Any) -> None:
    """The message names the argument, the allowed values and the value received."""
    with pytest.raises(ConfigurationError) as refused:
        rank_logger("tests.some", ranks=ranks)
    assert (
        str(refused.value)
        == f"a rank in ranks must be an integer of at least 0 (got {refused_rank!r}); pass 'all',"
        " a rank, or several ranks, counted from 0"
    )


def enabled_in_a_group(rank: int, world_size: int, directory: Path) -> list[bool]:
    """Return whether a logger of rank 1 logs before, within and after a process group,
    which counts the ranks in the opposite order.
    """
    logger = rank_logger("tests.some", ranks=1)
    enabled = [logger.isEnabledFor(logging.WARNING)]
    with stock_group(1 - rank, world_size, directory):
        enabled.append(logger.isEnabledFor(logging.WARNING))
        dist.barrier()  # the other rank may still be connecting to this one
    return [*enabled, logger.isEnabledFor(logging.WARNING)]


def test_a_process_group_overrides_variables(tmp_path: Path) -> None:
    """A logger takes its rank from a process group while there is one.

    Before and afterwards it takes it from the variables, also if it was made before the
    group.
    """
    first, second = run_ranks(enabled_in_a_group, 2, tmp_path)
    assert first == [False, True, False]
    assert second == [True, False, True]
