"""A callback that names the rank that all others wait for in each step."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter, sub
from statistics import median, median_low
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.arguments import integer
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rank_logger import rank_logger

from ..private.compat import batches_that_stepped_of
from ..private.ddp_times import MeasuredStep, has_timers
from ..private.lightning_tree import pl, rank_zero_warn
from ..strategy_ranks import ranks_of

# A rank's entry in `SlowRanks.report`, which documents the keys.
Row = Mapping[str, Any]

_logger = rank_logger(__name__, ranks=0)

_PARTS = ("data", "forward", "backward")  # of a step, in this order
_SAMPLES = 5  # steps that are measured after each comparison, for the next one
_LEAST = 1.0  # ms a step; smaller differences are noise, as is what one comparison shows


class SlowRanks(pl.Callback):
    """Names the rank that the others wait for in each step, and what it is slow at.

    With DDP, each step takes as long as on the slowest rank. This callback measures
    some steps, and compares the ranks after every n-th batch with one small collective.
    In a measured step, all ranks start together, and a rank is late if it completes
    data, forward or backward after most others. If its delay makes a step longer by a
    factor, twice in a row, rank 0 logs one line that names the rank and the part. The
    Trainer's loggers get the times as ``slow_ranks/data_ms_max`` and so on. The
    callback works with each strategy that wraps the model in
    ``DistributedDataParallel``, on CPU and CUDA. Elsewhere, and with one rank, it
    measures nothing.

    Args:
        every_n_steps: the number of training batches between comparisons.
        ratio: a rank is slow if its delay makes a step longer by this factor.

    Attributes:
        report: the last comparison, the same on all ranks: for each rank ``rank``,
            ``host``, ``device``, and in ms a step ``data``, ``forward``, ``backward``,
            each with the waits for collectives in it, and ``waiting`` for the exchange
            of gradients. Empty before the first one.

    Raises:
        ConfigurationError: ``every_n_steps`` is not an integer of at least 10, or
            ``ratio`` is not a number above 1.

    Example::

        callback = SlowRanks(every_n_steps=50)
        trainer = L.Trainer(strategy="ddp", devices=2, callbacks=[callback])
    """

    def __init__(self, every_n_steps: int = 100, ratio: float = 1.5) -> None:
        self.every_n_steps = integer(
            every_n_steps, "every_n_steps", at_least=10, remedy="pass 100, the default"
        )
        if not isinstance(ratio, int | float) or not ratio > 1:
            raise ConfigurationError(f"ratio must be a number above 1 (got {ratio!r}); pass 1.5")
        self.ratio = ratio
        self.report: list[Row] = []
        self._start_fit(is_measuring=False)

    def _start_fit(self, *, is_measuring: bool) -> None:
        self._is_measuring = is_measuring
        self._step: MeasuredStep | None = None  # the current step, if it is measured
        self._steps: list[dict[str, float]] = []  # times since the last comparison, in ms
        self._announcements = _Announcements()  # used on rank 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        has_ranks = trainer.world_size > 1
        self._start_fit(is_measuring=has_ranks and has_timers(trainer.strategy.model))
        if has_ranks and not self._is_measuring:
            rank_zero_warn(
                "SlowRanks measures nothing: it needs a strategy with torch's"
                f" DistributedDataParallel, such as 'ddp' (got {type(trainer.strategy).__name__})"
            )

    def _end_step(self, trainer: pl.Trainer) -> dict[str, float]:
        """Return the times of the current step, or nothing if it is not measured."""
        step = self._step
        self._step = None
        return step.end(trainer.strategy.model) if step is not None else {}

    def _skip(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_step(trainer)  # it will begin later than a batch is fetched

    on_train_epoch_start = on_validation_start = _skip

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._is_measuring:
            return
        if times := self._end_step(trainer):
            self._steps.append(times)
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if batches % self.every_n_steps == 0:
            self._compare(trainer)
        accumulated = trainer.accumulate_grad_batches
        exchanges_gradients = (batch_idx + 2) % accumulated == 0  # the next batch
        if exchanges_gradients and batches % self.every_n_steps < _SAMPLES * accumulated:
            trainer.strategy.barrier("SlowRanks")  # all ranks start the step together
            self._step = MeasuredStep(trainer.strategy.model)

    def _compare(self, trainer: pl.Trainer) -> None:
        """Compare the ranks. Collective: every rank must call it."""
        row: dict[str, Any] = {
            "rank": trainer.global_rank,
            "host": socket.gethostname(),
            "device": str(trainer.strategy.root_device),
        }
        if self._steps:
            row |= {part: median(step[part] for step in self._steps) for part in self._steps[0]}
        self._steps.clear()
        report = ranks_of(trainer.strategy).gather(row)
        if not all("data" in row for row in report):  # some rank has measured no step
            return
        self.report = report
        if trainer.is_global_zero:
            step = batches_that_stepped_of(trainer.fit_loop.epoch_loop)
            for logger in trainer.loggers:
                logger.log_metrics(_metrics(report), step=step)
            self._announcements.add(report, slow_parts(report, self.ratio))


class _Announcements:
    """Logs a line when ranks become slow, at another part, or are no longer slow.

    It takes two comparisons in a row to change what the log says, since the times of one
    may be disturbed.
    """

    def __init__(self) -> None:
        self._comparisons: list[dict[int, str]] = [{}]  # the slow ranks of each
        self._announced: dict[int, str] = {}  # the slow ranks, as the log says

    def add(self, report: Sequence[Row], slow: dict[int, str]) -> None:
        """Add a comparison and the slow ranks in it, each with its part."""
        before = self._comparisons[-1]
        self._comparisons.append(slow)
        in_both = {rank: part for rank, part in slow.items() if before.get(rank) == part}
        if not in_both.items() <= self._announced.items():
            self._announced.update(in_both)
            _logger.warning(in_words(report, in_both))
        for rank in self._announced.keys() - before.keys() - slow.keys():
            del self._announced[rank]
            count = sum(rank in each for each in self._comparisons)
            _logger.warning(
                f"rank {rank} is no longer slow; it was slow in {count} of"
                f" {len(self._comparisons) - 1} comparisons"
            )


def _median_of(report: Sequence[Row], part: str) -> float:
    return float(median_low(row[part] for row in report))


def _delays(report: Sequence[Row]) -> list[list[float]]:
    """Return how much later than most others each rank completes each part, in ms.

    Ranks that wait within a part for a late one, as for rank 0's buffers or for logged
    values, complete that part with it and not later. So a wait is not a delay.

    >>> late = {"data": 41, "forward": 5, "backward": 9}
    >>> waits = {"data": 9, "forward": 37, "backward": 9}
    >>> _delays([late, waits])
    [[32, 0, 0], [0, 0, 0]]
    """
    ends = [list(accumulate(row[part] for part in _PARTS)) for row in report]
    usual = [median_low(times) for times in zip(*ends, strict=True)]
    return [list(map(sub, times, usual)) for times in ends]


def slow_parts(report: Sequence[Row], ratio: float) -> dict[int, str]:
    """Return the slow ranks, each with the part in which it falls behind the most.

    >>> rows = [{"rank": rank, "data": 1, "forward": 5, "backward": 9} for rank in range(3)]
    >>> slow_parts([*rows, {"rank": 3, "data": 41, "forward": 5, "backward": 9}], ratio=1.5)
    {3: 'data'}
    """
    delays = _delays(report)
    step = max(sum(row[part] for part in _PARTS) for row in report)
    without_slow_ranks = step - max(map(max, delays))
    limit = max(_LEAST, (ratio - 1) * without_slow_ranks)
    return {
        row["rank"]: _slowest_part(delays_of_rank)
        for row, delays_of_rank in zip(report, delays, strict=True)
        if max(delays_of_rank) > limit
    }


def _slowest_part(delays: Sequence[float]) -> str:
    """Return the part that increases a rank's delay the most."""
    increases = map(sub, delays, [0.0, *delays])
    return max(zip(increases, _PARTS, strict=True))[1]


def in_words(report: Sequence[Row], slow: Mapping[int, str]) -> str:
    """Return the line that names the slow ranks.

    >>> times = {"forward": 5, "backward": 9, "host": "b", "device": "cpu"}
    >>> rows = [{"rank": rank, "data": data, **times} for rank, data in enumerate((9, 41))]
    >>> in_words(rows, {1: "data"})  # doctest: +ELLIPSIS
    'rank 1 (host b, cpu) is slow: 41 ms a step for data, median 9 ms; every step ...'
    """
    clauses = [
        f"rank {rank} (host {report[rank]['host']}, {report[rank]['device']}) is slow:"
        f" {report[rank][part]:.3g} ms a step for {part}, median {_median_of(report, part):.3g} ms"
        for rank, part in slow.items()
    ]
    wait = max(max(_delays(report)[rank]) for rank in slow)
    whom = "it" if len(slow) == 1 else "the slowest"
    return f"{listed(clauses, '; ')}; every step waits {wait:.3g} ms for {whom}"


def _metrics(report: Sequence[Row]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for part in (*_PARTS, "waiting"):
        slowest = max(report, key=itemgetter(part))
        metrics |= {
            f"slow_ranks/{part}_ms_max": slowest[part],
            f"slow_ranks/{part}_ms_median": _median_of(report, part),
            f"slow_ranks/{part}_rank": slowest["rank"],
        }
    return metrics
