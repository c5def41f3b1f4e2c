"""BatchNorm layers as people write them: some go through ``super().forward``, some do not."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import batch_norm


class Scaled(nn.BatchNorm2d):
    gain = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return self.gain * super().forward(input)


class Squared:
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.square())  # type: ignore[misc, no-any-return]


class Mixed(Squared, nn.BatchNorm2d):
    pass


class Functional(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, self.training)


def hooked(layer: nn.Module) -> nn.Module:
    """Return a layer whose hooks change input, output and gradient."""
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    layer.register_forward_hook(lambda _, __, output: 2 * output)
    layer.register_full_backward_hook(lambda _, gradients, __: (3 * gradients[0],))
    return layer
