"""Warn if ranks monitor different values, and share rank 0's best checkpoints."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words

from ..checkpoints.collective import Checkpoints
from ..named_calls import ranks_of, report_call
from ..private.lightning_tree import pl, rank_zero_warn
from ..start.devices import RankDevicesStrategy

# What a ModelCheckpoint records; each rank computes it from its own values.
_RECORD = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)


class MonitoredValues:
    """The monitored values on a strategy's ranks.

    They decide on checkpoints, stops and learning rates. Each rank decides with its own
    value. Lightning combines some of these decisions, but learning rates and the record
    of the best checkpoints may differ between ranks.
    """

    def __init__(self, strategy: RankDevicesStrategy, checkpoints: Checkpoints) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._keys: set[str] = set()

    def start_training(self) -> None:
        """Collect the keys that any rank monitors. Collective."""
        by_rank = ranks_of(self._strategy).gather(_keys_of(self._strategy.current_trainer))
        self._keys = set().union(*by_rank)

    def compare(self) -> None:
        """Warn of each monitored value that differs between ranks, once in a run.

        Collective if any is monitored.
        """
        trainer = self._strategy.current_trainer
        if not self._keys or trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        report_call(
            f"a comparison of the monitored values {listed(sorted(self._keys))}", is_waiting=True
        )
        metrics = trainer.callback_metrics
        own = {key: float(metrics[key]) for key in self._keys if key in metrics}
        by_rank = ranks_of(self._strategy).gather(own)
        for key in sorted(self._keys):
            values = [values.get(key) for values in by_rank]
            if not all(_is_same(value, values[0]) for value in values):
                self._keys.remove(key)
                rank_zero_warn(_finding(key, values))

    def share_record(self) -> None:
        """Give the checkpoint callbacks of every rank rank 0's record.

        Collective if the Trainer has such callbacks.
        """
        module = self._strategy.lightning_module
        trainer = None if module is None else self._strategy.current_trainer
        callbacks = [] if trainer is None else trainer.checkpoint_callbacks
        recording = [each for each in callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]
        if not recording or self._checkpoints.is_interrupted:
            return
        ranks = ranks_of(self._strategy)
        records = ranks.from_rank_zero([_record_of(callback) for callback in recording])
        if ranks.rank != 0:
            for callback, record in zip(recording, records, strict=True):
                for name, value in record.items():
                    setattr(callback, name, _moved(value, self._strategy.root_device))


def _keys_of(trainer: Any) -> set[str]:
    """Return the keys that callbacks and schedulers monitor on this rank."""
    kinds = (pl.callbacks.ModelCheckpoint, pl.callbacks.EarlyStopping)
    found = [each.monitor for each in trainer.callbacks if isinstance(each, kinds)]
    found += [config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    # A ModelCheckpoint computes the last two.
    return {key for key in found if key not in (None, "epoch", "step")}


def _record_of(callback: Any) -> dict[str, Any]:
    return {name: _moved(getattr(callback, name), "cpu") for name in _RECORD}


def _moved(value: Any, device: Any) -> Any:
    """Return a record with its tensors on a device."""
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value


def _is_same(value: float | None, other: float | None) -> bool:
    """Whether two ranks have the same value, up to rounding.

    ``None`` means that the value is not logged.

    >>> pairs = [(math.nan, math.nan), (1.0, None), (1.0, 1.0 + 1e-9), (1.0, 1.1)]
    >>> tuple(_is_same(*pair) for pair in pairs)
    (True, False, True, False)
    """
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=1e-6) or (math.isnan(value) and math.isnan(other))


def _finding(key: str, values: list[float | None]) -> str:
    texts = {
        rank: "not logged" if value is None else f"{value:g}" for rank, value in enumerate(values)
    }
    by_rank = listed(f"{text} on {ranks_in_words(who)}" for text, who in grouped(texts))
    return (
        f"the monitored value {key!r} differs between ranks ({by_rank}), so learning rates and"
        " decisions about checkpoints and early stopping may differ as well; log it on every rank"
        " with sync_dist=True"
    )
