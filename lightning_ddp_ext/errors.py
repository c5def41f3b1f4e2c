"""Every error that this package raises on purpose.

::

    DDPExtError
    ├── ConfigurationError (ValueError)      a value that the user chose cannot work
    │   ├── InitMethodError                  init_method, DDPX_INIT_METHOD, run_id
    │   ├── WorldError                       rank, world_size, local_rank, devices, num_nodes
    │   ├── DurationError                    timeout, init_timeout
    │   ├── OptionError                      an argument that does not exist, or that this torch lacks
    │   ├── SamplerError                     an argument of a sampler, or a state that is not its own
    │   └── ConversionError                  layers that were named, or a converter
    ├── RendezvousError (RuntimeError)       the ranks could not find each other
    │   ├── StoreError                       the store cannot be opened, reached or believed
    │   ├── MissingRanksError                ranks that did not come within init_timeout
    │   ├── DuplicateRankError               two processes that claim one rank
    │   └── DisagreementError                ranks that want different things
    ├── GroupInUseError (RuntimeError)       this process has a process group that does not fit
    ├── CheckpointError (RuntimeError)       a checkpoint could not be written or read
    │   ├── CheckpointSaveError (OSError)    not written; what stood at the path before is still there
    │   ├── CheckpointNotFoundError (FileNotFoundError)    no rank that should see the file does
    │   ├── DamagedCheckpointError           truncated, altered, or not a checkpoint at all
    │   ├── UnsafeCheckpointError (pickle.UnpicklingError) holds a class that weights_only=True does not allow
    │   └── CheckpointMismatchError          keys or shapes are not the model's
    ├── SamplingError (RuntimeError)         data cannot be shared out among the ranks as was asked
    │   ├── ResumeError                      an epoch cannot be continued where it was left
    │   ├── UnevenInputsError                ranks have different numbers of training batches
    │   └── ExactEvaluationError             samples cannot be evaluated or predicted once each
    ├── BatchNormError (RuntimeError)        statistics of all ranks cannot be had
    │   ├── BatchNormInputError (ValueError) an input of the wrong kind, or one value a channel on all ranks
    │   └── BatchNormMismatchError           ranks are in different layers
    ├── DivergenceError (RuntimeError)       ranks that should be alike are not
    ├── LogMismatchError (RuntimeError)      ranks have logged different values that are reduced together
    └── RankFailedError (RuntimeError)       another rank raised, and so this one stopped
        ├── RankDiedError                    another rank's process, host or network is gone
        ├── RankAbsentError                  a rank does not come to a call that every rank must make
        ├── RankMismatchError                a rank makes another call than the others
        ├── RankHungError                    nothing moves any more, because of a rank that is stuck
        └── RankLeftError                    another rank has ended while this one still needed it

A message says field, rule, value and remedy, in this order where all four exist. A traceback ends with the address of
the error in the documentation.
"""

from __future__ import annotations

import pickle
from functools import partial
from os import PathLike


class DDPExtError(Exception):
    """Base of all errors of this package: ``except DDPExtError`` catches each of them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        ours = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)  # the user may have a subclass
        address = f"reference/errors.html#{ours.__name__}"
        # Python prints notes below the message, from 3.11 on.
        self.__notes__ = [f"See {address} in the documentation of lightning-ddp-ext."]


class ConfigurationError(DDPExtError, ValueError):
    """A value that the user chose cannot work; nothing has been started yet."""


class InitMethodError(ConfigurationError):
    """``init_method``, ``run_id`` or their environment variables are wrong."""


class WorldError(ConfigurationError):
    """Rank, world size, local rank, devices or nodes do not fit together."""


class DurationError(ConfigurationError):
    """A timeout is not a positive number of seconds."""


class OptionError(ConfigurationError, TypeError):
    """An argument of that name does not exist; also a ``TypeError``, as for any Python call."""


class SamplerError(ConfigurationError):
    """An argument of a sampler cannot work, or the state that it was given is another sampler's."""


class ConversionError(ConfigurationError):
    """BatchNorm layers cannot be converted as was asked: a name that no layer has, say."""


class RendezvousError(DDPExtError, RuntimeError):
    """The ranks could not find each other."""


class StoreError(RendezvousError):
    """The store of an init method cannot be opened, cannot be reached, or is somebody else's."""


class MissingRanksError(RendezvousError):
    """Some ranks did not come within ``init_timeout``.

    Attributes:
        missing: the ranks that did not come, ascending.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class DuplicateRankError(RendezvousError):
    """Two processes claim one rank; raised on every rank."""


class DisagreementError(RendezvousError):
    """Ranks have different world sizes, init methods or versions; raised on every rank."""


class GroupInUseError(DDPExtError, RuntimeError):
    """This process already belongs to a process group, and what is asked for now does not fit it."""


class CheckpointError(DDPExtError, RuntimeError):
    """A checkpoint could not be written or read; raised on every rank."""


class CheckpointSaveError(CheckpointError, OSError):
    """A checkpoint could not be written. What stood at the path before is untouched.

    Attributes:
        path: where it was to be.
        errno: the system's number of the error, if it came from the system.
    """

    def __init__(self, message: str, *, path: str | PathLike[str] = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno

    def __str__(self) -> str:
        return str(self.args[0])  # OSError would look for a file name and an error number

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), path=self.path, errno=self.errno), (str(self),)


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no such file, on rank 0 or on another rank that has to read it by itself."""


class DamagedCheckpointError(CheckpointError):
    """A file is truncated or has been altered, or is no checkpoint.

    Attributes:
        damaged: names of the tensors or records whose content is not what was written, as far as they are known.
    """

    def __init__(self, message: str, damaged: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.damaged = damaged


class UnsafeCheckpointError(CheckpointError, pickle.UnpicklingError):
    """A file holds something other than data, and ``weights_only=True``; nothing of it has been run."""


class CheckpointMismatchError(CheckpointError):
    """Keys are missing or unexpected, or shapes differ from the model's."""


class SamplingError(DDPExtError, RuntimeError):
    """Data cannot be shared out among the ranks as was asked."""


class ResumeError(SamplingError):
    """An epoch cannot be continued at the place where the checkpoint has left it."""


class UnevenInputsError(SamplingError):
    """The ranks have different numbers of training batches, and would wait for one another."""


class ExactEvaluationError(SamplingError):
    """Samples cannot be evaluated or predicted exactly once each."""


class BatchNormError(DDPExtError, RuntimeError):
    """A BatchNorm layer cannot have the statistics of all ranks' batches together."""


class BatchNormInputError(BatchNormError, ValueError):
    """A batch, or the ranks' batches together, cannot be normalised; also a ``ValueError``, as torch raises."""


class BatchNormMismatchError(BatchNormError):
    """Ranks are in different BatchNorm layers, or in different passes; raised on every rank that meets such another."""


class DivergenceError(DDPExtError, RuntimeError):
    """The ranks have different parameters, buffers, optimiser states, models or options; raised on every rank.

    Attributes:
        ranks: those that differ from most others, ascending; of equally many, from those with the lowest rank.
        names: what differs.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.names = names


class LogMismatchError(DDPExtError, RuntimeError):
    """Ranks have logged different values with ``sync_dist=True``; raised on every rank."""


class RankFailedError(DDPExtError, RuntimeError):
    """Another rank raised an exception, and this rank was stopped because of it.

    Attributes:
        rank: the first rank that failed.
        host: the name of its host.
        pid: its process id there.
        traceback_text: its traceback as that rank would print it; empty if it left none.
    """

    def __init__(self, message: str, *, rank: int, host: str, pid: int, traceback_text: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.pid = pid
        self.traceback_text = traceback_text

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException's own __reduce__ knows nothing of keyword-only arguments.
        make = partial(type(self), rank=self.rank, host=self.host, pid=self.pid, traceback_text=self.traceback_text)
        return make, (str(self),)


class RankDiedError(RankFailedError):
    """Another rank's process was killed, or its host or network is gone."""


class RankAbsentError(RankFailedError):
    """Some ranks made a call that every rank must make, such as ``trainer.save_checkpoint``; ``rank`` did not."""


class RankMismatchError(RankFailedError):
    """Ranks wait for each other in different calls, such as barriers of different names; ``rank`` is the odd one."""


class RankHungError(RankFailedError):
    """Nothing moves any more, and ``rank`` is why; see ``HangWatchdog``. On that rank, too, once it is awake."""


class RankLeftError(RankFailedError):
    """Another rank had finished and gone while this one still needed it for a collective."""
