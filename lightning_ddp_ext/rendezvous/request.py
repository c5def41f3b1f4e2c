"""Describe what a Trainer requests, and what each rank sends when it connects."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import Endpoint
from lightning_ddp_ext.rendezvous.network import network_identity
from lightning_ddp_ext.world import World

NO_LIMIT = timedelta(days=365)


@dataclass(frozen=True)
class Timeouts:
    """Durations of the control channel, in seconds.

    Attributes:
        heartbeat: the silence after which the ranks of a host count as dead; a closed
            connection counts immediately.
        connect: the limit of one attempt to connect to rank 0.
        answer: how long a live process may take to reply, since its threads may wait
            for the GIL.
        after_refusal: how long rank 0 keeps listening, so that late ranks learn why the
            start failed.
        first_cause: how long a rank waits for the cause that explains a broken
            connection.
        deadlock: how long a rank waits in a call before rank 0 compares the calls of
            all ranks.
        grace: how long the main thread may take to raise before its process is forced
            to exit, by kind of event.
    """

    heartbeat: float = 30.0
    connect: float = 3.0
    answer: float = 5.0
    after_refusal: float = 3.0
    first_cause: float = 2.0
    deadlock: float = 10.0
    # A busy rank notices a failure at its next collective, and may then save.
    grace: dict[str, float] = field(
        default_factory=lambda: {"died": 3.0, "failed": 30.0, "absent": 30.0, "hung": 5.0}
    )


@dataclass(frozen=True)
class Request:
    """Settings of a Trainer for the rendezvous.

    Attributes:
        world: this process's place among all ranks.
        init_method: how the ranks find rank 0, as a URL for messages.
        make_endpoint: returns the way to find rank 0, and may use the time until a
            deadline; called if the ranks have to connect. It raises if the init method
            does not determine one.
        backend: the backend of the process group, such as ``gloo``.
        device: the device of this rank.
        timeout: the timeout of collectives; ``None`` for the backend's default.
        init_timeout: the timeout of the whole start-up.
        is_explicit: whether the user chose the init method.
        has_one_device: whether this rank's tensors are all on ``device``.
        variables: environment variables to set while the process group is open.
        run: the launcher's name for this run, which must be the same on all ranks;
            empty if it has none.
        launch_failure: returns a sentence if a rank exited and cannot connect.
        timeouts: the timeouts of the control channel.
    """

    world: World
    init_method: str
    make_endpoint: Callable[[Deadline], Endpoint]
    backend: str
    device: torch.device
    timeout: timedelta | None
    init_timeout: timedelta
    is_explicit: bool = True
    has_one_device: bool = True
    variables: dict[str, str] = field(default_factory=dict)
    run: str = ""
    launch_failure: Callable[[], str | None] = lambda: None
    timeouts: Timeouts = field(default_factory=Timeouts)

    @property
    def group_settings(self) -> tuple[object, ...]:
        """The settings that must be equal for two requests to use the same groups.

        With several ranks, the device is not one of them: the ranks would have to agree
        on whether any of them has another device.
        """
        device = self.device if self.world.world_size == 1 else None
        return self.world.world_size, self.backend, self.variables, self.has_one_device, device

    def completed_from(self, connected: Request) -> Request:
        """Return the request with the init method of ``connected`` if it has none."""
        if self.is_explicit or not connected.is_explicit:
            return self
        return replace(
            self,
            init_method=connected.init_method,
            make_endpoint=connected.make_endpoint,
            is_explicit=True,
        )

    def check_same_ranks(self, connected: Request) -> None:
        """Raise unless the ranks that are connected are those of this request.

        Raises:
            ConfigurationError: the request has another rank, world size or init method.
        """
        world = self.world
        place = connected.world
        if (world.rank, world.world_size) != (place.rank, place.world_size):
            raise ConfigurationError(
                f"this process is already rank {place.rank} of {place.world_size}, but"
                f" this Trainer needs it to be rank {world.rank} of {world.world_size}; use the"
                " same devices and num_nodes for every Trainer of a script, or call"
                " torch.distributed.destroy_process_group() before a Trainer with one device"
            )
        if self.is_explicit and self.init_method != connected.init_method:
            raise ConfigurationError(
                f"this process's group was formed with init_method {connected.init_method!r}, but"
                f" this Trainer requests {self.init_method!r}; use the same init_method for"
                " every Trainer of a script"
            )

    def without_limits(self) -> Request:
        """Return the request with time limits too long to apply, for a debugged rank."""
        timeouts = replace(
            self.timeouts,
            heartbeat=12 * 3600.0,  # the kernel accepts at most 27 hours
            deadlock=NO_LIMIT.total_seconds(),
        )
        return replace(self, timeout=NO_LIMIT, timeouts=timeouts)


@dataclass(frozen=True)
class RankInfo:
    """The process of a rank, as it describes itself when it connects.

    ``network`` is the same for processes that can reach each other by loopback, and
    ``run`` is the launcher's name for the run.
    """

    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    network: str = field(default_factory=network_identity)
    world_size: int = 0
    run: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"

    @staticmethod
    def of(values: dict[str, Any]) -> RankInfo | None:
        """Parse what a rank has sent; ``None`` if it is malformed."""
        try:
            info = RankInfo(**values)
            return info if info.rank in range(info.world_size) else None
        except TypeError:
            return None
