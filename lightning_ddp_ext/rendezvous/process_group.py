"""Form, abort and close the process groups of this process.

The main thread forms and closes them. Any thread may abort them, which is how the
channel's thread unblocks the main thread after another rank's failure.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.forced_exit import exit_now
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.handshake import Connections
from lightning_ddp_ext.rendezvous.nccl_options import GLOO_INTERFACE
from lightning_ddp_ext.rendezvous.network import interface_of
from lightning_ddp_ext.rendezvous.opened_sockets import OpenedSockets
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.threads import start_thread

_ONLY_NCCL = ("nccl", "cuda:nccl")
# torch's default timeouts for collectives.
_NCCL_TIMEOUT = timedelta(minutes=10)
_OTHER_TIMEOUT = timedelta(minutes=30)
# With torch's default of 1, its watchdog thread ends the process 0.1 s after an error of
# CUDA, before the main thread reports it, or in the middle of a save. With 0, it logs
# every error and ends; torch's heartbeat monitor then ends a process that hangs, 8
# minutes later. torch means to log only errors of CUDA, but negates the result of
# std::string::find: see Watchdog::run in its ProcessGroupNCCL.cpp.
_NCCL_DEFAULTS = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
_ABORTING = "ddpx-abort"  # the name of the threads that abort NCCL
_ABORT_SECONDS = 5.0  # the longest wait for an abort of NCCL
# After a timeout, torch's NCCL watchdog terminates the process from C++, so the rank
# that waited would count as dead. At our timeout the statuses show the missing rank;
# torch's timeout is later and only a fallback.
_NCCL_SLACK = timedelta(minutes=1)


class ProcessGroups:
    """The default process group and the others that the package forms.

    An object serves one connection to the other ranks. Making it sets environment
    variables, and ``close`` removes them.

    ========  ==========================  =============================================
    state     begins with                 ``abort`` then ends
    ========  ==========================  =============================================
    forming   :meth:`forming`, for each   NCCL, and all connections of groups and of the
              group                       store
    open      the end of :meth:`forming`  NCCL, and the connections of groups, except
                                          those of a default group that uses only NCCL
    closed    :meth:`close`               NCCL, if it was aborted before
    ========  ==========================  =============================================

    Closed groups are referenced until :meth:`release`. ``close`` calls it unless other
    ranks may have abandoned a collective.

    Args:
        request: the settings of the first Trainer.
        connections: the results of the handshake, with the store in which groups are
            formed.

    Attributes:
        request: the settings of the Trainer that uses the groups.
        others: all open groups except the default one, by the key of :meth:`form`.
        has_aborted_nccl: whether NCCL was aborted. Kernels that waited for other ranks
            then returned partial sums, and work that was queued behind them, such as an
            optimiser step, used these.
    """

    def __init__(self, request: Request, connections: Connections) -> None:
        self.request = request
        self.others: dict[object, dist.ProcessGroup] = {}
        self.has_aborted_nccl = False
        self._connections = connections
        # Both until `release`, which gives the reason: the default group, from its
        # forming, and the others, from `close`.
        self._default: dist.ProcessGroup | None = None
        self._closed: list[dist.ProcessGroup] = []
        # For `abort` in another thread, see `forming`: the sockets of each group until
        # `close`, the default group's first.
        self._is_forming = False
        self._sockets: list[OpenedSockets] = []
        # Held while a thread aborts NCCL: the channel's thread and the main one may both
        # start such threads.
        self._aborting = threading.Lock()
        # An exported variable stays: `check_variables` has compared the values.
        self._variables = {
            name: value
            for name, value in self._required_variables().items()
            if name not in os.environ
        }
        os.environ.update(self._variables)

    def _required_variables(self) -> dict[str, str]:
        """Return the request's environment variables, and those that the groups need."""
        defaults = _NCCL_DEFAULTS if self.uses_nccl else {}
        # By default, gloo uses the network to which the host's name resolves, which may
        # not connect the hosts.
        route = self._connections.route
        interface = interface_of(route) if route else None
        gloo = {} if interface is None else {GLOO_INTERFACE: interface}
        return {**defaults, **gloo, **self.request.variables}

    @property
    def uses_nccl(self) -> bool:
        """Whether the default group uses NCCL."""
        return "nccl" in self.request.backend

    @property
    def owns_default(self) -> bool:
        """Whether the default group is open, and this object formed it."""
        return dist.is_initialized() and dist.group.WORLD is self._default

    @property
    def timeout(self) -> timedelta:
        """The timeout of collectives."""
        return self.request.timeout or (_NCCL_TIMEOUT if self.uses_nccl else _OTHER_TIMEOUT)

    def form_default(self) -> None:
        """Form the default group, and check that it works.

        Collective; within :meth:`forming`.

        Raises:
            RendezvousError: the backend did not connect the devices within
                ``init_timeout``; without a limit of ours, NCCL might never return, see
                https://github.com/pytorch/pytorch/issues/88103. Or a collective
                returned a wrong value.
        """
        timeout = self._with_slack(self.request.init_timeout)
        limit = Deadline(self.request.init_timeout.total_seconds())
        try:
            limit.bound(partial(self._form_and_check, timeout))
        except TimeoutError:
            raise self._error_about(
                f"did not connect its devices within {limit.seconds:g} s (init_timeout)"
            ) from None

    def _form_and_check(self, timeout: timedelta) -> None:
        request = self.request
        _reset_group_count()
        dist.init_process_group(
            request.backend,
            store=PrefixStore("group", self._connections.store),
            rank=request.world.rank,
            world_size=request.world.world_size,
            timeout=timeout,
            device_id=request.device if self._is_bound else None,
        )
        self._default = dist.group.WORLD
        total = torch.ones(1, device=request.device)
        dist.all_reduce(total)
        if total.item() != request.world.world_size:
            raise self._error_about(f"adds ones up to {total.item():g}")
        _set_timeout(None, self._with_slack(self.timeout))

    @property
    def _is_bound(self) -> bool:
        """Whether torch may bind the group to this rank's device.

        It then splits this group to form one of some ranks, which gloo cannot, and
        refuses tensors on other devices.
        """
        return self.uses_nccl and self.request.device.type == "cuda" and self.request.has_one_device

    def _error_about(self, finding: str) -> RendezvousError:
        remedy = f"look for messages of {self.request.backend} above"
        if self.uses_nccl:
            remedy += (
                ", or pass nccl=NCCLOptions(debug='INFO') to see how NCCL connects the devices"
            )
        return RendezvousError(
            f"the {self.request.backend} group of {self.request.world.world_size} ranks {finding};"
            f" {remedy}"
        )

    def form(self, key: object, backend: str | None) -> None:
        """Form a further group of all ranks. Collective; within :meth:`forming`."""
        group: dist.ProcessGroup = dist.new_group(
            backend=backend,
            # All ranks are here: they have passed a barrier.
            timeout=min(self.request.init_timeout, self.timeout),
        )
        _set_timeout(group, self._with_slack(self.timeout))
        self.others[key] = group

    def serve(self, request: Request) -> None:
        """Use the groups for another Trainer's request, with its timeout."""
        self.request = request
        for group in (None, *self.others.values()):
            _set_timeout(group, self._with_slack(self.timeout))

    def _with_slack(self, timeout: timedelta) -> timedelta:
        """Return the timeout for torch, which must act after this package with NCCL."""
        return timeout + (_NCCL_SLACK if self.uses_nccl else timedelta())

    @contextmanager
    def forming(self) -> Iterator[None]:
        """Record the sockets that the block opens, for :meth:`abort` in another thread.

        The block must begin with a check for failures. A failure is recorded before
        ``abort`` is called, so this needs no lock: either the check finds it, or
        ``abort`` finds what is set here.
        """
        self._is_forming = True
        try:
            with OpenedSockets() as sockets:
                self._sockets.append(sockets)
                yield
        finally:
            self._is_forming = False

    def abort(self) -> None:
        """Unblock threads that wait for other ranks; any thread may call it.

        Those in a collective or a store get an error. A collective of NCCL returns
        arbitrary values instead.
        """
        self._abort_nccl()
        # If the connections of NCCL's default group were shut down, other ranks would see
        # a remote error before NCCL is aborted there.
        keeps_default = self.request.backend in _ONLY_NCCL and not self._is_forming
        for sockets in self._sockets[1:] if keeps_default else self._sockets:
            sockets.abort()
        if self._is_forming and self._connections.store_sockets is not None:
            self._connections.store_sockets.abort()

    def _abort_nccl(self) -> None:
        """Abort NCCL's groups if there are any, even if they were aborted before.

        They are not destroyed instead, which would wait for their kernels.
        """
        # While the default group forms, torch has it before `_default`.
        is_formed_here = self.owns_default or self._default is None
        may_wait = (dist.is_initialized() and is_formed_here) or self.has_aborted_nccl
        if not self.uses_nccl or not may_wait:
            return
        self.has_aborted_nccl = True  # set before any wait for the device returns
        # An abort may wait for minutes: https://github.com/NVIDIA/nccl/issues/1777
        start_thread(_ABORTING, _abort_groups, self._aborting).join(_ABORT_SECONDS)

    def close(self, *, is_broken: bool) -> None:
        """Close all groups of this process, and remove the environment variables.

        ===================================  =============================  ============
        The default group                    is                             and released
        ===================================  =============================  ============
        works                                destroyed                      now
        is broken, and uses NCCL             aborted                        later
        is broken, and uses gloo             destroyed                      later
        is not open, or the user's           left alone                     as above
        ===================================  =============================  ============

        Later means by :meth:`release`: gloo's threads may still be busy. A second call
        has no effect, except that it may release groups.

        Args:
            is_broken: whether other ranks may have abandoned a collective.
        """
        if self.owns_default:
            # Objects that refer to the group must be freed before it, and its parts
            # together with it. Otherwise gloo's threads outlive their owner and abort
            # the process at exit: in 9 of 50 processes without gc.collect().
            gc.collect()
            if is_broken and self.uses_nccl:
                self._abort_nccl()
            else:
                dist.destroy_process_group()
            self._closed.extend(self.others.values())
            gc.collect()
        if not is_broken:
            self.release()
        self.others.clear()
        self._sockets.clear()
        for name in self._variables:
            os.environ.pop(name, None)
        self._variables.clear()

    def release(self) -> None:
        """Drop the last references to the closed groups, which frees their sockets.

        They must outlive the references of DDP: dropping the last one waits for gloo's
        threads, which may wait for the GIL. Python releases the GIL meanwhile, but DDP
        does not: https://github.com/pytorch/pytorch/issues/56297. Without this, 2 of 69
        failing runs hung in teardown.
        """
        self._closed.clear()
        self._default = None


# Private names of torch, each with its substitute.


def _reset_group_count() -> None:
    """Have torch count its groups from 0 again.

    This number is in the keys in the store. torch also counts a group that failed to
    form, perhaps not on every rank; the ranks would then not find each other's keys,
    and forming another group would time out. Without the private name, this does
    nothing.
    """
    with suppress(AttributeError):
        dist.distributed_c10d._world.group_count = 0


def _set_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Set the timeout of a group, ``None`` for the default group.

    Torch 2.15 deprecates the private name, which earlier versions have alone.
    """
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def _abort_groups(lock: threading.Lock) -> None:
    """Abort all groups of this process, and ignore errors; holds the lock meanwhile.

    Without the private name, they are destroyed, which may wait for their kernels.
    """
    abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    with lock, suppress(Exception):
        abort()


# At exit.


def exit_if_stuck() -> None:
    """Exit after everything else if an abort of NCCL did not return.

    The destructors of torch's groups would wait for it.
    """
    if any(thread.name == _ABORTING for thread in threading.enumerate()):
        exit_now(1)
