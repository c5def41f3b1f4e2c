"""All-reduce as a ring of sends and receives, written to be read: what NCCL and gloo do inside for large tensors."""

# Annotations are no strings here: DDP looks at those of a comm hook.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp, ProcessGroup
from torch.futures import Future


def ring_all_reduce(group: ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """A comm hook for DDP that averages each bucket of gradients with :func:`ring_sum`.

    Collective: every rank of the group. Gradients are those of DDP's own all-reduce up to the order of additions. It is
    there to learn from and to measure with: it needs one transfer after another, and hides none behind the backward
    pass.

    Args:
        group: the ranks; ``None`` for all. It is DDP's ``state``, and ``ddp_comm_state=`` of the strategy.
        bucket: some of DDP's gradients, flat, in one tensor.

    Example::

        trainer = L.Trainer(strategy=DDPExtStrategy(ddp_comm_hook=ring_all_reduce), devices=4)
    """
    group = dist.group.WORLD if group is None else group
    assert group is not None
    gradients = bucket.buffer()
    ring_sum(gradients, group).div_(group.size())
    averaged: Future[Tensor] = Future(devices=[gradients.device] if gradients.is_cuda else None)
    averaged.set_result(gradients)
    return averaged


def ring_sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Add up a flat tensor over the ranks of a group, in place, and return it.

    With N ranks the tensor is cut into N chunks. Each rank sends to its right neighbour and receives from its left one,
    N - 1 times while sums form (scatter-reduce) and N - 1 times while they go round (all-gather), so each rank sends
    2 (N - 1) / N of the tensor, however many ranks there are.

    Source: P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    rank, world_size = group.rank(), group.size()
    chunks = tensor.tensor_split(world_size)
    received = torch.empty_like(chunks[0])  # the first chunk is as large as any

    # Scatter-reduce: in the end this rank has the whole sum of the chunk that it would have sent next.
    for step in range(world_size - 1):
        ours, theirs = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        part = received[: len(theirs)]
        _pass_on(ours, part, group)
        theirs += part

    # All-gather: each whole sum goes round, and takes the place of what was there.
    for step in range(world_size - 1):
        ours, theirs = chunks[(rank - step + 1) % world_size], chunks[(rank - step) % world_size]
        _pass_on(ours, theirs, group)
    return tensor


def _pass_on(ours: Tensor, theirs: Tensor, group: ProcessGroup) -> None:
    """Send one chunk to the right and receive another one from the left, both at once."""
    right = dist.get_global_rank(group, (group.rank() + 1) % group.size())
    left = dist.get_global_rank(group, (group.rank() - 1) % group.size())
    transfers = []
    if len(ours) > 0:
        transfers.append(P2POp(dist.isend, ours, right, group))
    if len(theirs) > 0:  # a tensor with fewer elements than ranks leaves some chunks empty
        transfers.append(P2POp(dist.irecv, theirs, left, group))
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()
