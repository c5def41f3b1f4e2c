"""Average gradients in a comm hook with a ring all-reduce, as NCCL and gloo do for
large tensors.

Run it: python examples/ring_all_reduce.py

Four ranks train once with the ring and once with DDP's own all-reduce, and get the same
weights. The code is written to be read: it waits for one transfer after another and
does not overlap transfers with the backward pass.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a comm hook
# with classes.

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup
from torch.futures import Future
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext as ddpx


def ring_all_reduce(group: ProcessGroup | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket of DDP's gradients, which is one flat tensor.

    Collective: every rank of the group must call it.

    DDP passes its `ddp_comm_state` as `group`. Without it, all ranks take part.
    """
    group = dist.group.WORLD if group is None else group
    gradients = bucket.buffer()
    ring_sum(gradients, group).div_(group.size())
    averaged: Future[Tensor] = Future(devices=[gradients.device] if gradients.is_cuda else None)
    averaged.set_result(gradients)
    return averaged


def ring_sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum a flat tensor over the ranks of a group in place, and return it.

    With N ranks, the tensor is split into N chunks. Each rank sends chunks to its right
    neighbour and receives chunks from its left neighbour: N - 1 times to add them up
    (scatter-reduce), and N - 1 times to distribute the sums (all-gather). In total,
    each rank sends 2 (N - 1) / N of the tensor's size.

    Source: P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for
    clusters of workstations, 2009.
    """
    rank = group.rank()
    world_size = group.size()
    chunks = tensor.tensor_split(world_size)
    received = torch.empty_like(chunks[0])  # no chunk is larger than the first one

    # Scatter-reduce. At the end, this rank has the complete sum of the chunk that it
    # would send next.
    for step in range(world_size - 1):
        ours = chunks[(rank - step) % world_size]
        theirs = chunks[(rank - step - 1) % world_size]
        part = received[: len(theirs)]
        pass_on(ours, part, group)
        theirs += part

    # All-gather. Each complete sum is passed around the ring and replaces the chunk on
    # the other ranks.
    for step in range(world_size - 1):
        ours = chunks[(rank - step + 1) % world_size]
        theirs = chunks[(rank - step) % world_size]
        pass_on(ours, theirs, group)
    return tensor


def pass_on(ours: Tensor, theirs: Tensor, group: ProcessGroup) -> None:
    """Send one chunk to the right and receive another one from the left at the same
    time.
    """
    right = dist.get_global_rank(group, (group.rank() + 1) % group.size())
    left = dist.get_global_rank(group, (group.rank() - 1) % group.size())
    transfers = []
    if len(ours) > 0:
        transfers.append(P2POp(dist.isend, ours, right, group))
    if len(theirs) > 0:  # a tensor with fewer elements than ranks leaves some chunks empty
        transfers.append(P2POp(dist.irecv, theirs, left, group))
    for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
        transfer.wait()


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AveragesInRing(L.Callback):
    """Registers the hook in DDP. ``ddp_comm_hook=`` does so on GPUs only."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.model.register_comm_hook(None, ring_all_reduce)


def train(*callbacks: L.Callback) -> Regression:
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=16)
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    strategy = ddpx.DDPExtStrategy(start_method="fork")
    options = {"accelerator": "cpu", "devices": 4, "max_epochs": 5, **quiet}
    trainer = L.Trainer(strategy=strategy, callbacks=[*callbacks], **options)
    model = Regression()
    trainer.fit(model, loader)
    return model


if __name__ == "__main__":
    ring = train(AveragesInRing())
    plain = train()
    largest = max(
        (p - q).abs().max().item()
        for p, q in zip(ring.parameters(), plain.parameters(), strict=True)
    )
    print(f"largest difference of a weight between ring and all-reduce: {largest:.0e}")
