"""A callback that reports which rank is stuck, with any strategy."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any, get_args

from typing_extensions import override

from lightning_ddp_ext.arguments import check_choice, to_timedelta
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.session import current_session
from lightning_ddp_ext.supervision.watchdog import OnHang, Watchdog

from ..private.activity import current_hook, progress_of
from ..private.lightning_tree import pl, rank_zero_info
from .rank_debugger import rank_debugger_of


class HangWatchdog(pl.Callback):
    """Reports which rank is stuck, and where, after ``timeout`` without progress.

    It reports nothing while the ranks without progress only wait for ranks that make
    progress.

    A rank makes progress when it starts or ends a batch, an epoch, training, the sanity
    check or an evaluation, or when it has restored a checkpoint or starts a save. After
    ``timeout`` without progress, rank 0 collects the Python stacks, the running hook,
    the last step and the collectives in torch's Flight Recorder (NCCL and gloo) from
    every rank. It prints one sentence, and writes this sentence and all stacks to a
    file::

        rank 3 (host b, pid 17) never entered all_reduce #512 [[4096]]; it is in
        train_dataloader_next, dataset.py:41;
        ranks 0-2 waited for it for 61 s

    If a rank does not answer within 5 s, because its process is stopped (SIGSTOP) or C
    code holds the GIL, the report names it without its stacks. If that rank is rank 0,
    each waiting rank reports its own stacks.

    With ``on_hang="abort"``, every rank then raises ``RankHungError``; a rank that
    cannot be interrupted exits a few seconds later with status 1. If a process is
    stopped or never releases the GIL, only its launcher can end it.

    With other strategies, the ranks cannot exchange messages: each rank reports its own
    stacks and where it waits and, with ``on_hang="abort"``, exits with ``os._exit(1)``,
    without an exception.

    Choose a ``timeout`` longer than the longest step plus a save. Pass this callback
    first, because it starts watching in its ``setup``. With ``TORCH_FR_BUFFER_SIZE=0``,
    the default before torch 2.11, the sentence only says where each rank is.

    Args:
        timeout: seconds or ``timedelta`` without progress after which the callback
            reports.
        on_hang: ``"abort"``, or ``"continue"`` to report again after another
            ``timeout``.
        directory: where reports ``hang-<time>-rank<n>.txt`` are written; ``None``:
            ``trainer.default_root_dir``, which must then be local.

    Raises:
        ConfigurationError: an argument is invalid, or the directory is not local.
        RankHungError: during a Trainer's run, on every rank of a ``DDPExtStrategy``.

    Example::

        trainer = L.Trainer(strategy="ddp_ext", devices=4, callbacks=[HangWatchdog(timeout=600)])
    """

    def __init__(
        self,
        timeout: float | timedelta,
        on_hang: OnHang = "abort",
        directory: str | PathLike[str] | None = None,
    ) -> None:
        if timeout is None:  # to_timedelta allows it
            raise ConfigurationError("timeout must be a duration (got None); write timeout=600")
        self.timeout = to_timedelta(timeout, field="timeout")
        check_choice("on_hang", on_hang, *get_args(OnHang))
        if directory is not None:
            _local_path(directory, field="directory")
        self.on_hang = on_hang
        self.directory = directory
        self._watchdog: Watchdog | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop_watching()
        watchdogs = _watchdogs_of(trainer)
        if len(watchdogs) > 1:
            raise ConfigurationError(
                f"a Trainer can have one HangWatchdog (got {len(watchdogs)}); remove all but one"
            )
        if rank_debugger_of(trainer) is not None:
            rank_zero_info("HangWatchdog is off while a rank is being debugged")
            return
        session = current_session()

        def describe(frame: FrameType | None) -> tuple[str, str]:
            return current_hook(frame, trainer), progress_of(trainer)

        self._watchdog = Watchdog(
            RankInfo(trainer.global_rank),
            None if session is None else session.survey,
            timeout=self.timeout.total_seconds(),
            on_hang=self.on_hang,
            directory=_local_path(
                self.directory or trainer.default_root_dir, field="default_root_dir"
            ),
            describe=describe,
        )
        self._watchdog.start()

    def _record_progress(self, *args: Any, **kwargs: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.record_progress()

    def _stop_watching(self, *args: Any, **kwargs: Any) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    teardown = on_exception = _stop_watching


def _local_path(directory: str | PathLike[str], *, field: str) -> Path:
    path = os.fspath(directory)
    if "://" in path:
        raise ConfigurationError(
            f"HangWatchdog needs a local directory (got {field}={path!r}); pass a local path as"
            " directory="
        )
    return Path(path)


def _watchdogs_of(trainer: Any) -> list[HangWatchdog]:
    return [each for each in trainer.callbacks if isinstance(each, HangWatchdog)]


# Each hook that begins or ends something, or that handles a checkpoint, is progress: for
# example, on_train_batch_end and on_save_checkpoint. The hooks within a batch, such as
# on_after_backward, are not, since the batch's end follows soon.
for _name in dir(pl.Callback):
    if re.fullmatch(r"on_\w+_(start|end|checkpoint)", _name):
        setattr(HangWatchdog, _name, HangWatchdog._record_progress)
