"""Host and open the store in which torch forms process groups; rank 0 hosts it on a port that the kernel chooses."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch.distributed import TCPStore

from lightning_ddp_ext.errors import DDPExtError, RendezvousError
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.sockets import listen

# Seconds for one operation on an existing key.
_OPERATION = timedelta(seconds=10)


def host_store(bound_to: str) -> TCPStore:
    """Open the server of a store. It starts a thread, so the process should not fork afterwards.

    Args:
        bound_to: the address of rank 0's control listener: a loopback address, or that of all interfaces.
    """
    listener = listen(bound_to, 0)
    port = int(listener.getsockname()[1])
    host = "127.0.0.1" if bound_to in ("::", "0.0.0.0") else bound_to  # a host may have IPv6 without ::1
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=_OPERATION, master_listen_fd=listener.detach()
    )


def connect_store(host: str, port: int, deadline: Deadline, check: Callable[[], None] = lambda: None) -> TCPStore:
    """Open a client of the store at ``host`` and ``port``.

    The constructor of a client may ignore its timeout, for example if the server does not reply. It therefore runs in a
    thread, and ``check`` may raise in the meantime.

    Raises:
        RendezvousError: the store could not be opened before the deadline.
    """
    client = partial(TCPStore, host, port, wait_for_workers=False, timeout=deadline.as_timedelta())
    try:
        store = deadline.bound(client, check=check)
    except DDPExtError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise RendezvousError(
            f"the store at {host}:{port} cannot be used ({reason}); look at the output of the process that hosts it"
        ) from None
    store.set_timeout(_OPERATION)
    return store
