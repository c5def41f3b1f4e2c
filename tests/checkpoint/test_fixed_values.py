"""A saved value that changes unrecorded is named."""

import torch

from lightning_ddp_ext.checkpoint.fixed_values import FixedValues
from lightning_ddp_ext.checkpoint.recorded_buffers import RecordedBuffers


def test_a_recorded_beginning_does_not_hide_the_rest() -> None:
    """A change is found in a buffer that is too large to be recorded, though a small
    buffer shares its first elements.
    """
    module = torch.nn.Module()
    module.register_buffer("queue", torch.zeros(1 << 19))  # 2 MiB
    module.register_buffer("head", module.queue[:1])
    fixed = FixedValues(module, RecordedBuffers(module).tensors)
    assert fixed.find_changed() is None
    module.queue[5] = 1
    assert fixed.find_changed() == "queue"
