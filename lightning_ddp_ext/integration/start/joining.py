"""Connect the ranks of a strategy, at an address that its init method determines.

A process that starts ranks chooses how they find rank 0, and passes it on in variables:

=================================  =====================  ==============================
init method                        variables for ranks    rank 0
=================================  =====================  ==============================
``file://``                        none                   writes its address to the file
``tcp://``                         ``MASTER_ADDR``, …     listens at the address
``env://``, ranks on one node      ``DDPX_PRIVATE_FILE``  writes its address to the file
``env://``, several nodes          ``MASTER_ADDR``, …     listens at the address
``env://``, another launcher       the launcher's         listens at the address
``env://``, torchrun with a store  torchrun's             writes its address to it
=================================  =====================  ==============================

Without an init method, ``env://`` applies. A cluster environment with an address of
its own counts as several nodes.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

from lightning_ddp_ext.arguments import to_timedelta
from lightning_ddp_ext.errors import ConfigurationError, RendezvousError
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import (
    Endpoint,
    FileEndpoint,
    StoreEndpoint,
    TcpEndpoint,
    connect_store,
)
from lightning_ddp_ext.rendezvous.init_method import Env, File, InitMethod, Tcp, check_file, choose
from lightning_ddp_ext.rendezvous.nccl_options import NCCLOptions, variables_of
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.rendezvous.request import Request, Timeouts
from lightning_ddp_ext.supervision.excepthook import install_excepthook
from lightning_ddp_ext.supervision.launching_process import launcher_exit, stop_with_parent
from lightning_ddp_ext.supervision.session import start_session
from lightning_ddp_ext.supervision.started_ranks import started_ranks
from lightning_ddp_ext.world import OPEN_MPI, TORCHRUN, launcher_of, run_of

from ..private.compat import backend_of, timeout_of
from ..private.lightning_tree import (
    ClusterEnvironment,
    LightningEnvironment,
    TorchElasticEnvironment,
    rank_zero_info,
)
from .devices import RankDevicesStrategy
from .environment import world_of

INIT_TIMEOUT = timedelta(minutes=5)
HEARTBEAT_TIMEOUT = timedelta(seconds=30)
# The variable with the file of rank 0's address, if this package chose the file.
PRIVATE_FILE = "DDPX_PRIVATE_FILE"


class Rendezvous:
    """Where and how the ranks of a strategy connect.

    A process that starts ranks calls :meth:`start_variables` before, or
    :meth:`missing_variables` if another launcher has started them. Each rank then calls
    :meth:`join`. For the arguments, see ``DDPExtStrategy``.

    Attributes:
        init_method: the argument or the variable ``DDPX_INIT_METHOD``; ``None`` if
            neither is set.
        timeouts: the timeouts of the control channel.

    Raises:
        ConfigurationError: an argument is invalid.
    """

    def __init__(
        self,
        init_method: str | InitMethod | None,
        *,
        init_timeout: float | timedelta,
        heartbeat_timeout: float | timedelta,
        nccl: NCCLOptions | None,
        interface: str | None,
    ) -> None:
        self.init_method = choose(init_method, os.environ)
        # A configuration file may set None.
        self._init_timeout = to_timedelta(init_timeout, field="init_timeout") or INIT_TIMEOUT
        heartbeat = to_timedelta(heartbeat_timeout, field="heartbeat_timeout") or HEARTBEAT_TIMEOUT
        self.timeouts = Timeouts(heartbeat=heartbeat.total_seconds())
        self._variables = variables_of(nccl, interface)  # of NCCL and gloo

    # The address of rank 0.

    def start_variables(self, environment: ClusterEnvironment, num_nodes: int) -> dict[str, str]:
        """Return the variables that started ranks need to connect; see the table above.

        These do not include the init method. The ranks of one node do not need a port in
        advance, which this process would have to guess: the kernel chooses it for rank 0.
        """
        if isinstance(self.init_method, File):
            return {}
        has_address = (
            isinstance(self.init_method, Tcp)
            or _is_overridden("main_address", environment)
            or _is_overridden("main_port", environment)
        )
        if num_nodes == 1 and not has_address:
            return {PRIVATE_FILE: temporary_path()}
        return self._address_variables(environment)

    def _make_endpoint(
        self, environment: ClusterEnvironment, is_local: bool, deadline: Deadline
    ) -> Endpoint:
        """Return the way to find rank 0, in a rank; see the table above.

        Args:
            environment: the cluster environment.
            is_local: whether all ranks are on this host.
            deadline: the end of ``init_timeout``.

        Raises:
            ConfigurationError: the file cannot be created, or the environment's address
                is malformed.
            RendezvousError: the environment has no address, or the store cannot be used.
        """
        if isinstance(self.init_method, File):
            check_file(self.init_method)
            return FileEndpoint(self.init_method.path)
        if isinstance(self.init_method, Tcp):
            return TcpEndpoint(self.init_method, is_local=is_local)
        if PRIVATE_FILE in os.environ and is_local:  # the choice of `start_variables`
            return FileEndpoint(os.environ[PRIVATE_FILE], is_local=True)
        where = _env_address(environment)
        is_torchrun = isinstance(environment, TorchElasticEnvironment)
        if is_torchrun and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # Torchrun's own store listens at the address.
            store = connect_store(where.host, where.port, deadline)
            return StoreEndpoint(store, f"lightning_ddp_ext/{os.environ['TORCHELASTIC_RUN_ID']}")
        return TcpEndpoint(where, is_local=is_local)

    def missing_variables(self, environment: ClusterEnvironment) -> dict[str, str]:
        """Return the variables with rank 0's address that a launcher has not set.

        Lightning sets them on every rank, and users' code may read them.
        """
        if {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return {}
        # A user's environment may raise any error. If the ranks need the address to
        # connect, `join` raises it again.
        with suppress(Exception):
            return self._address_variables(environment)
        return {}

    def _address_variables(self, environment: ClusterEnvironment) -> dict[str, str]:
        method = self.init_method
        where = method if isinstance(method, Tcp) else _env_address(environment)
        return {"MASTER_ADDR": where.host, "MASTER_PORT": str(where.port)}

    # The connection of a rank.

    def join(self, strategy: RankDevicesStrategy, *, is_debugged: bool) -> None:
        """Connect the ranks and create the process group, unless that has happened.

        Log the first group of this process, and print exceptions of other ranks in one
        line from now on. Under torchrun and Open MPI, also stop with the launcher.
        Collective: every rank must call it.

        Args:
            strategy: the strategy of a Trainer.
            is_debugged: whether a rank is being debugged; time limits then do not apply
                in practice.

        Raises:
            ConfigurationError: the init method or a variable of the environment is
                invalid.
            DDPExtError: the ranks did not connect; see ``rendezvous.process_context.join``.
        """
        if launcher_of(os.environ) in (TORCHRUN, OPEN_MPI):
            stop_with_parent()  # other launchers stop their ranks themselves
        request = self._request(strategy)
        if is_debugged:
            request = request.without_limits()
        # Read before the ranks connect, which changes both: torch sets its own hook.
        is_first = current() is None
        hook = sys.excepthook
        if start_session(request) is None:  # other code opened the process group
            return
        install_excepthook(hook)
        if is_first:
            size = request.world.world_size
            ranks = "1 rank" if size == 1 else f"{size} ranks"
            rank_zero_info(f"process group: {request.backend}, {ranks}, {request.init_method}")

    def _request(self, strategy: RankDevicesStrategy) -> Request:
        started = started_ranks()
        world = world_of(strategy)
        assert strategy.cluster_environment is not None
        return Request(
            world=world,
            init_method=str(self.init_method or Env()),
            is_explicit=self.init_method is not None,
            has_one_device=strategy.devices_per_rank == 1,
            make_endpoint=partial(
                self._make_endpoint, strategy.cluster_environment, strategy.num_nodes == 1
            ),
            backend=backend_of(strategy),
            device=strategy.root_device,
            timeout=timeout_of(strategy),
            init_timeout=self._init_timeout,
            variables=self._variables,
            run=run_of(world.source, os.environ),
            launch_failure=launcher_exit if started is None else started.failure,
            timeouts=self.timeouts,
        )


def _env_address(environment: ClusterEnvironment) -> Tcp:
    """Return the address for ``env://``.

    Raise if the port is missing, since each process would choose a different one, or if
    no rank can listen at the address.
    """
    host = os.environ.get("MASTER_ADDR")
    if "MASTER_PORT" not in os.environ and not _is_overridden("main_port", environment):
        raise RendezvousError(
            "init_method 'env://' needs MASTER_ADDR and MASTER_PORT in the environment if you"
            f" start each process yourself (got MASTER_ADDR={host},"
            " MASTER_PORT=None); export both with the same values on every rank, or choose"
            " init_method='tcp://HOST:PORT' or 'file:///PATH'"
        )
    try:
        return Tcp(environment.main_address, int(environment.main_port))
    except ValueError as error:  # also of Tcp, whose message does not name the variables
        raise ConfigurationError(
            "init_method 'env://' needs a host in MASTER_ADDR, without brackets, and a port in"
            f" 1..65535 in MASTER_PORT (got MASTER_ADDR={host!r},"
            f" MASTER_PORT={os.environ.get('MASTER_PORT')!r}); export both with the same values on"
            " every rank"
        ) from error


def _is_overridden(name: str, environment: ClusterEnvironment) -> bool:
    """Whether the environment overrides ``main_address`` or ``main_port``.

    By default, these read ``MASTER_ADDR`` and ``MASTER_PORT``.
    """
    return getattr(type(environment), name) is not getattr(LightningEnvironment, name)


def temporary_path() -> str:
    """Return an unused path.

    At exit, remove the file that killed ranks may have left there.
    """
    path = Path(tempfile.gettempdir(), f"lightning_ddp_ext-{secrets.token_hex(16)}")
    atexit.register(path.unlink, missing_ok=True)
    return str(path)
