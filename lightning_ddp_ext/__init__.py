"""A drop-in ``ddp`` strategy for PyTorch Lightning, and callbacks to use with it.

All ranks exit when one fails, and a stopped run is saved.

Importing the package registers the strategy names ``ddp_ext``, ``ddp_ext_spawn``,
``ddp_ext_fork``, ``ddp_ext_notebook`` and ``ddp_ext_forkserver`` with ``lightning`` and
with ``pytorch_lightning``. In a rank that a script started by running itself again, it
also has the kernel send SIGTERM to this process when that script exits.
"""

# Names with an underscore are not public; the two ``import *`` import the names in the
# ``__all__`` of their modules, which are public.

import sys as _sys
from importlib import metadata as _metadata
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _sys.platform != "linux":
    raise ImportError(f"lightning-ddp-ext needs Linux (got {_sys.platform}); on Windows, use WSL 2")

from lightning_ddp_ext import errors as _errors
from lightning_ddp_ext import trees as _trees
from lightning_ddp_ext.batchnorm.conversion import convert_sync_batchnorm, restore_batchnorm
from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.data.samplers import (
    DistributedBatchSamplerWrapper,
    ExactDistributedSampler,
    ScalableDistributedSampler,
)
from lightning_ddp_ext.errors import *  # noqa: F403
from lightning_ddp_ext.rank_logger import rank_logger
from lightning_ddp_ext.rendezvous.init_method import Env, File, Tcp
from lightning_ddp_ext.rendezvous.nccl_options import NCCLOptions
from lightning_ddp_ext.supervision.launching_process import stop_with_script as _stop_with_script
from lightning_ddp_ext.world import World

if _TYPE_CHECKING:
    from lightning_ddp_ext.integration import public as _public
    from lightning_ddp_ext.integration.public import *  # noqa: F403
else:
    # The classes of the Lightning tree in use, which is known only when this runs. Type
    # checkers see those for ``lightning.pytorch``, which have the same names.
    _public = _trees.adapter("public")
    globals().update({name: getattr(_public, name) for name in _public.__all__})

__all__ = [
    "DistributedBatchSamplerWrapper",
    "Env",
    "ExactDistributedSampler",
    "File",
    "NCCLOptions",
    "ScalableDistributedSampler",
    "SyncBatchNorm",
    "Tcp",
    "World",
    "convert_sync_batchnorm",
    "rank_logger",
    "restore_batchnorm",
]
__all__ += _errors.__all__
__all__ += _public.__all__

try:
    __version__ = _metadata.version("lightning-ddp-ext")
except _metadata.PackageNotFoundError:  # a copy that is not installed
    __version__ = "0+unknown"

_trees.register_names()
_stop_with_script()
