"""Have the ranks of a strategy find each other, under the options that it was given."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torchmetrics

from lightning_ddp_ext.rendezvous.init_method import Env
from lightning_ddp_ext.rendezvous.nccl_options import misspelt
from lightning_ddp_ext.rendezvous.process_context import current, join
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.supervision.exception_report import install_excepthook
from lightning_ddp_ext.supervision.rank_processes import started_ranks
from lightning_ddp_ext.supervision.survey import Survey

from .endpoints import endpoint_of
from .lightning_tree import lightning_name, lightning_version, rank_zero_info, rank_zero_warn

if TYPE_CHECKING:
    from .strategy import DDPExtStrategy


def join_ranks(request: Request) -> None:
    """Find the other ranks, form the process group, and log it. Collective: every rank must call it."""
    is_first = current() is None
    if is_first:
        for sentence in misspelt(os.environ):
            rank_zero_warn(sentence)
    context = join(request)
    install_excepthook()
    if context is None:
        return
    context.component(Survey)  # so that it answers the others
    if is_first:
        size = request.world.world_size
        ranks = "1 rank" if size == 1 else f"{size} ranks"
        rank_zero_info(f"process group: {request.backend}, {ranks}, {request.init_method}")


def request_of(strategy: DDPExtStrategy) -> Request:
    """What a strategy asks of the rendezvous."""
    started, method = started_ranks(), strategy.chosen_init_method
    request = Request(
        world=strategy.world,
        init_method=str(method or Env()),
        is_explicit=method is not None,
        endpoint=endpoint_of(strategy),
        backend=strategy._get_process_group_backend(),
        device=strategy.root_device,
        timeout=strategy._timeout,
        init_timeout=strategy.init_timeout,
        versions=_versions(),
        absence=started.scripts.failure if started is not None else lambda: None,
        timeouts=strategy.timeouts,
    )
    return request if strategy.debugged is None else strategy.debugged.without_limits(request)


def _versions() -> dict[str, str]:
    from lightning_ddp_ext import __version__

    return {
        "torch": str(torch.__version__),
        lightning_name: lightning_version,
        "torchmetrics": torchmetrics.__version__,
        "lightning_ddp_ext": __version__,
    }
