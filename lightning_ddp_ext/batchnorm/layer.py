"""Define the layers: BatchNorm with the statistics of all ranks' batches together."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ddp_ext.batchnorm.functions import (
    RunningStatistics,
    SyncBatchNormOnCPU,
    SyncBatchNormOnCUDA,
)
from lightning_ddp_ext.batchnorm.sync_context import SyncContext
from lightning_ddp_ext.errors import BatchNormError

BatchNorm = _BatchNorm  # the base class of all of torch's BatchNorm layers


class SyncBatchNorm(BatchNorm):
    """BatchNorm over the batches of all ranks, on CPU and CUDA.

    An input has a shape from (N, C) to (N, C, D, H, W).

    In training, mean and variance are those of all ranks' batches together, which may
    differ in size or be empty. Running statistics are the same on all ranks. Each
    forward pass runs one collective, and so does each backward pass whose input needs a
    gradient, so every rank must run the same layers in the same order. In evaluation
    and in a single process, the layer behaves like torch's BatchNorm.

    Gradients are those of the *sum* of the ranks' losses. DDP divides them by the
    number of ranks, so that a parameter gets the gradient of the mean of the ranks'
    losses. If all ranks have the same number of samples, this equals the gradient of
    the mean over the joined batch. With several ranks, the layer cannot be
    differentiated twice: torch raises a ``RuntimeError``.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype: as in
            ``torch.nn.BatchNorm2d``.
        process_group: the ranks whose batches are joined; ``None`` for all ranks.
        bias: as in ``torch.nn.BatchNorm2d``, which has had it since torch 2.13.

    Raises:
        ValueError: an input does not have 2 to 5 dimensions.
        ConfigurationError: ``process_group`` is not a process group.
        BatchNormError: in training on several ranks, an input has a different number of
            channels than the layer, or is neither on CPU nor on CUDA. On CPU, also if
            all batches together have one value per channel, or another rank is in a
            different pass or, if the layers were converted, in a different layer.

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
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        if not bias:  # only passed if needed, for torch before 2.13
            options["bias"] = False
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)
        self._ddpx_context = SyncContext(process_group, max_features=num_features)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group whose batches are joined; ``None`` for all ranks."""
        return self._ddpx_context.process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if not 2 <= input.dim() <= 5:
            raise ValueError(f"expected 2D to 5D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch (N, C, ...).

        Collective in training: every rank must call it and run its backward pass.
        """
        if not self.training or self._ddpx_context.world_size == 1:
            return super().forward(input)
        return cast(Tensor, self._normalise(input))

    # This breaks a compiled graph, as torch's own SyncBatchNorm does.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _normalise(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        # Torch's kernels do not check these sizes, and would read out of bounds.
        if input.size(1) != self.num_features:
            raise BatchNormError(
                f"{self._ddpx_context.name} expects inputs with {self.num_features} channels "
                f"(got shape {tuple(input.shape)}); channels are the second dimension"
            )
        if not (input.is_cpu or input.is_cuda):
            raise BatchNormError(
                f"{self._ddpx_context.name} supports inputs on cpu and cuda (got one on"
                f" {input.device}); exclude the layer from the conversion (exclude=)"
            )
        function: Any = SyncBatchNormOnCPU if input.is_cpu else SyncBatchNormOnCUDA
        running = self._count_batch()
        return cast(
            Tensor,
            function.apply(input, self.weight, self.bias, running, self.eps, self._ddpx_context),
        )

    def _count_batch(self) -> RunningStatistics | None:
        """Count a batch; return the running statistics, if any, with its weight."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return None
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:  # a cumulative average
                momentum = 1.0 / float(self.num_batches_tracked)
        return RunningStatistics(self.running_mean, self.running_var, momentum or 0.0)


class SyncBatchNorm1d(nn.BatchNorm1d, SyncBatchNorm):
    """A converted ``torch.nn.BatchNorm1d``."""


class SyncBatchNorm2d(nn.BatchNorm2d, SyncBatchNorm):
    """A converted ``torch.nn.BatchNorm2d``."""


class SyncBatchNorm3d(nn.BatchNorm3d, SyncBatchNorm):
    """A converted ``torch.nn.BatchNorm3d``."""


_SYNCHRONISED: dict[type, type] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}
_PLAIN = {synchronised: plain for plain, synchronised in _SYNCHRONISED.items()}


def can_synchronise(layer: BatchNorm) -> bool:
    """Whether a layer's code is torch's, so that its class may be changed."""
    return type(layer) in _SYNCHRONISED and "forward" not in vars(layer)


def synchronise(layer: nn.Module, context: SyncContext) -> None:
    """Give one of torch's layers the class that synchronises, and its context."""
    layer.__class__ = _SYNCHRONISED[type(layer)]
    vars(layer)["_ddpx_context"] = context


def restore(layer: nn.Module) -> None:
    """Restore the class of a converted layer; leave other layers unchanged."""
    if type(layer) in _PLAIN:
        layer.__class__ = _PLAIN[type(layer)]
        del layer._ddpx_context
