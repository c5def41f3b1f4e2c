"""Which ranks join their batches."""

from __future__ import annotations

import torch.distributed as dist

from lightning_ddp_ext.errors import ConversionError
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.rendezvous.sockets import network_identity

Ranks = str | int | dist.ProcessGroup | None


def check_ranks(ranks: Ranks) -> None:
    """Refuse what cannot stand for a group of ranks.

    Raises:
        ConversionError: it is something else than ``None``, ``"node"``, a number from 1 on, or a process group.
    """
    is_number = isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 1
    if not (ranks is None or ranks == "node" or is_number or _is_group(ranks)):
        raise ConversionError(
            f"process_group must be None, 'node', a number of ranks from 1 on, or a ProcessGroup (got {ranks!r}); "
            "leave it out for all ranks"
        )


def group_of(ranks: Ranks) -> dist.ProcessGroup | None:
    """The process group of this rank that is meant. Collective for ``"node"`` and numbers: every rank must call it.

    Raises:
        ConversionError: ``ranks`` makes no sense, or there is no process group yet to take ranks from.
    """
    check_ranks(ranks)
    if ranks is None or _is_group(ranks):
        return ranks  # type: ignore[return-value]
    if not dist.is_initialized():
        raise ConversionError(
            f"process_group={ranks!r} needs the ranks, and they have not met yet; "
            "convert after init_process_group, or use the callback SyncBatchNormConversion"
        )
    return _open_groups(_by_number(ranks) if isinstance(ranks, int) else _by_node())


def _is_group(ranks: object) -> bool:
    """Whether it is a group, or what torch gives to ranks that are not in it: each of those is alone."""
    return isinstance(ranks, dist.ProcessGroup) or ranks == dist.GroupMember.NON_GROUP_MEMBER


def _by_number(size: int) -> list[list[int]]:
    """The ranks in their order, so many to a group; the last may be smaller."""
    ranks = range(dist.get_world_size())
    return [list(ranks[start : start + size]) for start in ranks[::size]]


def _by_node() -> list[list[int]]:
    """The ranks of each host. Collective."""
    networks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(networks, network_identity())
    hosts: dict[str, list[int]] = {}
    for rank, network in enumerate(networks):
        hosts.setdefault(network, []).append(rank)
    return list(hosts.values())


def own_group() -> dist.ProcessGroup | None:
    """A group of all ranks for BatchNorm alone; ``None`` for the default one. Collective.

    In CPU memory DDP's gradients and the layers' numbers need not wait for one another then, and a rank that is in
    another layer than the rest never takes the ones for the others.
    """
    context = current()
    if context is None or dist.get_backend() != "gloo":
        return None
    return context.new_group(range(dist.get_world_size()), purpose="BatchNorm")


def _open_groups(parts: list[list[int]]) -> dist.ProcessGroup:
    """This rank's group of those that the ranks are parted into."""
    context = current()
    new_group = dist.new_group if context is None else context.new_group
    groups = [new_group(ranks) for ranks in parts]
    return next(group for ranks, group in zip(parts, groups, strict=True) if dist.get_rank() in ranks)
