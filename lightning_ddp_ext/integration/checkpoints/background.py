"""Wait for checkpoints that Lightning's ``AsyncCheckpointIO`` writes in the background.

With this IO, a save continues in a thread of rank 0 while the Trainer trains. The next
save, or the end of the run, waits for it. Only then are the checkpoints removed that it
replaces, and not if it failed.
"""

from __future__ import annotations

from contextlib import suppress

from lightning_ddp_ext.checkpoint.location import PathOrUrl

from ..cooperation import CooperatingRanks
from ..private.compat import trainer_of
from ..private.lightning_tree import TrainerStatus, pl, rank_zero_warn

AsyncCheckpointIO = pl.plugins.AsyncCheckpointIO


class BackgroundSaves:
    """The saves of a strategy that may continue in the background.

    Without an ``AsyncCheckpointIO``, every save is in the foreground, and nothing waits.

    Args:
        strategy: our strategy or a stock one.
        ranks: its ranks.
    """

    def __init__(self, strategy: pl.strategies.Strategy, ranks: CooperatingRanks) -> None:
        self._strategy = strategy
        self._ranks = ranks
        # On rank 0, the files that the save in the background replaces, until it has ended.
        self._replaced_files: list[PathOrUrl] = []

    @property
    def foreground_io(self) -> pl.plugins.CheckpointIO:
        """The IO that writes and reads, which may be wrapped to save in the background."""
        io = self._strategy.checkpoint_io
        inner = io.checkpoint_io if isinstance(io, AsyncCheckpointIO) else io
        assert inner is not None, "the strategy has set it"
        return inner

    @property
    def is_in_use(self) -> bool:
        """Whether a save now would continue in the background.

        With an ``AsyncCheckpointIO``, there are two exceptions: a callback that links to a
        file needs it immediately, and outside of the Trainer's functions nothing waits for
        the end of the save.
        """
        trainer = trainer_of(self._strategy.lightning_module)
        is_running = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        if not is_running or not isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO):
            return False
        callbacks = trainer.checkpoint_callbacks
        return all(getattr(callback, "save_last", None) != "link" for callback in callbacks)

    def remove_after_save(self, path: PathOrUrl) -> None:
        """Remove a file on rank 0 once the save that replaces it has ended without an error."""
        if self._strategy.is_global_zero:
            self._replaced_files.append(path)

    def finish(self) -> None:
        """Wait on all ranks until everything is saved and removed, or raise the error.

        Collective, unless the Trainer is interrupted.
        """
        if not isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO):
            return
        try:
            self._ranks.on_rank_zero(self.wait, "saving in the background")
        except Exception as error:
            if not self._ranks.is_interrupted:
                raise
            # The user already sees another error.
            rank_zero_warn(f"a background save also failed: {error}")

    def finish_earlier(self) -> None:
        """Wait for this rank's saves, whose errors must not prevent the next one."""
        with suppress(Exception):
            self.wait()

    def wait(self) -> None:
        """Wait for this rank's save, and then remove the files that it replaces.

        If it failed, raise its error once, and remove nothing.
        """
        io = self._strategy.checkpoint_io
        if not isinstance(io, AsyncCheckpointIO):
            return
        replaced_files = self._replaced_files
        self._replaced_files = []  # also if the save failed: they stay
        try:
            io.teardown()
        finally:
            # HACK: the IO would raise an error again at each later call, and has no method to
            # clear it. Its constructor does, and makes whatever else the next save needs.
            AsyncCheckpointIO.__init__(io, io.checkpoint_io)
        for path in replaced_files:
            io.remove_checkpoint(path)
