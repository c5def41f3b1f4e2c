"""Whether a rank is silent because somebody has stopped its process."""

from __future__ import annotations

from contextlib import suppress

import psutil

from lightning_ddp_ext.rendezvous.rank_table import RankInfo


def stopped_process(info: RankInfo, *, seen_from: RankInfo) -> psutil.Process | None:
    """The process of a rank, if it is one of the same host and somebody has stopped it (SIGSTOP)."""
    if (info.host, info.network) != (seen_from.host, seen_from.network):
        return None
    with suppress(psutil.Error):
        process = psutil.Process(info.pid)
        return process if process.status() == psutil.STATUS_STOPPED else None
    return None
