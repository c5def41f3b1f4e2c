"""`RankLogging` in training on two ranks: the console tells ranks apart, and each has a file of its own."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from tests.harness.outcomes import Outcome
from tests.harness.ranks import by_hand_env, launch_ranks
from tests.harness.scripts import run_script
from tests.harness.training import KINDS, Batch, Kind, Net, data, make_strategy, make_trainer, stock_group

log = logging.getLogger("tests.user")
PREFIX = r"\[rank {}/2 [^\] ]+\] "


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


def fit(strategy: Any, model: Net, callback: L.Callback, **options: Any) -> None:
    make_trainer(strategy, callbacks=[callback], max_epochs=1, limit_val_batches=0, **options).fit(model)


def talk_in_two_fits(rank: int, world_size: int, kind: Kind, directory: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(message)s", stream=sys.stderr)
    if kind == "stock":
        with stock_group(rank, world_size, directory):
            _talk_in_two_fits(kind, directory)
    else:
        _talk_in_two_fits(kind, directory)


def _talk_in_two_fits(kind: Kind, directory: Path) -> None:
    from lightning_ddp_ext import RankLogging

    callback = RankLogging(directory / "logs", console="rank_zero")
    for _ in range(2):
        fit(make_strategy(kind, directory), Talking(), callback)
        log.info("between")


@pytest.mark.parametrize("kind", KINDS)
def test_lines_of_two_fits(kind: Kind, tmp_path: Path) -> None:
    """Each line of a fit says its rank once, and is in that rank's file; rank 1's console has its warnings alone."""
    outcomes = launch_ranks(talk_in_two_fits, 2, kind, tmp_path, env=by_hand_env(2))
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    for rank, outcome in enumerate(outcomes):
        prefix = PREFIX.format(rank)
        console, file = outcome.output, (tmp_path / "logs" / f"rank-{rank}.log").read_text()

        def count(pattern: str, text: str) -> int:
            return len(re.findall(f"^{pattern}$", text, re.MULTILINE))

        assert count("INFO.between", console) == 2
        assert count(rf"WARNING.{prefix}careful", console) == 2
        assert count(rf"WARNING.{prefix}in a worker", console) == 4
        assert count(rf"INFO.{prefix}epoch 0", console) == count(rf".*{prefix}as Lightning does", console)
        assert count(rf"INFO.{prefix}epoch 0", console) == (0 if rank else 2)
        assert "between" not in file
        for line in ("INFO tests.user: epoch 0", "WARNING tests.user: careful"):
            assert count(rf"\d.* {line}", file) == 2
        assert count(r"\d.* INFO lightning.pytorch.user: as Lightning does", file) == 2
        assert count(r"\d.* WARNING tests.user: in a worker", file) == 4
        assert count(rf"\d.* rank {rank} of 2 on [^ ]+, process \d+", file) == 2


def fail_on_rank_1(rank: int, world_size: int, directory: Path) -> None:
    from lightning_ddp_ext import RankLogging

    fit(make_strategy("ours", directory), Failing(), RankLogging(directory / "logs"))


def test_the_file_ends_with_what_ended_the_rank(tmp_path: Path) -> None:
    """Its own traceback, or the error that names the rank that failed."""
    launch_ranks(fail_on_rank_1, 2, tmp_path, env=by_hand_env(2))
    first, second = ((tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2))
    assert 'raise ValueError("the reason")\n' in second
    assert second.endswith("ValueError: the reason\n")
    assert "RankFailedError: rank 1 " in first


def log_where_rank_1_cannot(rank: int, world_size: int, directory: Path) -> None:
    from lightning_ddp_ext import RankLogging

    if rank == 1:
        (directory / "1").write_text("a file")
    fit(make_strategy("ours", directory), Net(), RankLogging(directory / str(rank)))


def test_a_rank_that_cannot_write_its_file_ends_all(tmp_path: Path) -> None:
    """It says why, and the other one names it."""
    first, second = launch_ranks(log_where_rank_1_cannot, 2, tmp_path, env=by_hand_env(2))
    assert_error(second, "ConfigurationError", r"directory must be .* \(rank 1 on .*/1/rank-1.log': File exists\)")
    assert_error(first, "RankFailedError", "^rank 1 .*ConfigurationError: directory must be ")


def assert_error(outcome: Outcome, type_name: str, pattern: str) -> None:
    assert outcome.error is not None, outcome
    assert outcome.error.type_name == type_name
    assert re.search(pattern, outcome.error.message), outcome.error.message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("directory", "s3://bucket/logs", "directory must be on a file system of each rank's host (got 's3://"),
        ("console", "rank 0", "console must be one of all, rank_zero (got 'rank 0'); write console='rank_zero'"),
        ("level", "loud", "level and format must be what logging takes (got level='loud' and format="),
        ("level", 1.5, "level and format must be what logging takes (got level=1.5 and format="),
        ("format", "%(message", "level and format must be what logging takes (got level=0 and format='%(message': "),
        ("format", 7, "level and format must be what logging takes (got level=0 and format=7: "),
    ],
)
def test_arguments_that_make_no_sense_are_refused(name: str, value: Any, message: str) -> None:
    """When the callback is made: the message names the argument, the rule and the value."""
    from lightning_ddp_ext import ConfigurationError, RankLogging

    with pytest.raises(ConfigurationError) as refused:
        RankLogging(**{name: value})
    assert str(refused.value).startswith(message)


OTHER_TREE = """
    import logging
    import sys

    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel
    from lightning_ddp_ext import RankLogging, rank_logger

    logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(message)s")
    log = rank_logger("user", ranks=0)
    everywhere = rank_logger("user")

    class Model(BoringModel):
        def on_train_start(self):
            log.info("trains")
            everywhere.info("here")

    if __name__ == "__main__":
        log.info("starts")
        trainer = pl.Trainer(
            strategy=sys.argv[1], devices=2, accelerator="cpu", logger=False, max_steps=1, limit_val_batches=0,
            enable_checkpointing=False, enable_progress_bar=False, callbacks=[RankLogging(sys.argv[2])],
        )
        trainer.fit(Model())
"""


def test_a_script_that_starts_its_ranks_itself(tmp_path: Path) -> None:
    """With the other Lightning, and a stock strategy: what rank 0 says alone is there once, also before ranks meet."""
    done = run_script(OTHER_TREE, "ddp", str(tmp_path))
    assert done.returncode == 0, done.output
    assert done.stderr.count("INFO|starts\n") == 1
    assert re.findall(r"INFO\|\[rank (\d)/2 [^ ]+\] trains\n", done.stderr) == ["0"]
    assert sorted(re.findall(r"INFO\|\[rank (\d)/2 [^ ]+\] here\n", done.stderr)) == ["0", "1"]
    for rank in range(2):
        assert "INFO user: here\n" in (tmp_path / f"rank-{rank}.log").read_text()
