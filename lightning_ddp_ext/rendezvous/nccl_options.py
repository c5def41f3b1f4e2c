"""Define NCCL's settings as typed fields, and turn them into environment variables."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Literal, get_args, get_type_hints

from lightning_ddp_ext.errors import ConfigurationError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, kw_only=True)
class NCCLOptions:
    """Settings of NCCL.

    Each field sets the variable of the same name: ``p2p_level`` sets
    ``NCCL_P2P_LEVEL``.

    ``None`` leaves the variable as it is. The variables are set in the environment of each
    rank while its process group is open. Other backends ignore them.

    Raises:
        ConfigurationError: a value has the wrong type, or is not one of the choices
            that its field lists.

    Example::

        DDPExtStrategy(nccl=NCCLOptions(algo="Ring", debug="INFO"), interface="eth1")
    """

    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """The log level of NCCL."""
    p2p_disable: bool | None = None
    """Whether GPUs of one host exchange data through host memory rather than directly.
    """
    p2p_level: Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"] | None = None
    """The largest distance at which GPUs access each other's memory: ``"LOC"`` is
    never, ``"NVL"`` over NVLink, ``"SYS"`` any distance.
    """
    ib_disable: bool | None = None
    """Whether hosts exchange data over TCP even if they have InfiniBand or RoCE."""
    ib_hca: str | None = None
    """InfiniBand adapters, ``"mlx5_0:1,mlx5_1:1"``; a leading ``"^"`` excludes them,
    ``"="`` matches exact names.
    """
    net_gdr_level: Literal["LOC", "PIX", "PXB", "PHB", "SYS"] | None = None
    """The largest distance at which network adapters access the memory of GPUs:
    ``"LOC"`` is never, ``"SYS"`` any distance.
    """
    socket_nthreads: int | None = None
    """CPU threads for each TCP connection, 1 to 16."""
    nsocks_perthread: int | None = None
    """Sockets for each of these threads; the product with ``socket_nthreads`` is at
    most 64.
    """
    buffsize: int | None = None
    """Bytes of each buffer between two GPUs; NCCL's default is 4 MiB."""
    min_nchannels: int | None = None
    """The minimum number of channels that a collective uses; each occupies one thread
    block of the GPU.
    """
    max_nchannels: int | None = None
    """The maximum number of channels that a collective uses."""
    algo: str | None = None
    """The algorithms that NCCL may choose, such as ``"Ring,Tree"``."""
    proto: str | None = None
    """The protocols that NCCL may choose, such as ``"LL,LL128,Simple"``."""

    def __post_init__(self) -> None:
        for field, kind in get_type_hints(type(self)).items():
            expected = get_args(kind)[0]  # kind is ``expected | None``
            choices = get_args(expected)  # of a Literal
            value = getattr(self, field)
            is_valid = value in choices if choices else type(value) is expected
            if value is not None and not is_valid:
                rule = f"one of {', '.join(choices)}" if choices else f"of type {expected.__name__}"
                raise ConfigurationError(
                    f"NCCLOptions.{field} must be {rule} (got {value!r}); omit it to use NCCL's"
                    " default"
                )


def variables_of(options: NCCLOptions | None, interface: str | None) -> dict[str, str]:
    """Return the environment variables for these settings and this interface.

    Raises:
        ConfigurationError: an argument has another type.
    """
    if not isinstance(options, NCCLOptions | None):
        raise ConfigurationError(
            f"nccl must be an NCCLOptions or None (got {options!r}); write, for example,"
            ' nccl=NCCLOptions(debug="INFO")'
        )
    if not isinstance(interface, str | None):
        raise ConfigurationError(
            f"interface must be the name of a network interface or None (got {interface!r});"
            ' write, for example, interface="eth0"'
        )
    settings = asdict(options) if options is not None else {}
    variables = {
        f"NCCL_{field.upper()}": value if isinstance(value, str) else f"{value:d}"
        for field, value in settings.items()
        if value is not None
    }
    if interface is None:
        return variables
    if interface.startswith("^"):  # gloo cannot exclude an interface
        return {**variables, _NCCL_INTERFACE: interface}
    name = interface.removeprefix("=")
    # NCCL takes a name without "=" for a prefix.
    return {**variables, _NCCL_INTERFACE: f"={name}", GLOO_INTERFACE: name}


def check_variables(variables: dict[str, str]) -> None:
    """Raise if the environment has a different value for one of the variables.

    Raises:
        ConfigurationError: the values differ; the message has both.
    """
    for name, value in variables.items():
        exported = os.environ.get(name, value)
        is_interface = name in (_NCCL_INTERFACE, GLOO_INTERFACE)
        has_same_name = is_interface and f"={exported}" == value
        if exported != value and not has_same_name:
            argument = "interface" if is_interface else "nccl"
            raise ConfigurationError(
                f"{argument}= of the strategy sets {name}={value}, but the environment has "
                f"{name}={exported}; remove one of them"
            )
