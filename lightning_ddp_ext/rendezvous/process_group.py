"""The process groups of this process: how they are formed, cut and closed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rank_logger import rank_logger
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.rendezvous.sockets import Sockets, interface_of, sockets_opened

_logger = rank_logger(__name__, ranks=0)  # for what is the same on all


class ProcessGroups:
    """The default process group and the others that the package forms.

    Args:
        request: of the first Trainer.
        store: in which the groups are formed; no other start has used it.
        route: the address of this host that other hosts can reach; empty where all ranks are on one.
    """

    def __init__(self, request: Request, store: Store, route: str) -> None:
        self._request = request
        self._store = store
        self._route = route
        self._formed = 0
        self._is_open = False
        self._default: object = None
        self._others: dict[tuple[object, ...], dist.ProcessGroup] = {}
        self._kept: list[object] = []
        self._sockets: list[Sockets] = []

    def form_default(self, request: Request, deadline: Deadline) -> None:
        """Form the default group. Collective."""
        self._request = request
        self._formed += 1
        self._is_open = True
        self._sockets = []
        with self._noted_sockets(), self._interface_for_gloo():
            dist.init_process_group(
                request.backend,
                store=PrefixStore(f"group/{self._formed}", self._store),
                rank=request.world.rank,
                world_size=request.world.world_size,
                timeout=deadline.as_timedelta(),
                device_id=None if request.device.type == "cpu" else request.device,
            )
            # Whoever lets go of a group last waits for gloo's threads, and they may wait for the GIL. Python's own
            # reference alone gives the GIL up meanwhile, and DDP's does not, so this one must outlive the model's:
            # https://github.com/pytorch/pytorch/issues/56297. Without it 2 of 69 failing runs hung in teardown.
            self._default = dist.group.WORLD
            _check_group(request)
        _set_timeout(request.timeout)

    def form(self, ranks: Sequence[int], backend: str | None, purpose: str) -> dist.ProcessGroup:
        """Form a group of some ranks. Collective over all ranks."""
        deadline = Deadline(self._request.init_timeout.total_seconds())
        with self._noted_sockets(), self._interface_for_gloo():
            group: dist.ProcessGroup = dist.new_group(ranks, backend=backend, timeout=deadline.as_timedelta())
        _set_timeout(self._request.timeout, group)
        self._others[(*ranks, backend, purpose)] = group
        return group

    def known(self, ranks: Sequence[int], backend: str | None, purpose: str) -> dist.ProcessGroup | None:
        """The group that :meth:`form` has made for the same arguments."""
        return self._others.get((*ranks, backend, purpose))

    def set_timeout(self, timeout: timedelta | None) -> None:
        """Set the timeout of all groups' collectives."""
        for group in (None, *self._others.values()):
            _set_timeout(timeout, group)

    def cut(self) -> None:
        """End the connections of all groups: a thread that waits in a gloo collective gets an error."""
        for sockets in self._sockets:
            sockets.sever()

    def close(self, *, is_broken: bool) -> None:
        """End all groups of this process.

        Args:
            is_broken: whether other ranks may have abandoned a collective. NCCL's groups are aborted then: to destroy
                one is to wait for its kernels.
        """
        was_open, self._is_open = self._is_open, False
        if not was_open or not dist.is_initialized():
            self._others.clear()
            return
        # What still refers to the group must go before it and its leftovers with it, or gloo's threads outlive
        # their owner and abort the process at its end: 9 of 50 processes without these two lines.
        gc.collect()
        if is_broken and "nccl" in self._request.backend:
            abort_group()
        else:
            dist.destroy_process_group()
        self._kept.extend(self._others.values())  # as long as the default one, and for the same reason
        self._others.clear()
        gc.collect()

    def release(self) -> None:
        """Let go of the closed groups."""
        self._default = None
        self._kept.clear()

    @contextmanager
    def _noted_sockets(self) -> Iterator[None]:
        """The sockets of a group that is formed in the block: they can be cut from now on."""
        with sockets_opened() as sockets:
            self._sockets.append(sockets)
            yield

    @contextmanager
    def _interface_for_gloo(self) -> Iterator[None]:
        """Make gloo use the network that joins the hosts, where it would take the one the host's name stands for."""
        variable = "GLOO_SOCKET_IFNAME"
        interface = interface_of(self._route) if self._route and variable not in os.environ else None
        if interface is None:
            yield
            return
        os.environ[variable] = interface
        try:
            yield
        finally:
            del os.environ[variable]


def abort_group() -> None:
    """End all groups of this process without waiting for any other rank."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    with suppress(Exception):
        (abort or dist.destroy_process_group)()


def _check_group(request: Request) -> None:
    """One small collective: a group that cannot do that is better found out now than in the first step."""
    ones = torch.ones(1, device=request.device)
    dist.all_reduce(ones)
    if int(ones.item()) != request.world.world_size:
        raise RendezvousError(
            f"the {request.backend} group adds {request.world.world_size} ones to {int(ones.item())}; "
            "check the network between the hosts and the backend's settings"
        )


def _set_timeout(timeout: timedelta | None, group: dist.ProcessGroup | None = None) -> None:
    if not isinstance(group, dist.ProcessGroup | None):  # what stands for a group that this rank is not in
        return
    setter = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    default = getattr(dist.distributed_c10d, "_get_default_timeout", None)
    if setter is None or default is None:
        _logger.warning(
            "torch %s has no _set_pg_timeout: collectives use init_timeout as their timeout; tell us, please",
            torch.__version__,
        )
        return
    setter(timeout or default(dist.get_backend(group)), group)
