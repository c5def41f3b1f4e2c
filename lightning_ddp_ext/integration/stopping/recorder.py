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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.checkpoint.rank_records import Kind, RankRecords
from lightning_ddp_ext.checkpoint.recorded_buffers import FixedValues, RecordedBuffers
from lightning_ddp_ext.checkpoint.saved_parameters import SavedParameters
from lightning_ddp_ext.data.random_state import random_state_bytes
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.peers import Peers
from lightning_ddp_ext.threads import wait_for_gpus

from ..data.resume import device_generators
from ..private.compat import batches_that_stepped_of
from ..start.devices import RankDevicesStrategy


@dataclass
class RecordedRun:
    """A run of which this rank records what a survivor needs.

    Attributes:
        records: the records of the ranks on this host, by rank.
        own: this rank's records.
        peers: the other ranks, of which one may fail.
        loop: the Trainer's loop over batches.
        parameters: values of parameters that change outside of the optimiser step.
        buffers: the buffers that are recorded.
        fixed: other saved values, which must not change.
        generators: those of CUDA devices, whose random states are recorded, too.
        buffers_at: the number of batches when the buffers were last recorded.
        forward_passes: the number of forward passes since this batch started.
        stepped: the number of optimiser steps before this batch, as Lightning's loggers
            count them.
        error: why states are no longer recorded, if they are not.
    """

    records: dict[int, RankRecords]
    own: RankRecords
    peers: Peers
    loop: Any
    parameters: SavedParameters
    buffers: RecordedBuffers
    fixed: FixedValues
    generators: list[Any] = field(default_factory=list)
    buffers_at: int = -1
    forward_passes: int = 0
    stepped: int = 0
    error: str | None = None

    @property
    def buffer_records(self) -> RankRecords:
        """The records with the buffers, of which only one rank of each host has some."""
        return self.records[min(self.records)]


class Recorder:
    """Records random states, parameters and buffers in a run, between start and end.

    Attributes:
        run: what is recorded; ``None`` outside of such a run.
    """

    def __init__(self, strategy: RankDevicesStrategy) -> None:
        self._strategy = strategy
        self.run: RecordedRun | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what spawned ranks need, without the state of this process."""
        return {**vars(self), "run": None}

    def start(self, records: dict[int, RankRecords], peers: Peers) -> None:
        """Start recording a run.

        Args:
            records: the records of the ranks on this host, by rank; open until the end.
            peers: the other ranks.
        """
        trainer = self._strategy.current_trainer
        module = trainer.lightning_module
        buffers = RecordedBuffers(module)
        self.run = RecordedRun(
            records=records,
            own=records[self._strategy.global_rank],
            peers=peers,
            loop=trainer.fit_loop.epoch_loop,
            parameters=SavedParameters(module),
            buffers=buffers,
            fixed=FixedValues(module, buffers),
            generators=device_generators(self._strategy),
        )

    def end(self) -> None:
        """Record nothing from now on, and drop what was recorded."""
        self.run = None

    @property
    def _active_run(self) -> RecordedRun | None:
        """The run, unless nothing is recorded or recording stopped after an error."""
        return None if self.run is None or self.run.error is not None else self.run

    def record(self, moment: Kind) -> None:
        """Record this rank's random states and changed buffers.

        Also record its parameters at the start of an epoch or an optimiser step.
        """
        run = self._active_run
        if run is None:
            return
        batches = run.loop.batch_progress.total.ready
        with _ending_at_an_error(run):
            if moment == Kind.EPOCH:
                run.parameters.start_epoch()
            elif moment == Kind.WINDOW:
                run.parameters.start_step()
            run.own.write(moment, batches, random_state_bytes(run.generators))
            if run.own is run.buffer_records:
                _record_buffers(run, batches, even_if_same=moment == Kind.BATCH)

    def on_train_batch_start(self) -> None:
        """Reset the counts for a new batch."""
        run = self._active_run
        if run is not None:
            run.forward_passes = 0
            run.stepped = batches_that_stepped_of(run.loop)

    def before_forward(self) -> None:
        """Count a forward pass.

        Raise a ``RankFailedError`` if a rank has failed, before the next collective
        does.
        """
        run = self._active_run
        if run is not None:
            run.forward_passes += 1
            run.peers.check()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Record this rank's state around a backward pass that averages gradients.

        The state is recorded before the pass on CPU, and after it on a GPU. On a GPU,
        this first waits for the averages, and raises a ``RankFailedError`` if a rank
        has failed. Otherwise the optimiser step would be queued behind an all-reduce,
        and would use partial sums after its abort.
        """
        run = self._active_run
        averages = getattr(self._strategy.model, "require_backward_grad_sync", True)
        if run is None or not averages:
            yield
            return
        # In later calls of its closure, an optimiser may have changed the parameters.
        if run.forward_passes <= 1:
            with _ending_at_an_error(run):
                run.parameters.before_backward()
        is_on_gpu = self._strategy.root_device.type != "cpu"
        if not is_on_gpu:
            self.record(Kind.BATCH)
        yield
        if is_on_gpu:
            wait_for_gpus(self._strategy.rank_devices)
            run.peers.check()
            self.record(Kind.BATCH)

    def after_optimizer_step(self) -> None:
        """Record the parameters after an optimiser step."""
        run = self._active_run
        if run is not None:
            with _ending_at_an_error(run):
                run.parameters.end_step()

    def before_validation(self) -> None:
        """Record the parameters before hooks that may exchange them in validation."""
        run = self._active_run
        if run is not None:
            with _ending_at_an_error(run):
                run.parameters.record()


@contextmanager
def _ending_at_an_error(run: RecordedRun) -> Iterator[None]:
    """End the recording at an error, while training continues.

    The error is a lack of space or a tensor of an unusual kind.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        run.error = f"this rank's state is no longer recorded ({reason_of(error)})"


def _record_buffers(run: RecordedRun, batches: int, *, even_if_same: bool) -> None:
    """Record the buffers once after each batch, and when they have changed since."""
    is_due = even_if_same or batches != run.buffers_at
    content = run.buffers.read(even_if_same=is_due)
    if content:
        run.own.write(Kind.BUFFERS, batches, content)
        run.buffers_at = batches
