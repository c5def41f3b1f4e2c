"""Collect the public names for one Lightning tree, and register the strategy names."""

from .callbacks.rank_consistency import RankConsistency
from .callbacks.rank_debugger import RankDebugger
from .callbacks.rank_zero_checkpoint import RankZeroCheckpoint
from .callbacks.sampler_epoch_seeding import SamplerEpochSeeding
from .callbacks.slow_ranks import SlowRanks
from .checkpoints.checkpoint_io import RankZeroCheckpointIO
from .data.predictions import gather_predictions
from .private.lightning_tree import pl
from .strategy import DDPExtStrategy
from .sync_batchnorm import SyncBatchNormConversion

__all__ = [
    "DDPExtStrategy",
    "RankConsistency",
    "RankDebugger",
    "RankZeroCheckpoint",
    "RankZeroCheckpointIO",
    "SamplerEpochSeeding",
    "SlowRanks",
    "SyncBatchNormConversion",
    "gather_predictions",
]

_START_METHODS = {
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

for _name, _start_method in _START_METHODS.items():
    for _suffix, _options in _SUFFIXES.items():
        pl.strategies.StrategyRegistry.register(
            _name + _suffix,
            DDPExtStrategy,
            description=f"DDPExtStrategy with start_method={_start_method!r}{_suffix}",
            override=True,
            start_method=_start_method,
            **_options,
        )
