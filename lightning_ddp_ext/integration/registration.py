"""Register the strategy's names with the Trainer."""

from __future__ import annotations

from .lightning_tree import pl
from .strategy import DDPExtStrategy

_START_METHOD_OF = {
    "ddp_ext": "popen",
    "ddp_ext_spawn": "spawn",
    "ddp_ext_fork": "fork",
    "ddp_ext_notebook": "fork",
    "ddp_ext_forkserver": "forkserver",
}
_SUFFIXES: dict[str, dict[str, bool]] = {
    "": {},
    "_find_unused_parameters_false": {"find_unused_parameters": False},
    "_find_unused_parameters_true": {"find_unused_parameters": True},
}


def register() -> None:
    """Register every name; a second call replaces the entries by the same."""
    for name, start_method in _START_METHOD_OF.items():
        for suffix, options in _SUFFIXES.items():
            pl.strategies.StrategyRegistry.register(
                name + suffix,
                DDPExtStrategy,
                description=f"DDPExtStrategy by {start_method}{suffix}",
                override=True,
                start_method=start_method,
                **options,
            )
