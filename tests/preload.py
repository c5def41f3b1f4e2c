"""The server of rank processes imports this last: what coverage would otherwise do anew in every rank that it measures.

When coverage starts, it notes who has started it, for which ``inspect`` looks once at the file of every module that
there is. Together with the import of coverage that takes more than half of the time in which a rank is started.
"""

from __future__ import annotations

import inspect

import coverage.multiproc  # noqa: F401

inspect.stack()
