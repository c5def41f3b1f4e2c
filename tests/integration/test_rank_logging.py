"""`RankLogging` in training on two ranks: the console tells ranks apart, and each has a file of its own."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.data import DataLoader

from lightning_ddp_ext import RankLogging
from tests.harness.outcomes import Outcome
from tests.harness.ranks import by_hand_env, launch_ranks
from tests.harness.training import Batch, Net, data, make_strategy, make_trainer

log = logging.getLogger("tests.user")


class Talking(Net):
    """Says something wherever a user may."""

    def on_train_epoch_start(self) -> None:
        log.info("epoch %d", self.current_epoch)
        log.warning("careful")
        logging.getLogger("lightning.pytorch.user").info("as Lightning does")

    def train_dataloader(self) -> DataLoader[Any]:
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
        return DataLoader(data(), batch_size=6, collate_fn=talk, **workers)


def talk(samples: Any) -> Any:
    log.warning("in a worker")
    return DataLoader(data(), batch_size=6).collate_fn(samples)


class Failing(Net):
    """Fails on rank 1, in its second step."""

    def training_step(self, batch: Batch, index: int) -> Any:
        if self.global_rank == 1 and index == 1:
            raise ValueError("the reason")
        return super().training_step(batch, index)


def fit(directory: Path, model: Net, callback: L.Callback, strategy: Any = None) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    make_trainer(strategy or make_strategy("ours", directory), callbacks=[callback], **options).fit(model)


def talk_in_two_fits(rank: int, world_size: int, directory: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(message)s", stream=sys.stderr)
    callback = RankLogging(directory / "logs", console="rank_zero")
    for strategy in (None, "ddp"):
        fit(directory, Talking(), callback, strategy)
        log.info("between")


def test_lines_of_two_fits(tmp_path: Path) -> None:
    """Each line of a fit says its rank once, and is in that rank's file; rank 1's console has its warnings alone.

    With our strategy and with stock's.
    """
    outcomes = launch_ranks(talk_in_two_fits, 2, tmp_path, env=by_hand_env(2))
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    for rank, outcome in enumerate(outcomes):
        file = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        prefix = rf"\[rank {rank}/2 [^\] ]+\] "
        on_console = {
            "INFO.between": 2,
            f"WARNING.{prefix}careful": 2,
            f"WARNING.{prefix}in a worker": 4,
            f"INFO.{prefix}epoch 0": 0 if rank else 2,
            f".*{prefix}as Lightning does": 0 if rank else 2,
        }
        in_file = {
            ".*between": 0,
            r"\d.* INFO tests.user: epoch 0": 2,
            r"\d.* WARNING tests.user: careful": 2,
            r"\d.* INFO lightning.pytorch.user: as Lightning does": 2,
            r"\d.* WARNING tests.user: in a worker": 4,
            rf"\d.* rank {rank} of 2 on [^ ]+, process \d+": 2,
        }
        assert {each: count(each, outcome.output) for each in on_console} == on_console
        assert {each: count(each, file) for each in in_file} == in_file


def count(pattern: str, text: str) -> int:
    return len(re.findall(f"^{pattern}$", text, re.MULTILINE))


def fail_on_rank_1(rank: int, world_size: int, directory: Path) -> None:
    fit(directory, Failing(), RankLogging(directory / "logs"))


def test_the_file_ends_with_what_ended_the_rank(tmp_path: Path) -> None:
    """Its own traceback, or the error that names the rank that failed."""
    launch_ranks(fail_on_rank_1, 2, tmp_path, env=by_hand_env(2))
    first, second = ((tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2))
    assert 'raise ValueError("the reason")\n' in second
    assert second.endswith("ValueError: the reason\n")
    assert "RankFailedError: rank 1 " in first


def log_where_rank_1_cannot(rank: int, world_size: int, directory: Path) -> None:
    if rank == 1:
        (directory / "1").write_text("a file")
    fit(directory, Net(), RankLogging(directory / str(rank)))


def test_a_rank_that_cannot_write_its_file_ends_all(tmp_path: Path) -> None:
    """It says why, and the other one names it."""
    first, second = launch_ranks(log_where_rank_1_cannot, 2, tmp_path, env=by_hand_env(2))
    reason = r"ConfigurationError: directory must be .* \(rank 1 on .*/1/rank-1.log': File exists\); name another one"
    assert re.search(f"^{reason}", said(second))
    assert re.search(f"^RankFailedError: rank 1 .*{reason}", said(first))


def said(outcome: Outcome) -> str:
    assert outcome.error is not None, outcome
    return f"{outcome.error.type_name}: {outcome.error.message}"
