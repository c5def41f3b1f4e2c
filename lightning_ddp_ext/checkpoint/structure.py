"""Read an entry of a checkpoint file without its tensors.

No class in the file is imported or run.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.checkpoint.load import Archive, reading
from lightning_ddp_ext.checkpoint.location import Location


def entry_of(location: Location, key: str) -> Any:
    """Return an entry of a checkpoint; ``None`` if the file lacks it.

    A placeholder replaces objects. The result is also ``None`` for a file that cannot
    be unpickled or has no checksums, as one from before torch 1.6.

    Raises:
        DamagedCheckpointError: the file is empty, truncated, altered, or not a
            checkpoint.
        CheckpointError: the file is missing or cannot be read; the error of its file
            system is the cause.
    """
    with reading(location.url), location.fs.open(location.path, "rb") as file:
        archive = Archive(file, location.url)
        if not archive.has_checksums:
            return None
        archive.check(count=0)
        pickled = archive.read_pickle()
    try:
        content = _Unpickler(io.BytesIO(pickled)).load()
    except Exception:  # another program's file may contain any pickle
        return None
    return content.get(key) if isinstance(content, dict) else None


class _Ignoring(type):
    """The class of the placeholder: calling it, as REDUCE does, has no effect."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def _ignore(cls, *args: Any) -> None:
        pass

    __setitem__ = __setstate__ = append = extend = add = _ignore


class _Ignored(metaclass=_Ignoring):
    """Stands for classes, functions and objects, so that none of their code runs.

    Pickle's NEWOBJ calls ``__new__``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str) -> Any:
        return _Ignored

    @override
    def persistent_load(self, pid: Any) -> Any:
        return None
