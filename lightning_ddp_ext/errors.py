"""Every error that this package raises on purpose.

::

    DDPExtError
    ├── ConfigurationError (ValueError)      a value that the user chose cannot work
    ├── RendezvousError (RuntimeError)       the ranks could not connect
    │   └── MissingRanksError                some ranks did not connect within init_timeout
    ├── GroupInUseError (RuntimeError)       this process has a process group that does not fit
    ├── CheckpointError (RuntimeError)       a checkpoint could not be written or read
    │   ├── CheckpointSaveError (OSError)    not written, or not durable
    │   ├── CheckpointNotFoundError (FileNotFoundError)    a rank that has to read the file does not see it
    │   ├── DamagedCheckpointError           truncated, altered, or not a checkpoint
    │   └── UnsafeCheckpointError (pickle.UnpicklingError) holds a class that weights_only=True does not allow
    ├── SamplingError (RuntimeError)         data cannot be shared out among the ranks as requested
    │   └── ResumeError                      an epoch cannot be continued where it was left
    ├── BatchNormError (RuntimeError)        a layer cannot have the statistics of all ranks
    ├── DivergenceError (RuntimeError)       ranks differ in weights or in what they log
    └── RankFailedError (RuntimeError)       another rank failed or exited, so this rank stops
        ├── RankDiedError                    another rank's process was killed, or its host is unreachable
        ├── RankAbsentError                  a rank did not make the call that the others made
        └── RankHungError                    no rank makes progress, because of a rank that is stuck

A message gives field, rule, value and remedy, in this order where all four exist. A traceback ends with the address of
the error's description.
"""

from __future__ import annotations

import pickle
from os import PathLike

__all__ = [
    "BatchNormError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "ConfigurationError",
    "DDPExtError",
    "DamagedCheckpointError",
    "DivergenceError",
    "GroupInUseError",
    "MissingRanksError",
    "RankAbsentError",
    "RankDiedError",
    "RankFailedError",
    "RankHungError",
    "RendezvousError",
    "ResumeError",
    "SamplingError",
    "UnsafeCheckpointError",
]


class DDPExtError(Exception):
    """Base of all errors of this package: ``except DDPExtError`` catches each of them.

    Keyword arguments become the attributes of a subclass, and pickle keeps them.
    """

    def __init__(self, *args: object, **attributes: object) -> None:
        super().__init__(*args)
        vars(self).update(attributes)
        ours = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)  # the user may have a subclass
        page = f"docs/reference/errors.md#{ours.__name__.lower()}"
        # Python prints notes below the message, from 3.11 on.
        self.__notes__ = [f"See {page} in the repository of lightning-ddp-ext."]


class ConfigurationError(DDPExtError, ValueError):
    """A value that the user chose cannot work; the message names the argument or variable, and a value that works."""


class RendezvousError(DDPExtError, RuntimeError):
    """The ranks could not connect, or their settings differ; raised on every rank that connected."""


class MissingRanksError(RendezvousError):
    """Some ranks did not connect within ``init_timeout``.

    Attributes:
        missing: the missing ranks, ascending.
    """

    missing: tuple[int, ...] = ()


class GroupInUseError(DDPExtError, RuntimeError):
    """This process already belongs to a process group that does not fit the requested one."""


class CheckpointError(DDPExtError, RuntimeError):
    """A checkpoint could not be written or read; raised on every rank."""


class CheckpointSaveError(CheckpointError, OSError):
    """A checkpoint could not be written, or may not survive a loss of power; the message describes the path.

    Attributes:
        path: the path of the checkpoint.
        errno: the system's number of the error, if it came from the system.
    """

    path: str | PathLike[str] = ""
    errno: int | None = None


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The file does not exist, on rank 0 or on another rank that has to read it by itself."""


class DamagedCheckpointError(CheckpointError):
    """A file is truncated, altered or not a checkpoint.

    Attributes:
        damaged: names of the records whose content differs from what was written, if known.
    """

    damaged: tuple[str, ...] = ()


class UnsafeCheckpointError(CheckpointError, pickle.UnpicklingError):
    """A file holds something other than data, and ``weights_only=True``; none of its code was run."""


class SamplingError(DDPExtError, RuntimeError):
    """Data cannot be shared out among the ranks as requested: uneven training batches, predictions that overlap."""


class ResumeError(SamplingError):
    """An epoch cannot be continued at the place where the checkpoint left it."""


class BatchNormError(DDPExtError, RuntimeError):
    """A BatchNorm layer cannot normalise with the statistics of all ranks; raised on every rank in that layer."""


class DivergenceError(DDPExtError, RuntimeError):
    """The ranks differ in parameters, buffers or optimiser states, or in what they log; raised on every rank.

    Attributes:
        ranks: the ranks that differ from most others, ascending; in a tie, from those with the lowest rank.
        names: what differs.
    """

    ranks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


class RankFailedError(DDPExtError, RuntimeError):
    """Another rank failed or exited while this rank still needed it, so this rank stops.

    Attributes:
        rank: the first rank that failed.
        host: the name of its host.
        pid: its process id there.
        traceback_text: its traceback as that rank would print it; empty if it left none.
    """

    rank: int
    host: str
    pid: int
    traceback_text: str = ""


class RankDiedError(RankFailedError):
    """Another rank's process was killed, or its host or network is unreachable."""


class RankAbsentError(RankFailedError):
    """``rank`` did not make a call that other ranks made and that every rank must make, such as a barrier."""


class RankHungError(RankFailedError):
    """No rank makes progress because ``rank`` is stuck; see ``HangWatchdog``. Also raised on that rank."""
