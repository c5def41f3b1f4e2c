"""NCCL's settings with types, checked, and put into the environment of each rank before its group is formed."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_ddp_ext.errors import ConfigurationError

Level = Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"]

_LEVELS = get_args(Level)
_SUBSYSTEMS = (
    "INIT", "COLL", "P2P", "SHM", "NET", "GRAPH", "TUNING", "ENV", "ALLOC", "CALL", "PROXY", "NVLS", "BOOTSTRAP", "REG",
    "PROFILE", "RAS", "ALL",
)  # fmt: skip
_WITHOUT_LIMIT = sys.maxsize

# Field: its variable, and the words or the range of numbers that it takes, if there is a rule.
_SETTINGS: dict[str, tuple[str, tuple[str, ...] | range]] = {
    "p2p_level": ("NCCL_P2P_LEVEL", _LEVELS),
    "ib_hca": ("NCCL_IB_HCA", ()),
    "algorithm": ("NCCL_ALGO", ("Tree", "Ring", "CollnetDirect", "CollnetChain", "NVLS", "NVLSTree", "PAT")),
    "protocol": ("NCCL_PROTO", ("LL", "LL128", "Simple")),
    "buffer_size": ("NCCL_BUFFSIZE", range(1, _WITHOUT_LIMIT)),
    "min_channels": ("NCCL_MIN_NCHANNELS", range(1, _WITHOUT_LIMIT)),
    "max_channels": ("NCCL_MAX_NCHANNELS", range(1, _WITHOUT_LIMIT)),
    "socket_threads": ("NCCL_SOCKET_NTHREADS", range(1, 17)),
    "sockets_per_thread": ("NCCL_NSOCKS_PERTHREAD", range(1, _WITHOUT_LIMIT)),
    "gdr_level": ("NCCL_NET_GDR_LEVEL", _LEVELS),
    "check_pointers": ("NCCL_CHECK_POINTERS", ()),
    "debug": ("NCCL_DEBUG", ("VERSION", "WARN", "INFO", "TRACE")),
    "debug_subsystems": ("NCCL_DEBUG_SUBSYS", _SUBSYSTEMS),
    "blocking_wait": ("TORCH_NCCL_BLOCKING_WAIT", ()),
    "high_priority_streams": ("TORCH_NCCL_HIGH_PRIORITY", ()),
}
_SEVERAL = ("algorithm", "protocol", "debug_subsystems")
_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")

# Variables that NCCL, torch and gloo document, beside those above; others may be a plugin's.
_OTHERS_OF_NCCL = """
ALLOC_P2P_NET_LL_BUFFERS CGA_CLUSTER_SIZE CHECKS_DISABLE COLLNET_ENABLE COLLNET_NODE_THRESHOLD COMM_BLOCKING COMM_ID
CONF_FILE CROSS_NIC CTA_POLICY CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG_FILE DEBUG_TIMESTAMP_FORMAT
DEBUG_TIMESTAMP_LEVELS DMABUF_ENABLE GRAPH_DUMP_FILE GRAPH_FILE GRAPH_MIXING_SUPPORT GRAPH_REGISTER HOSTID
IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY IB_ADDR_RANGE IB_AR_THRESHOLD IB_CUDA_SUPPORT IB_DATA_DIRECT IB_DISABLE
IB_ECE_ENABLE IB_FIFO_TC IB_GDR_LEVEL IB_GID_INDEX IB_MERGE_NICS IB_MERGE_VFS IB_PCI_RELAXED_ORDERING
IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC
IB_TIMEOUT IGNORE_CPU_AFFINITY IGNORE_DISABLED_P2P LAUNCH_MODE LL128_BUFFSIZE LL_BUFFSIZE LOCAL_REGISTER MAX_CTAS
MIN_CTAS MNNVL_ENABLE NCHANNELS_PER_NET_PEER NET NETDEVS_POLICY NET_GDR_C2C NET_GDR_READ NET_MERGE_LEVEL NET_PLUGIN
NET_SHARED_BUFFERS NET_SHARED_COMMS NTHREADS NVB_DISABLE NVLS_ENABLE NVLS_NCHANNELS OOB_NET_ENABLE OOB_NET_IFNAME
P2P_DIRECT_DISABLE P2P_DISABLE P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROFILER_PLUGIN PXN_DISABLE RAS_ADDR
RAS_ENABLE RAS_TIMEOUT_FACTOR RUNTIME_CONNECT SET_CPU_STACK_SIZE SET_STACK_SIZE SET_THREAD_NAME SHM_DISABLE
SOCKET_FAMILY SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC TOPO_DUMP_FILE TOPO_FILE TUNER_PLUGIN UID_STAGGER_RATE
UID_STAGGER_THRESHOLD WIN_ENABLE WORK_FIFO_BYTES
"""
_OTHERS_OF_TORCH = """
ABORT_IN_DESTROY_PG ASYNC_ERROR_HANDLING AVOID_RECORD_STREAMS BCAST_UNIQUEID COORD_CHECK_MILSEC CUDA_EVENT_CACHE
DEBUG_INFO_PIPE_FILE DEBUG_INFO_TEMP_FILE DESYNC_DEBUG DUMP_ON_TIMEOUT ENABLE_MONITORING ENABLE_TIMING
EXTRA_DUMP_ON_EXEC HEARTBEAT_TIMEOUT_SEC LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN NAN_CHECK NONBLOCKING_TIMEOUT
PROPAGATE_ERROR RANKS_PER_ROOT RETHROW_CUDA_ERRORS SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING TRACE_BUFFER_SIZE
TRACE_CPP_STACK USE_COMM_NONBLOCKING USE_TENSOR_REGISTER_ALLOCATOR_HOOK WAIT_TIMEOUT_DUMP_MILSEC
"""
_DOCUMENTED = {
    *(variable for variable, _ in _SETTINGS.values()),
    *_INTERFACE_VARIABLES,
    *(f"NCCL_{name}" for name in _OTHERS_OF_NCCL.split()),
    *(f"TORCH_NCCL_{name}" for name in _OTHERS_OF_TORCH.split()),
    "GLOO_DEVICE_TRANSPORT",
}


@dataclass(frozen=True)
class NCCLOptions:
    """Settings of NCCL, each checked against what NCCL documents; ``None`` leaves NCCL to choose.

    They go into the environment of the rank, under NCCL's names, before its process group is formed. With
    another backend they have no effect.

    Args:
        p2p_level: up to which distance GPUs write into each other's memory: ``"LOC"`` (never), ``"NVL"`` (NVLink),
            ``"PIX"``, ``"PXB"``, ``"PHB"``, ``"SYS"``. ``NCCL_P2P_LEVEL``.
        ib_hca: InfiniBand adapters, ``"mlx5_0:1,mlx5_1:1"``; ``"^"`` first excludes, ``"="`` wants exact names.
            ``NCCL_IB_HCA``.
        algorithm: one or several of ``"Tree"``, ``"Ring"``, ``"CollnetDirect"``, ``"CollnetChain"``, ``"NVLS"``,
            ``"NVLSTree"``, ``"PAT"``, with commas between. ``NCCL_ALGO``.
        protocol: one or several of ``"LL"``, ``"LL128"``, ``"Simple"``. ``NCCL_PROTO``.
        buffer_size: bytes of each buffer between two GPUs; 4 MiB by default. ``NCCL_BUFFSIZE``.
        min_channels: blocks of the GPU that a collective uses at least. ``NCCL_MIN_NCHANNELS``.
        max_channels: blocks that it uses at most. ``NCCL_MAX_NCHANNELS``.
        socket_threads: CPU threads for each connection over TCP, 1 to 16. ``NCCL_SOCKET_NTHREADS``.
        sockets_per_thread: sockets of each of these threads; 64 together at most. ``NCCL_NSOCKS_PERTHREAD``.
        gdr_level: up to which distance adapters read the memory of GPUs, as ``p2p_level``. ``NCCL_NET_GDR_LEVEL``.
        check_pointers: whether each call checks that its tensors are where they should be. ``NCCL_CHECK_POINTERS``.
        debug: what NCCL prints: ``"VERSION"``, ``"WARN"``, ``"INFO"``, ``"TRACE"``. ``NCCL_DEBUG``.
        debug_subsystems: of what, with commas between: ``"INIT,NET"``; ``"^"`` excludes. ``NCCL_DEBUG_SUBSYS``.
        blocking_wait: whether a wait for a collective blocks the CPU and raises at its timeout.
            ``TORCH_NCCL_BLOCKING_WAIT``.
        high_priority_streams: whether collectives run before other kernels. ``TORCH_NCCL_HIGH_PRIORITY``.

    Raises:
        ConfigurationError: a value is none that NCCL takes.

    Example::

        DDPExtStrategy(nccl=NCCLOptions(algorithm="Ring", debug="INFO"), interface="eth1")
    """

    p2p_level: Level | None = None
    ib_hca: str | None = None
    algorithm: str | None = None
    protocol: str | None = None
    buffer_size: int | None = None
    min_channels: int | None = None
    max_channels: int | None = None
    socket_threads: int | None = None
    sockets_per_thread: int | None = None
    gdr_level: Level | None = None
    check_pointers: bool | None = None
    debug: str | None = None
    debug_subsystems: str | None = None
    blocking_wait: bool | None = None
    high_priority_streams: bool | None = None

    def __post_init__(self) -> None:
        for name in _SETTINGS:
            self._check(name)
        if (self.socket_threads or 1) * (self.sockets_per_thread or 1) > 64:
            raise ConfigurationError(
                "socket_threads times sockets_per_thread must be at most 64 "
                f"(got {self.socket_threads} × {self.sockets_per_thread})"
            )
        if self.min_channels and self.max_channels and self.min_channels > self.max_channels:
            raise ConfigurationError(
                f"min_channels must not be above max_channels (got {self.min_channels} and {self.max_channels})"
            )

    def _check(self, name: str) -> None:
        value, allowed = getattr(self, name), _SETTINGS[name][1]
        if value is None or not allowed:
            return
        if isinstance(allowed, range):
            parts = [value]
            rule = f"at least {allowed.start}"
            if allowed.stop < _WITHOUT_LIMIT:
                rule = f"from {allowed.start} to {allowed.stop - 1}"
        else:
            parts = str(value).lstrip("^").split(",") if name in _SEVERAL else [value]
            rule = f"one of {', '.join(allowed)}{', with commas between' if name in _SEVERAL else ''}"
        if not all(part in allowed for part in parts):
            raise ConfigurationError(f"NCCLOptions.{name} must be {rule} (got {value!r})")

    def variables(self) -> dict[str, str]:
        """The environment variables that say the same."""
        values = {variable: getattr(self, name) for name, (variable, _) in _SETTINGS.items()}
        return {
            variable: str(int(value)) if isinstance(value, bool) else str(value)
            for variable, value in values.items()
            if value is not None
        }


def apply(options: NCCLOptions | None, interface: str | None, environ: MutableMapping[str, str]) -> None:
    """Put the settings, and the network interface for NCCL and gloo, into the environment of this process.

    Raises:
        ConfigurationError: a variable of the environment says something else.
    """
    wanted = options.variables() if options is not None else {}
    if interface is not None:
        wanted |= dict.fromkeys(_INTERFACE_VARIABLES, interface)
    for variable, value in wanted.items():
        if environ.get(variable, value) != value:
            argument = "interface" if variable in _INTERFACE_VARIABLES else "nccl"
            raise ConfigurationError(
                f"{argument}= of the strategy says {variable}={value}, and the environment says "
                f"{variable}={environ[variable]}; leave one of them out"
            )
    environ.update(wanted)


def misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable that looks like one of NCCL's, torch's or gloo's, and is none."""
    for name in sorted(environ):
        if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_")) and name not in _DOCUMENTED:
            near = difflib.get_close_matches(name, _DOCUMENTED, n=1, cutoff=0.85)
            if near:
                yield f"{name} in the environment has no effect that is documented; did you mean {near[0]}?"
