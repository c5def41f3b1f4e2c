"""The server of rank processes imports this last: it does what each rank would otherwise do anew.

When coverage starts, it notes who has started it, for which ``inspect`` looks once at the file of every module that
there is. Together with the import of coverage that takes more than half of the time in which a rank is started. And at
its end each rank would take back what torch has registered in the server: half of what a rank costs by itself.
"""

from __future__ import annotations

import inspect
import sys
import weakref

import coverage.multiproc  # noqa: F401

inspect.stack()
sys.dont_write_bytecode = False  # whatever the test run was told: each rank would compile the package anew
for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
    finalizer.atexit = False
