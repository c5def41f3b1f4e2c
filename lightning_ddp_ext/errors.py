"""The errors that this package raises.

::

    DDPExtError
    ├── ConfigurationError (ValueError)      a setting is invalid
    ├── RendezvousError (RuntimeError)       the ranks could not connect
    ├── CheckpointError (RuntimeError)       a checkpoint could not be written, read or removed
    │   ├── CheckpointSaveError (OSError)    not written
    │   └── DamagedCheckpointError           truncated, altered, or not a checkpoint
    ├── SamplingError (RuntimeError)         data cannot be divided, or predictions not joined
    ├── BatchNormError (RuntimeError)        a layer cannot use the statistics of all ranks
    ├── DivergenceError (RuntimeError)       the ranks differ in weights or logged values
    └── RankFailedError (RuntimeError)       another rank failed or exited, so this rank stops
        ├── RankDiedError                    another rank was killed, or its host is unreachable
        └── RankAbsentError                  a rank did not make the call that the others made

A message names the field, the rule, the value and the remedy, in this order. A
traceback ends with a reference to the page that describes the error.
"""

from __future__ import annotations

from os import PathLike

__all__ = [
    "BatchNormError",
    "CheckpointError",
    "CheckpointSaveError",
    "ConfigurationError",
    "DDPExtError",
    "DamagedCheckpointError",
    "DivergenceError",
    "RankAbsentError",
    "RankDiedError",
    "RankFailedError",
    "RendezvousError",
    "SamplingError",
]


class DDPExtError(Exception):
    """The base class of all errors of this package.

    Keyword arguments become attributes of the error; pickling keeps these attributes.
    """

    def __init__(self, *args: object, **attributes: object) -> None:
        super().__init__(*args)
        vars(self).update(attributes)
        # The user may have a subclass.
        ours = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)
        page = f"docs/reference/errors.md#{ours.__name__.lower()}"
        self.add_note(f"See {page} in the repository of lightning-ddp-ext.")


class ConfigurationError(DDPExtError, ValueError):
    """A setting is invalid.

    The message names the argument or variable, and a value that works.
    """


class RendezvousError(DDPExtError, RuntimeError):
    """The ranks could not connect, or their settings differ.

    It is raised on every rank that connected or tried to.

    Attributes:
        missing: the ranks that did not connect within ``init_timeout``, ascending.
    """

    missing: tuple[int, ...] = ()


class CheckpointError(DDPExtError, RuntimeError):
    """A checkpoint could not be written, read or removed."""


class CheckpointSaveError(CheckpointError, OSError):
    """A checkpoint could not be written.

    The message names the path.

    Attributes:
        path: the path of the checkpoint.
        errno: the operating system's error number, if it reported one.
    """

    path: str | PathLike[str] = ""
    errno: int | None = None


class DamagedCheckpointError(CheckpointError):
    """A file is truncated, altered or not a checkpoint.

    Attributes:
        damaged: names of the records whose content was altered, if known.
    """

    damaged: tuple[str, ...] = ()


class SamplingError(DDPExtError, RuntimeError):
    """Data cannot be divided among the ranks, or their predictions cannot be joined."""


class BatchNormError(DDPExtError, RuntimeError):
    """A BatchNorm layer cannot normalise with the statistics of all ranks."""


class DivergenceError(DDPExtError, RuntimeError):
    """The ranks differ in parameters, optimiser states or logged values, or would soon.

    Attributes:
        ranks: the ranks that differ from the largest group of equal ranks, ascending; of
            several such groups, from the one with the lowest rank.
        names: the names of the values that differ.
    """

    ranks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


class RankFailedError(DDPExtError, RuntimeError):
    """Another rank failed or exited while this rank needed it, so this rank stops.

    Attributes:
        rank: the first rank that failed.
        host: the name of its host.
        pid: its process id there.
        traceback_text: its traceback, as that rank prints it; empty if it sent none.
    """

    rank: int
    host: str
    pid: int
    traceback_text: str = ""


class RankDiedError(RankFailedError):
    """Another rank's process was killed, or its host or network is unreachable."""


class RankAbsentError(RankFailedError):
    """``rank`` did not make a collective call that others made, or does not reply."""
