"""Data-parallel training with PyTorch Lightning that starts, fails and stops as it should.

Importing the package registers the strategy names ``ddp_ext``, ``ddp_ext_spawn``, ``ddp_ext_fork``,
``ddp_ext_notebook`` and ``ddp_ext_forkserver``, in ``lightning`` and in ``pytorch_lightning``.
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _sys.platform == "win32":
    raise ImportError("lightning-ddp-ext runs on Linux and macOS, and not on Windows; use it in WSL 2")

from lightning_ddp_ext.batchnorm.conversion import convert_sync_batchnorm, restore_batchnorm
from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.data.samplers import ExactDistributedSampler, ScalableDistributedSampler
from lightning_ddp_ext.data.shared_samplers import DistributedBatchSamplerWrapper
from lightning_ddp_ext.errors import (
    BatchNormError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    ConfigurationError,
    DamagedCheckpointError,
    DDPExtError,
    DivergenceError,
    GroupInUseError,
    MissingRanksError,
    NonFiniteError,
    RankAbsentError,
    RankDiedError,
    RankFailedError,
    RankHungError,
    RendezvousError,
    ResumeError,
    SamplingError,
    UnsafeCheckpointError,
)
from lightning_ddp_ext.rank_logger import rank_logger
from lightning_ddp_ext.rendezvous.init_method import Env, File, Tcp
from lightning_ddp_ext.rendezvous.nccl_options import NCCLOptions
from lightning_ddp_ext.supervision.parent_watch import watch_own_launcher as _watch_own_launcher
from lightning_ddp_ext.trees import adapter as _adapter
from lightning_ddp_ext.trees import register_names as _register_names
from lightning_ddp_ext.version import __version__ as __version__
from lightning_ddp_ext.world import World

if _TYPE_CHECKING:
    from lightning_ddp_ext.integration.public import *  # noqa: F403
else:
    _public = _adapter("public")
    globals().update({name: getattr(_public, name) for name in _public.__all__})

__all__ = [
    "BatchNormError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "ConfigurationError",
    "DDPExtError",
    "DDPExtStrategy",
    "DamagedCheckpointError",
    "DistributedBatchSamplerWrapper",
    "DivergenceError",
    "Env",
    "ExactDistributedSampler",
    "File",
    "GroupInUseError",
    "HangWatchdog",
    "MissingRanksError",
    "NCCLOptions",
    "NonFiniteError",
    "RankAbsentError",
    "RankConsistency",
    "RankDebugger",
    "RankDiedError",
    "RankFailedError",
    "RankHungError",
    "RankZeroCheckpoint",
    "RankZeroCheckpointIO",
    "RendezvousError",
    "ResumeError",
    "SamplerEpochSeeding",
    "SamplingError",
    "ScalableDistributedSampler",
    "SyncBatchNorm",
    "SyncBatchNormConversion",
    "Tcp",
    "UnsafeCheckpointError",
    "World",
    "convert_sync_batchnorm",
    "gather_predictions",
    "rank_logger",
    "restore_batchnorm",
]

_register_names()
_watch_own_launcher()
