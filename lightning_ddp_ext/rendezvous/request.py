"""What a Trainer asks of the rendezvous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from socket import socket
from typing import Literal

import torch

from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.world import World


@dataclass(frozen=True)
class Request:
    """What a Trainer asks of the rendezvous.

    Attributes:
        world: who this process is.
        init_method: how the ranks meet, as a URL for people.
        is_explicit: whether the user chose it.
        where: the address of the TCP store, or the path of the store's file.
        hosted_by: who opens the TCP store's server: rank 0, the process that launched the ranks, or a launcher
            that is not ours and shares its own store (torchrun's agent).
        backend: of the process group, such as ``gloo``.
        device: what this rank computes on.
        timeout: of a collective; ``None`` for the backend's default.
        init_timeout: of the whole start-up.
        versions: of the packages that must be alike on all ranks.
        listener: the socket of the store's server, where the launching process has bound it.
        bad_news: a sentence once the launching process knows that a rank cannot come any more.
    """

    world: World
    init_method: str
    where: Tcp | str
    backend: str
    device: torch.device
    timeout: timedelta | None
    init_timeout: timedelta
    is_explicit: bool = True
    hosted_by: Literal["rank 0", "launcher", "agent"] = "rank 0"
    versions: dict[str, str] = field(default_factory=dict)
    listener: socket | None = None
    bad_news: Callable[[], str | None] = lambda: None
