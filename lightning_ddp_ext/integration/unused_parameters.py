"""Name the parameters that DDP says were not used: it gives their numbers alone."""

from __future__ import annotations

import re

from torch import nn

_SHOWN = 10


def name_unused(error: BaseException, module: nn.Module) -> None:
    """Begin the message of DDP's error about unused parameters with their names and the remedy; leave others alone."""
    message = str(error)
    found = re.search(r"which did not receive grad for rank (\d+): ([\d ]+)", message)
    if found is None or "find_unused_parameters" not in message:
        return
    known = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    unused = [known[number] for number in map(int, found[2].split()) if number < len(known)]
    error.args = (f"{_sentence(unused, rank=int(found[1]))}\n{message}",)


def _sentence(unused: list[str], *, rank: int) -> str:
    more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
    return (
        f"rank {rank} has not used these parameters in the loss that training_step returned: "
        f"{', '.join(unused[:_SHOWN])}{more}; DDP waits for their gradients. If that is meant, choose "
        "strategy='ddp_ext_find_unused_parameters_true', or DDPExtStrategy(find_unused_parameters=True)"
    )
