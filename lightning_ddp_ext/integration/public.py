"""What users import that belongs to one of the two Lightning trees."""

from .callbacks.hang_watchdog import HangWatchdog
from .callbacks.rank_consistency import RankConsistency
from .callbacks.rank_debugger import RankDebugger
from .callbacks.rank_zero_checkpoint import RankZeroCheckpoint
from .callbacks.sampler_epoch_seeding import SamplerEpochSeeding
from .callbacks.sync_batchnorm_conversion import SyncBatchNormConversion
from .checkpoint_io import RankZeroCheckpointIO
from .predictions import gather_predictions
from .strategy import DDPExtStrategy

__all__ = [
    "DDPExtStrategy",
    "HangWatchdog",
    "RankConsistency",
    "RankDebugger",
    "RankZeroCheckpoint",
    "RankZeroCheckpointIO",
    "SamplerEpochSeeding",
    "SyncBatchNormConversion",
    "gather_predictions",
]
