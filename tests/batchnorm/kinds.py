"""BatchNorm layers as people write them: some go through ``super().forward``, some do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[[Any, Tensor], Tensor]


class Scaled(nn.BatchNorm2d):
    gain = 2.0

    def forward(self, input: Tensor) -> Tensor:
        return self.gain * super().forward(input)


class ScaledTwice(Scaled):
    def forward(self, input: Tensor) -> Tensor:
        return 3 * super(ScaledTwice, self).forward(input)  # noqa: UP008 - how it used to be written


def added_one(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def wrapped(self: Any, input: Tensor) -> Tensor:
        return 1 + forward(self, input)

    return wrapped


class Decorated(nn.BatchNorm2d):
    @added_one
    def forward(self, input: Tensor) -> Tensor:
        return [super(Decorated, self).forward(part) for part in [input]][0]  # noqa: RUF015 - in an inner scope


class Squared:
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.square())  # type: ignore[misc, no-any-return]


class Named:
    name = "layer"

    def __init__(self, *args: Any, name: str = "layer", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name


class Mixed(Named, Squared, nn.BatchNorm2d):
    pass


class Slotted(Scaled):
    __slots__ = ("extra",)


class Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        layer = super().__call__(*args, **kwargs)
        layer.made_by = "Meta"
        return layer


class OfMeta(Scaled, metaclass=Meta):
    pass


class WithState(Scaled):
    """Leaves out of its state what it does not know."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in vars(nn.BatchNorm2d(1))}


class WithReduce(Scaled):
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.num_features,), vars(self)


class WithReduceByFunction(Scaled):
    def __reduce__(self) -> tuple[Any, ...]:
        return make, (type(self), self.num_features), vars(self)


def make(cls: Callable[[int], Any], num_features: int) -> Any:
    return cls(num_features)


class WithDeepcopy(Scaled):
    def __deepcopy__(self, memo: Any) -> WithDeepcopy:
        new = type(self)(self.num_features, eps=self.eps)
        new.load_state_dict(self.state_dict())
        return new


class Closed(Scaled):
    """Takes no new attributes."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.closed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "closed" in vars(self) and name != "training":
            raise AttributeError(f"no {name} here")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} stays")


class Split(nn.BatchNorm2d):
    """Another layer for the lower half of the images."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.second = nn.BatchNorm2d(num_features)

    def forward(self, input: Tensor) -> Tensor:
        first, second = input.chunk(2, dim=2)
        return torch.cat([super().forward(first), self.second(second)], dim=2)


class Functional(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        mean, var = self.running_mean, self.running_var
        return nn.functional.batch_norm(input, mean, var, self.weight, self.bias, self.training)


class Helped(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return self.normalised(input) if self.training else super().forward(input)

    def normalised(self, input: Tensor) -> Tensor:
        return nn.functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, True)


class ByName(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm2d.forward(self, input)


class BelowFunctional(Functional):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class NormAct(nn.BatchNorm2d):
    """A twin of timm's ``BatchNormAct2d``: dropout and activation come after a BatchNorm that it spells out itself."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        apply_act: bool = True,
        act_layer: Callable[..., nn.Module] = nn.ReLU,
        inplace: bool = True,
        drop_layer: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.drop = nn.Identity() if drop_layer is None else drop_layer()
        self.act = act_layer(inplace=inplace) if apply_act else nn.Identity()

    def forward(self, input: Tensor) -> Tensor:
        momentum = self.momentum or 0.0
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        of_batch = self.training or self.running_mean is None
        tracked = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if tracked else (None, None)
        output = nn.functional.batch_norm(input, mean, var, self.weight, self.bias, of_batch, momentum, self.eps)
        activated: Tensor = self.act(self.drop(output))
        return activated


# What our built-in converter for timm goes by.
NormAct.__module__, NormAct.__qualname__, NormAct.__name__ = "timm.layers.norm_act", "BatchNormAct2d", "BatchNormAct2d"


class NamedNormAct(Named, NormAct):
    """Has the twin's forward."""


class ReluAfterNormAct(NormAct):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def hooked(layer: nn.Module) -> nn.Module:
    """A layer whose hooks change input, output and gradient."""
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    layer.register_forward_hook(lambda _, __, output: 2 * output)
    layer.register_full_backward_hook(lambda _, gradients, __: (3 * gradients[0],))
    return layer
