"""Memory that was mapped from a file becomes this process's own without moving, so that nobody who uses it notices.

A tensor's memory can have users that Python does not find: NumPy arrays, the inner tensors of sparse ones and of
subclasses, what autograd has saved. To give each of them other memory cannot succeed, and a NumPy array that is
forgotten would be left with an address where nothing is. To put other pages below the same addresses can.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from typing import Any

_MAY_MOVE, _FIXED = 1, 2  # of mremap
_POPULATE_WRITE = 23  # of madvise, since Linux 5.14; before, it does nothing
_FAILED = ctypes.c_void_p(-1).value


def make_own(address: int, size: int, needed: Iterable[tuple[int, int]]) -> None:
    """Replace a mapped file by memory with the same content at the same addresses, in one step.

    Where the system cannot do that (it is Linux's ``mremap``) the file stays mapped.

    Args:
        address: where the mapping begins.
        size: its bytes.
        needed: address and bytes of each part in use; whatever else was there is void, and takes no memory.

    Raises:
        OSError: there is not enough memory.
    """
    if _libc is None or address % mmap.PAGESIZE:
        return
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    own = _address(
        _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    )
    for start, count in needed:
        first = (own + start - address) // mmap.PAGESIZE * mmap.PAGESIZE
        # Faster than one page fault after another; huge pages are slower, where memory has been in use for a while.
        _libc.madvise(first, own + start - address + count - first, _POPULATE_WRITE)
        _libc.memcpy(own + start - address, start, count)
    _address(_libc.mremap(own, length, length, _MAY_MOVE | _FIXED, address))


def _address(result: int | None) -> int:
    if result is None or result == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _find_libc() -> Any:
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
        libc.madvise.argtypes = [pointer, size, number]
        libc.memcpy.argtypes = [pointer, pointer, size]
        libc.mremap.argtypes = [pointer, size, size, number, pointer]
        libc.mmap.restype = libc.mremap.restype = libc.memcpy.restype = pointer
    except (OSError, AttributeError):
        return None
    return libc


_libc = _find_libc()
