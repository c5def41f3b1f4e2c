"""Choose the ranks whose batches are joined."""

from __future__ import annotations

import torch.distributed as dist
from typing_extensions import TypeIs

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.ranks import is_gloo
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.rendezvous.sockets import network_identity

JoinedRanks = str | int | dist.ProcessGroup | None


def check_ranks(ranks: JoinedRanks) -> None:
    """Raise unless ``ranks`` is ``None``, "node", a positive number or a process group.

    Raises:
        ConfigurationError: it is something else.
    """
    is_number = isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 1
    if not (ranks is None or ranks == "node" or is_number or is_group(ranks)):
        raise ConfigurationError(
            "process_group must be None, 'node', a positive number of ranks, or a ProcessGroup"
            f" (got {ranks!r}); omit it to join all ranks"
        )


def is_group(ranks: object) -> TypeIs[dist.ProcessGroup]:
    """Whether this is a process group, as ``dist.new_group`` returns it.

    On a rank outside of the group, it returns ``NON_GROUP_MEMBER``, and the rank then
    uses its own batch alone. This is a number, but torch's annotations count it as a
    group, and so do ours. Another number of the same value is not a group.
    """
    return isinstance(ranks, dist.ProcessGroup) or ranks is dist.GroupMember.NON_GROUP_MEMBER


def group_of(ranks: JoinedRanks) -> dist.ProcessGroup | None:
    """Return the process group of this rank, or ``None`` for all ranks.

    Collective for "node" and numbers: every rank must call it.

    Raises:
        ConfigurationError: ``ranks`` is invalid, or needs a process group that does not
            exist.
    """
    check_ranks(ranks)
    if ranks is None or is_group(ranks):
        return ranks
    if not dist.is_initialized():
        raise ConfigurationError(
            f"process_group={ranks!r} needs a process group, which is not initialised yet; "
            "convert after init_process_group, or use the callback SyncBatchNormConversion"
        )
    context = current()
    new_group = dist.new_group if context is None else context.new_group
    parts = _consecutive(ranks) if isinstance(ranks, int) else _by_node()
    groups = [new_group(part) for part in parts]  # every rank must take part in all of them
    return next(group for part, group in zip(parts, groups, strict=True) if dist.get_rank() in part)


def batchnorm_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks for BatchNorm only; ``None`` for the default group.

    Collective.

    With gloo and a separate group, DDP's gradients and the layers' statistics do not
    wait for each other, and a rank in another layer cannot mix them up.
    """
    context = current()
    if context is None or not is_gloo("cuda"):  # with NCCL, a separate group has no advantage
        return None
    return context.new_group(purpose="BatchNorm")


def _consecutive(size: int) -> list[list[int]]:
    """Return groups of ``size`` ranks; the last one may be smaller."""
    ranks = range(dist.get_world_size())
    return [list(ranks[start : start + size]) for start in ranks[::size]]


def _by_node() -> list[list[int]]:
    networks: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(networks, network_identity())
    nodes: dict[str, list[int]] = {}
    for rank, network in enumerate(networks):
        nodes.setdefault(network, []).append(rank)
    return list(nodes.values())
