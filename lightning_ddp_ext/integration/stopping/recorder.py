"""Record, in each step of a rank, what a surviving rank needs to save that step.

The strategy's hooks call these methods, in this order in each optimiser step:

====================================  ================================================
Moment                                Recorded
====================================  ================================================
before the first batch is fetched     random states, parameters, changed buffers
before or after the backward pass     random states, buffers, parameters changed early
after the optimiser step              parameters
in and after validation               random states, changed buffers
====================================  ================================================
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ddp_ext.checkpoint.rank_records import Kind, RankRecords
from lightning_ddp_ext.checkpoint.recorded_buffers import FixedValues, RecordedBuffers
from lightning_ddp_ext.checkpoint.saved_parameters import SavedParameters
from lightning_ddp_ext.data.random_state import random_state_bytes
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.peers import Peers
from lightning_ddp_ext.threads import wait_for_gpus

from ..data.positions import positions_of, training_generators
from ..private.compat import batches_that_stepped_of
from ..start.devices import RankDevicesStrategy


class Recorder:
    """Records random states, parameters and buffers.

    Only one rank of each host records buffers. Nothing is recorded before
    :meth:`start`, which makes ``parameters``, ``buffers`` and ``fixed`` for its run.

    Attributes:
        records: the records of the ranks on this host, by rank.
        buffer_rank: the rank of this host that records the buffers.
        parameters: values of parameters that change outside of the optimiser step.
        buffers: the buffers that are recorded.
        fixed: other saved values, which must not change.
        error: why states are no longer recorded, if they are not.
        has_new_iterator: whether an iterator over training data is new, and its start
            is not recorded yet.
        forward_passes: the number of forward passes since this batch started.
        stepped: the number of optimiser steps before this batch, as Lightning's loggers
            count them.
    """

    records: dict[int, RankRecords]
    buffer_rank: int
    parameters: SavedParameters
    buffers: RecordedBuffers
    fixed: FixedValues

    def __init__(self, strategy: RankDevicesStrategy) -> None:
        self._strategy = strategy
        self.records = {}
        self.error: str | None = None
        self.has_new_iterator = False
        self.forward_passes = 0
        self.stepped = 0
        self._buffers_at = -1  # the number of batches when the buffers were last recorded
        self._own: RankRecords | None = None  # unless nothing is recorded

    # A strategy is pickled for spawned ranks, without the state of this process.

    def __getstate__(self) -> dict[str, Any]:
        return {"strategy": self._strategy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def start(self, records: dict[int, RankRecords], peers: Peers) -> None:
        """Start recording a run; if another rank fails, ``peers.cause`` tells why."""
        self._peers = peers
        self.records = records
        self.buffer_rank = min(records)
        self._generators: list[Any] = []
        trainer = self._strategy.current_trainer
        module = trainer.lightning_module
        self.buffers = RecordedBuffers(module)
        self.parameters = SavedParameters(module)
        self.fixed = FixedValues(module, self.buffers)
        self._loop = trainer.fit_loop.epoch_loop
        self._own = records[self._strategy.global_rank]

    def end(self) -> None:
        """Close the records, and drop them."""
        for records in self.records.values():
            records.close()
        self.__dict__ = Recorder(self._strategy).__dict__  # as if newly made

    def record(self, moment: Kind) -> None:
        """Record this rank's random states, changed buffers and new iterators.

        Also record its parameters at the start of an optimiser step.
        """
        if self._own is None:
            return
        if moment == Kind.EPOCH:
            positions = positions_of(self._strategy.current_trainer)
            self._generators = training_generators(self._strategy, positions)
        batches = self._loop.batch_progress.total.ready
        with self._stopping_at_an_error() as own:
            if moment == Kind.EPOCH:
                self.parameters.start_epoch()
            elif moment == Kind.WINDOW:
                self.parameters.start_step()
            own.write(moment, batches, random_state_bytes(self._generators))
            self._record_buffers(own, batches, even_if_same=moment == Kind.BATCH)
            self._record_iterators(own, moment)

    def _record_buffers(self, own: RankRecords, batches: int, *, even_if_same: bool) -> None:
        """Record the buffers on one rank of this host, once after each batch."""
        if self._strategy.global_rank != self.buffer_rank:
            return
        is_due = even_if_same or batches != self._buffers_at
        content = self.buffers.read(even_if_same=is_due)
        if content:
            own.write(Kind.BUFFERS, batches, content)
            self._buffers_at = batches

    def _record_iterators(self, own: RankRecords, moment: Kind) -> None:
        """Record where new iterators over training data start."""
        # Before the first batch is fetched, the iterator may not have drawn its order.
        if not self.has_new_iterator or moment == Kind.WINDOW:
            return
        self.has_new_iterator = False
        positions = positions_of(self._strategy.current_trainer)
        starts = pickle.dumps([position.starts() for position in positions])
        own.write(Kind.LOADERS, positions[0].epoch, starts)

    @contextmanager
    def _stopping_at_an_error(self) -> Iterator[Any]:
        """Stop recording after an error, while training continues.

        The error is a lack of space or a tensor of an unusual kind.
        """
        try:
            yield self._own
        except (OSError, RuntimeError) as error:
            self._own = None
            self.error = f"this rank's state is no longer recorded ({reason_of(error)})"

    def on_train_batch_start(self) -> None:
        """Reset the counts for a new batch."""
        if self._own is not None:
            self.forward_passes = 0
            self.stepped = batches_that_stepped_of(self._loop)

    def before_forward(self) -> None:
        """Count a forward pass.

        Raise a ``RankFailedError`` if a rank has failed, before the next collective
        does.
        """
        self.forward_passes += 1
        self._raise_cause()

    def _raise_cause(self) -> None:
        if self._own is not None:
            self._peers.check()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Record this rank's state around a backward pass that averages gradients.

        The state is recorded before the pass on CPU, and after it on a GPU. On a GPU,
        this first waits for the averages, and raises a ``RankFailedError`` if a rank
        has failed. Otherwise the optimiser step would be queued behind an all-reduce,
        and would use partial sums after its abort.
        """
        averages = getattr(self._strategy.model, "require_backward_grad_sync", True)
        if self._own is None or not averages:
            yield
            return
        # In later calls of its closure, an optimiser may have changed the parameters.
        if self.forward_passes <= 1:
            with self._stopping_at_an_error():
                self.parameters.before_backward()
        is_on_gpu = self._strategy.root_device.type != "cpu"
        if not is_on_gpu:
            self.record(Kind.BATCH)
        yield
        if is_on_gpu:
            wait_for_gpus(self._strategy.rank_devices)
            self._raise_cause()
            self.record(Kind.BATCH)

    def after_optimizer_step(self) -> None:
        """Record the parameters after an optimiser step."""
        if self._own is not None:
            with self._stopping_at_an_error():
                self.parameters.end_step()

    def before_validation(self) -> None:
        """Record the parameters before hooks that may exchange them in validation."""
        if self._own is not None:
            with self._stopping_at_an_error():
                self.parameters.record()
