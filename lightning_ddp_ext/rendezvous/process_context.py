"""Connect this process to the other ranks with :func:`join`, for all its Trainers.

The connections normally stay open until exit. To turn a request into a process group,
:func:`join` calls ``handshake.connect``, which returns the ``Connections``, and then
``ProcessGroups.form_default``.
"""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_ddp_ext.errors import ConfigurationError, DDPExtError
from lightning_ddp_ext.rank_logger import rank_logger
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.handshake import Connections, connect
from lightning_ddp_ext.rendezvous.named_barrier import NamedBarriers
from lightning_ddp_ext.rendezvous.nccl_options import check_variables
from lightning_ddp_ext.rendezvous.peers import Peers, event_of
from lightning_ddp_ext.rendezvous.process_group import ProcessGroups, exit_if_stuck
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.rendezvous.runs import start_run
from lightning_ddp_ext.threads import use_device

_logger = rank_logger(__name__, ranks=0)  # for messages that are the same on all ranks


class ProcessContext:
    """The channel, the store and the groups that this process shares with other ranks.

    Args:
        request: the request of the first Trainer.
        connections: the results of the handshake.

    Attributes:
        peers: the other ranks, and their failures and departures.
        barriers: the named barriers.
        groups: the process groups.
        session: what ``supervision.session`` keeps as long as these connections; Any,
            since this subpackage must not import that one.
    """

    def __init__(self, request: Request, connections: Connections) -> None:
        self.session: Any = None
        self._connections = connections
        self.groups = ProcessGroups(request, connections)
        self.peers = Peers(
            request.world.rank,
            connections.table,
            connections.channel,
            request.timeouts,
            self.groups.abort,
        )
        self.peers.handle_events()  # an earlier one may abort the groups
        self.barriers = NamedBarriers(self.peers)

    # Groups.

    def new_group(self, *, backend: str | None = None, purpose: str = "") -> dist.ProcessGroup:
        """Return a group of all ranks that closes with the default group.

        The first call is collective over all ranks.

        Args:
            backend: as in ``torch.distributed.new_group``.
            purpose: the use of the group, for messages; calls with the same arguments
                return the same group.
        """
        key = (backend, purpose)
        if key not in self.groups.others:
            # Without the barrier, a rank would wait in the store for one that failed or
            # is elsewhere.
            self.barriers.enter(f"forming a group for {purpose}" if purpose else "forming a group")
            with self.forming():
                self.groups.form(key, backend)
        return self.groups.others[key]

    @contextmanager
    def forming(self) -> Iterator[None]:
        """End this rank's wait in the store if another rank exits while the block runs.

        The block counts as a run: if nothing ends its wait, the process has to exit.
        """
        with start_run(), self.groups.forming():
            self.peers.check()  # within, so that no failure is missed: see `ProcessGroups`
            yield

    # Failure and close.

    @property
    def has_arbitrary_values(self) -> bool:
        """Whether collectives may have returned arbitrary values.

        This is so if NCCL was aborted for another reason than this rank's own
        exception.
        """
        cause = self.peers.cause
        if cause is None or not self.groups.has_aborted_nccl:
            return False
        return cause.kind != "failed" or cause.who != self.peers.mine

    def announce_failure(self, exception: BaseException, traceback_text: str) -> None:
        """Report to the other ranks why this one cannot continue, and close the groups.

        It does not raise, and only waits shortly.
        """
        self.peers.record_raised()
        self.peers.report(event_of("failed", self.peers.mine, reason_of(exception), traceback_text))
        self.close_group()

    def close_group(self) -> None:
        """Abort and close this rank's part in all groups, after a failure.

        This unblocks ranks that are waiting for it in a collective.
        """
        # A traceback's frames may keep the group's C++ objects alive, so destroying the
        # group might close nothing.
        self.groups.abort()
        self.groups.close(is_broken=True)
        self.peers.record_raised()

    def close(self) -> None:
        """Close groups that are still open, the channel and the store.

        Called once, as the last method.
        """
        try:
            self.groups.close(is_broken=self.peers.cause is not None)
        finally:
            self.groups.release()
            self._connections.channel.close()
            self.peers.record_raised()


# The context of this process.

_current: ProcessContext | None = None  # set and used by the main thread; others read it


def current() -> ProcessContext | None:
    """Return this process's context; ``None`` while it is not connected."""
    return _current


def join(request: Request) -> ProcessContext | None:
    """Connect to the other ranks and form the process group.

    Collective: every rank must call it.

    A process connects once. A later call

    - uses the groups, with its own timeout, if their settings are the same;
    - leaves and connects again for another backend or other variables, after a failure
      that all ranks survived, and if the script has destroyed the group;
    - connects to other ranks if this process was the only one, or works alone;
    - raises if anything else differs.

    Returns:
        The context; ``None`` if other code opened the default process group, which is
        then used.

    Raises:
        ConfigurationError: the environment has a different value for a variable of the
            request, or this process already has a group that does not match.
        RendezvousError: the ranks did not connect within ``init_timeout``.
        RankFailedError: a rank died or failed, earlier or during this call.
    """
    global _current
    use_device(request.device)
    if _current is not None:
        request = request.completed_from(_current.groups.request)
        _check_further_request(request, _current)
        if _can_use_groups(request, _current):
            _current.groups.serve(request)
            return _current
        _warn_of_changed_variables(_current.groups, request)
        leave()
    if dist.is_initialized():
        _check_foreign_group(request)
        return None
    _current = _open(request)
    _at_exit(leave)
    return _current


def _open(request: Request) -> ProcessContext:
    """Connect to the other ranks, and form the default group. Collective.

    Raise the error of another rank that prevented the group. Otherwise, report this
    rank's own error, and raise it.
    """
    check_variables(request.variables)
    _at_exit(exit_if_stuck)  # before `leave` is registered, so it runs after that
    connections = connect(request, Deadline(request.init_timeout.total_seconds()))
    context = ProcessContext(request, connections)
    try:
        with context.forming():
            context.groups.form_default()
    except BaseException as error:
        # Another rank's failure may have broken the store or the backend.
        is_explained = isinstance(error, DDPExtError)
        event = context.peers.wait(0.0 if is_explained else context.peers.timeouts.first_cause)
        if event is None:
            context.announce_failure(error, "")
            context.close()
            raise
        context.close_group()
        context.close()
        cause = event.to_error()
        raise cause from cause.__cause__
    return context


def leave() -> None:
    """Close the groups, the channel and the store; every process does so at exit.

    A strategy's ``teardown`` must not call this function: hooks and a second ``fit``
    still need the group.
    """
    global _current
    context = _current
    _current = None
    if context is not None:
        context.close()


# Whether a request matches earlier connections or groups.


def _check_further_request(request: Request, context: ProcessContext) -> None:
    """Raise if another Trainer's request cannot follow that of the connected ranks.

    Raises:
        ConfigurationError: the request has another rank, world size or init method.
        RankFailedError: a rank died, or a rank failed and this rank has not raised the
            error yet.
    """
    connected = context.groups.request
    # A script may destroy the group, to test each sample once on one device.
    works_alone_now = request.world.world_size == 1 and not dist.is_initialized()
    if connected.world.world_size > 1 and not works_alone_now:
        request.check_same_ranks(connected)
        context.peers.check_unhandled()


def _can_use_groups(request: Request, context: ProcessContext) -> bool:
    """Whether another Trainer, whose request has been checked, can use the groups."""
    return (
        context.peers.cause is None
        and request.group_settings == context.groups.request.group_settings
        and context.groups.owns_default
    )


def _warn_of_changed_variables(groups: ProcessGroups, request: Request) -> None:
    if groups.uses_nccl and request.variables != groups.request.variables:
        _logger.warning(
            "this Trainer sets other variables of NCCL than an earlier one, but NCCL reads most"
            " of them only once in a process; run it in a separate script"
        )


def _check_foreign_group(request: Request) -> None:
    """Raise if the group that other code opened does not match; otherwise, warn.

    Raises:
        ConfigurationError: the request has another rank or world size, or an init method.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    world = request.world
    if request.is_explicit or (rank, world_size) != (world.rank, world.world_size):
        raise ConfigurationError(
            f"a process group that lightning_ddp_ext did not open is in use (rank {rank} of"
            f" {world_size}), but this Trainer needs rank {world.rank} of {world.world_size} with"
            f" init_method {request.init_method}; call"
            " torch.distributed.destroy_process_group() before fit, or omit init_method"
        )
    _logger.warning(
        "using a process group that other code opened: init_timeout and timeout have no effect, "
        "and lightning_ddp_ext cannot detect dead ranks"
    )


# The exit of this process, and its forked children.

_parents_contexts: list[ProcessContext | None] = []  # in a forked child, until its exit


def _at_exit(action: Callable[[], None]) -> None:
    """Run ``action`` at the exit of this process.

    It also runs in children of multiprocessing, which skip ``atexit`` handlers.
    """
    # A Finalize runs only once, even if both of them call it, and only in the process
    # that has made it, not in forked children.
    atexit.register(multiprocessing.util.Finalize(None, action, exitpriority=100))


def _drop_in_child() -> None:
    """Drop the parent's context in a forked child, such as a loader worker."""
    global _current
    if _current is not None:
        _current.peers.channel.close_inherited_sockets()
    # Keep a reference: destroying a store joins threads, which only the parent has.
    _parents_contexts.append(_current)
    _current = None


os.register_at_fork(after_in_child=_drop_in_child)
