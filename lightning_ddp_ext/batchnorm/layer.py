"""The layer: BatchNorm that normalises by the statistics of all ranks' batches together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ddp_ext.batchnorm import on_device, on_host
from lightning_ddp_ext.batchnorm.exchange import Exchange, Peers
from lightning_ddp_ext.batchnorm.statistics import Running
from lightning_ddp_ext.errors import BatchNormInputError, ConversionError

F = TypeVar("F", bound=Callable[..., Any])

PEERS = "_ddpx_peers"  # the attribute that layers get when they become synchronised ones


class SyncBatchNorm(_BatchNorm):
    r"""BatchNorm over the batches of all ranks, for inputs (N, C) to (N, C, D, H, W), on CPU and CUDA.

    In training, mean and variance are those of all ranks' batches joined, however many values each of them has, none
    included; running statistics are the same on all ranks. One collective forward and one backward: every rank must
    run the same layers in the same order. In evaluation and in a single process it is ``torch.nn.BatchNorm``.

    Gradients are those of the *sum* of the ranks' losses, as DDP expects, which divides by the number of ranks: after
    DDP a parameter has the gradient of the mean of the ranks' losses. That equals the gradient of the mean over the
    joined batch where all ranks have equally many samples.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype: as in ``torch.nn.BatchNorm2d``.
        process_group: the ranks whose batches are joined; ``None``: all there are.
        bias: as in ``torch.nn.BatchNorm2d``, where torch has it (from 2.13 on).

    Raises:
        BatchNormInputError: all batches together have one value a channel (on CPU), or an input has other channels
            than the layer, or is on a device that is neither.
        BatchNormMismatchError: another rank is in another layer (on CPU; elsewhere ranks wait for their timeout).

    >>> layer = SyncBatchNorm(3)
    >>> layer(torch.randn(4, 3, 8, 8)).mean().abs().item() < 1e-6
    True
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        asked: Any = process_group
        if isinstance(asked, str) or (isinstance(asked, int) and asked > 0):  # below is torch's word for no member
            raise ConversionError(
                f"process_group of a layer must be None or a ProcessGroup (got {process_group!r}); "
                "'node' and numbers are for convert_sync_batchnorm"
            )
        options: dict[str, Any] = {"device": device, "dtype": dtype} | ({} if bias else {"bias": False})
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self._ddpx_peers = Peers(Exchange(process_group, longest=1 + 2 * num_features))

    _ddpx_peers: Peers  # also given to the layers that become synchronised ones

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks whose batches are joined; ``None``: all there are."""
        return self._ddpx_peers.exchange.process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"expected 2D to 5D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch (N, C, ...). In training collective: every rank must call it, and its backward."""
        if not self.training or self._ddpx_peers.world_size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        self._check_kind(input)
        # Asked here, because the way around the compiler takes time in every layer.
        normalise = _with_peers_uncompiled if torch.compiler.is_compiling() else _with_peers
        return normalise(self, input)

    def _check_kind(self, input: Tensor) -> None:
        # The kernels for given statistics trust their callers, and read beyond the end of a weight.
        if input.size(1) != self.num_features:
            raise BatchNormInputError(
                f"{self._ddpx_peers.name} takes inputs of {self.num_features} channels "
                f"(got one of shape {tuple(input.shape)}); channels are the second dimension"
            )
        if input.device.type not in ("cpu", "cuda"):
            raise BatchNormInputError(
                f"{self._ddpx_peers.name} takes inputs on cpu or cuda (got one on {input.device}); "
                "convert without it (exclude=)"
            )

    def _count_batch(self) -> Running:
        """The running statistics to be updated, and the weight of this batch in them."""
        if not self.track_running_stats:
            return Running(None, None, 0.0)
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # a cumulative average
                momentum = 1.0 / float(self.num_batches_tracked)
        return Running(self.running_mean, self.running_var, momentum or 0.0)


def _with_peers(layer: SyncBatchNorm, input: Tensor) -> Tensor:
    batch_norm = on_host.batch_norm if input.device.type == "cpu" else on_device.batch_norm
    return batch_norm(input, layer.weight, layer.bias, layer._count_batch(), layer.eps, layer._ddpx_peers)


def _not_compiled(function: F) -> F:
    """Let a compiled model be split here: what the ranks exchange is looked at on the host."""
    disable: Any = torch.compiler.disable
    if "reason" not in inspect.signature(disable).parameters:  # torch < 2.7
        return disable(function)  # type: ignore[no-any-return]
    why = "statistics are exchanged with other ranks here, so compile without fullgraph=True"
    return disable(function, reason=why)  # type: ignore[no-any-return]


_with_peers_uncompiled = _not_compiled(_with_peers)
