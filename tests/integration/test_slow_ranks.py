"""`SlowRanks` names the rank that the others wait for, and what it is slow at, under our
strategy and under stock ``ddp``.
"""

import gc
import logging
import re
import time
import weakref
from contextlib import suppress
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_ddp_ext import ConfigurationError, SlowRanks
from lightning_ddp_ext.integration.callbacks.slow_ranks import in_words, slow_parts
from tests.harness import training

SECONDS = 0.08  # that a slow rank takes longer, far more than a step of the model
EVERY = 10  # batches between comparisons
# Rank 1 is slow at each part for this many batches, and then as fast as rank 0.
BATCHES = 40
PARTS = ("data", "forward", "backward")


class SlowNet(training.Net):
    """A model with buffers, of which one rank is slow at one part after another."""

    def __init__(self, *, slow_rank: int = 1, is_manual: bool = False, logs: bool = False) -> None:
        super().__init__()
        self.slow_rank = slow_rank
        self.automatic_optimization = not is_manual
        self.logs = logs
        self.batches = 0

    def be_slow_at(self, part: str) -> None:
        if self.global_rank == self.slow_rank and PARTS.index(part) == self.batches // BATCHES:
            time.sleep(SECONDS)

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        self.be_slow_at("forward")
        loss = self.loss(batch)
        loss.register_hook(lambda gradient: self.be_slow_at("backward"))
        if self.logs:
            self.log("loss", loss, sync_dist=True)
        if not self.automatic_optimization:
            self.zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.batches += 1

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(training.data(800), batch_size=2, collate_fn=self.collate)

    def collate(self, rows: list[Any]) -> Any:
        self.be_slow_at("data")
        return default_collate(rows)


def measure(
    kind: training.Kind, directory: Path, net: dict[str, Any], options: dict[str, Any]
) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Return the lines that a rank logs about slow ranks, its report, and the names of the
    figures that its logger has.
    """
    handler = BufferingHandler(capacity=1000)
    logging.getLogger("lightning_ddp_ext").addHandler(handler)
    callback = SlowRanks(every_n_steps=EVERY, ratio=3)  # tests may disturb each other
    logger = CSVLogger(directory)
    defaults = {"max_epochs": 1, "limit_val_batches": 0, "logger": logger}
    trainer = training.fit(kind, directory, SlowNet(**net), callback, **{**defaults, **options})
    lines = [line for record in handler.buffer if "slow" in (line := record.getMessage())]
    names = logger.experiment.metrics_keys if trainer.is_global_zero else []
    figures = sorted(name for name in names if name.startswith("slow_ranks/"))
    return lines, callback.report, figures


@pytest.mark.parametrize(
    ("kind", "net", "options"),
    [
        ("ours", {"slow_rank": 1, "logs": True}, {"accumulate_grad_batches": 2}),
        ("ours", {"slow_rank": 0, "logs": True}, {}),
        ("ours", {"slow_rank": 1, "is_manual": True}, {}),
        (
            "ours",
            {"slow_rank": 1, "logs": True},
            {"val_check_interval": 5, "limit_val_batches": 1},
        ),
        ("stock", {"slow_rank": 0}, {}),
    ],
    ids=["accumulation", "rank 0", "manual optimisation", "validation", "stock"],
)
def test_a_slow_rank_is_named_once_for_each_part(
    kind: training.Kind, net: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Rank 0 logs a line when the part changes, and one when the rank is as fast again.

    Its loggers get the times: of each part the longest, its rank, and the median.
    """
    slow_rank = net["slow_rank"]
    (lines, report, figures), on_rank_1 = training.on_ranks(kind, measure, tmp_path, net, options)
    *named, over = lines
    assert len(named) == len(PARTS), named
    for line, part in zip(named, PARTS, strict=True):
        assert re.fullmatch(
            rf"rank {slow_rank} \(host \S+, cpu\) is slow: \S+ ms a step for {part}, median \S+ ms;"
            r" every step waits \S+ ms for it",
            line,
        )
    assert re.fullmatch(
        rf"rank {slow_rank} is no longer slow; it was slow in \d+ of \d+ comparisons", over
    )
    assert on_rank_1 == ([], report, [])
    assert [row["rank"] for row in report] == [0, 1]
    assert figures == [
        f"slow_ranks/{part}_{figure}"
        for part in ("backward", "data", "forward", "waiting")
        for figure in ("ms_max", "ms_median", "rank")
    ]


def test_stock_logging_hides_a_slow_forward_pass(tmp_path: Path) -> None:
    """All ranks wait in ``training_step``, for each logged value; the other parts are named."""
    (lines, _, _), _ = training.on_ranks(
        "stock", measure, tmp_path, {"slow_rank": 1, "logs": True}, {}
    )
    assert [re.findall("ms a step for (.*?),", line) for line in lines] == [
        ["data"],
        [],
        ["backward"],
        [],
    ]


def fit_twice(kind: training.Kind, directory: Path) -> list[dict[str, Any]]:
    """Train without a comparison, and then up to one without a step whose times are known."""
    callback = SlowRanks(every_n_steps=EVERY)
    for accumulated, batches in ((1, EVERY - 1), (2 * EVERY, EVERY)):
        training.fit(
            kind,
            directory,
            SlowNet(),
            callback,
            max_epochs=1,
            limit_val_batches=0,
            limit_train_batches=batches,
            accumulate_grad_batches=accumulated,
        )
    return callback.report


def test_a_fit_does_not_compare_the_times_of_an_earlier_one(tmp_path: Path) -> None:
    """Without times of its own, it reports nothing."""
    assert training.on_ranks("ours", fit_twice, tmp_path) == [[], []]


def fit_and_keep_callback(kind: training.Kind, directory: Path, hook: str, batch: int) -> list[int]:
    """Raise in a hook of a batch that is measured; return how many models in DDP and hooks
    of the model are left.
    """
    models: list[weakref.ref[Any]] = []

    def fail(trainer: Trainer) -> None:
        models.append(weakref.ref(trainer.strategy.model))
        raise ValueError("stop here")

    net = SlowNet()
    callback = SlowRanks(every_n_steps=EVERY)
    with suppress(ValueError):
        training.fit(
            kind, directory, net, callback, training.At(hook, fail, earlier=batch), max_epochs=1
        )
    gc.collect()
    return [sum(model() is not None for model in models), len(net._forward_pre_hooks)]


@pytest.mark.parametrize("hook", ["on_before_backward", "on_train_batch_end"])
def test_a_fit_that_fails_in_a_measured_step_leaves_nothing(hook: str, tmp_path: Path) -> None:
    """The callback keeps neither the model in DDP, which has the gradients of all
    parameters, nor hooks of the model.
    """
    assert training.on_ranks("ours", fit_and_keep_callback, tmp_path, hook, 3) == [[0, 0]] * 2


class WithoutDDP(DDPStrategy):
    """A strategy that does not wrap the model."""

    def configure_ddp(self) -> None:
        pass


def fit_without_ddp(kind: training.Kind, directory: Path) -> list[str]:
    callback = SlowRanks(every_n_steps=EVERY)
    trainer = training.make_trainer(
        WithoutDDP(), callbacks=[callback], max_epochs=1, limit_train_batches=2 * EVERY
    )
    with training.warnings_with("SlowRanks") as warnings:
        trainer.fit(SlowNet())
    assert callback.report == []
    return warnings


def test_a_strategy_without_ddp_gets_one_sentence(tmp_path: Path) -> None:
    """It trains as before."""
    on_rank_0, on_rank_1 = training.on_ranks("stock", fit_without_ddp, tmp_path)
    (warning,) = on_rank_0
    assert "needs a strategy with torch's DistributedDataParallel" in warning
    assert "(got WithoutDDP)" in warning
    assert on_rank_1 == []


def row(rank: int, host: str, **times: float) -> dict[str, Any]:
    """Return a rank's times in ms a step; each part that is not given takes 1 ms."""
    return {
        "rank": rank,
        "host": host,
        "device": f"cuda:{rank % 2}",
        "data": 1.0,
        "forward": 1.0,
        "backward": 1.0,
        "waiting": 0.0,
        **times,
    }


def test_several_slow_ranks_are_in_one_line() -> None:
    """Each has its host, device and part."""
    slow = {2: {"data": 9.5}, 5: {"backward": 21.0}}
    report = [row(rank, "abc"[rank // 2], **slow.get(rank, {})) for rank in range(6)]
    assert in_words(report, slow_parts(report, ratio=1.5)) == (
        "rank 2 (host b, cuda:0) is slow: 9.5 ms a step for data, median 1 ms; rank 5 (host c,"
        " cuda:1) is slow: 21 ms a step for backward, median 1 ms; every step waits 20 ms for"
        " the slowest"
    )


def test_small_differences_are_no_news() -> None:
    """A rank that takes less than a millisecond longer is not slow, whatever the ratio."""
    assert slow_parts([row(0, "a", data=0.01), row(1, "a", data=0.9)], ratio=1.5) == {}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"every_n_steps": 5}, r"every_n_steps must be an integer of at least 10 \(got 5\)"),
        ({"ratio": 1}, r"ratio must be a number above 1 \(got 1\)"),
    ],
)
def test_other_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    """The error names the argument, the rule and the value."""
    with pytest.raises(ConfigurationError, match=sentence):
        SlowRanks(**arguments)
