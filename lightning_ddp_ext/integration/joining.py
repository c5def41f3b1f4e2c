"""Have the ranks of a strategy find each other: what started ranks are told, where rank 0 listens, and the joining."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torchmetrics

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rendezvous.endpoint import Endpoint, FileEndpoint, StoreEndpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.init_method import Env, File, Tcp, check_file
from lightning_ddp_ext.rendezvous.nccl_options import variables_of
from lightning_ddp_ext.rendezvous.process_context import current, join
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.run_id import RUN_ID_VARIABLE, run_id_from_launcher
from lightning_ddp_ext.supervision.exception_report import install_excepthook
from lightning_ddp_ext.supervision.rank_processes import started_ranks
from lightning_ddp_ext.supervision.survey import Survey
from lightning_ddp_ext.version import __version__

from .lightning_tree import (
    ClusterEnvironment,
    LightningEnvironment,
    TorchElasticEnvironment,
    lightning_name,
    lightning_version,
    rank_zero_info,
)

if TYPE_CHECKING:
    from .strategy import DDPExtStrategy

# The file in which rank 0 of this host publishes its address, where the ranks were started without one.
PRIVATE_FILE = "DDPX_PRIVATE_FILE"

# What Lightning's launcher, or somebody's shell, puts into the environment of ranks.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class StartVariables:
    """What ranks that this process starts find in their environment, and nobody else.

    Attributes:
        variables: their names and values.
        leftover: a file or directory to remove when all ranks have ended.
    """

    variables: dict[str, str]
    leftover: str | None = None

    def clean_up(self) -> None:
        """Remove what ranks leave that were killed."""
        if self.leftover is not None:
            shutil.rmtree(self.leftover, ignore_errors=True)
            Path(self.leftover).unlink(missing_ok=True)


def start_variables(strategy: DDPExtStrategy) -> StartVariables:
    """What ranks need to find each other, besides the init method.

    On one node without an address the kernel chooses a port, so it is never guessed, nor lost to another job. In a
    directory the file gets a name of its own.
    """
    method, environment, num_nodes = strategy.chosen_init_method, strategy.cluster_environment, strategy.num_nodes
    assert environment is not None
    if isinstance(method, File):
        run_id = strategy.run_id or os.environ.get(RUN_ID_VARIABLE)
        if num_nodes > 1 or not method.is_directory or run_id:
            return StartVariables({})
        made_up = secrets.token_hex(8)
        return StartVariables({RUN_ID_VARIABLE: made_up}, leftover=method.file_for(made_up))
    has_address = _says_by_itself("main_address", environment) or _says_by_itself("main_port", environment)
    if num_nodes > 1 or isinstance(method, Tcp) or has_address:
        where = method if isinstance(method, Tcp) else _address_in(environment, os.environ)
        return StartVariables({"MASTER_ADDR": where.host, "MASTER_PORT": str(where.port)})
    directory = tempfile.mkdtemp(prefix="lightning_ddp_ext-")
    return StartVariables({PRIVATE_FILE: os.path.join(directory, "rank-0")}, leftover=directory)


@contextmanager
def environment_of_started_ranks(variables: Mapping[str, str]) -> Iterator[None]:
    """The environment in which ranks are started; afterwards these variables are what they were."""
    before = {name: os.environ.get(name) for name in (*_RANK_VARIABLES, *variables)}
    # A RANK that somebody exported would make every started process believe that it is that one.
    os.environ.pop("RANK", None)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def join_ranks(request: Request) -> None:
    """Find the other ranks, form the process group, and log it. Collective: every rank must call it."""
    is_first = current() is None
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
        endpoint=_endpoint(strategy),
        backend=strategy._get_process_group_backend(),
        device=strategy.root_device,
        timeout=strategy._timeout,
        init_timeout=strategy.init_timeout,
        variables=variables_of(strategy._nccl, strategy._interface),
        versions=_versions(),
        absence=started.scripts.failure if started is not None else lambda: None,
        timeouts=strategy.timeouts,
    )
    return request if strategy.debugged is None else strategy.debugged.without_limits(request)


def _endpoint(strategy: DDPExtStrategy) -> Endpoint:
    """The endpoint that a strategy's init method stands for in this process; refuse one that says too little."""
    context, started = current(), started_ranks()
    is_connected = context is not None and len(context.table) > 1
    if is_connected or dist.is_initialized() or strategy.world.world_size == 1:
        return FileEndpoint("")  # of no use where the ranks are connected already, or where there is one
    environ = {**os.environ, **(started.variables if started is not None else {})}
    method, environment = strategy.chosen_init_method, strategy.cluster_environment
    if isinstance(method, File):
        check_file(method, num_nodes=strategy.num_nodes)
        return FileEndpoint(method.file_for(strategy.run_id or run_id_from_launcher(environ)))
    if isinstance(method, Tcp):
        return TcpEndpoint(method)
    if PRIVATE_FILE in environ and strategy.num_nodes == 1:
        return FileEndpoint(environ[PRIVATE_FILE], is_local=True)
    assert environment is not None
    where = _address_in(environment, environ)
    if isinstance(environment, TorchElasticEnvironment) and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun's agent listens there itself, so that rank 0 cannot.
        return StoreEndpoint(where, strategy.run_id or run_id_from_launcher(environ) or "")
    return TcpEndpoint(where)


def _address_in(environment: ClusterEnvironment, environ: Mapping[str, str]) -> Tcp:
    """The address that ``env://`` stands for; without a port, every process would choose another one."""
    if "MASTER_PORT" not in environ and not _says_by_itself("main_port", environment):
        raise RendezvousError(
            "init_method 'env://' needs MASTER_ADDR and MASTER_PORT in the environment of processes that are started "
            f"one by one (got MASTER_ADDR={environ.get('MASTER_ADDR')}, MASTER_PORT=None); export both, the same on "
            "every rank, or choose init_method='tcp://HOST:PORT' or 'file:///PATH'"
        )
    return Tcp(environment.main_address, int(environment.main_port))


def _says_by_itself(name: str, environment: ClusterEnvironment) -> bool:
    """Whether ``main_address`` or ``main_port`` is more than what the variables ``MASTER_...`` say."""
    return getattr(type(environment), name) is not getattr(LightningEnvironment, name)


def _versions() -> dict[str, str]:
    return {
        "torch": str(torch.__version__),
        lightning_name: lightning_version,
        "torchmetrics": torchmetrics.__version__,
        "lightning_ddp_ext": __version__,
    }
