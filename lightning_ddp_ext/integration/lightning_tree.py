"""Which of the two Lightning distributions is in use, and everything that we take from it.

``lightning.pytorch`` and ``pytorch_lightning`` are separate class trees, often installed together: a strategy made
from one is refused by a Trainer of the other. The variable ``DDPX_LIGHTNING`` names the tree; else it is the one that
has been imported already; else ``lightning``, if it is installed.

Private names of Lightning are imported here and nowhere else.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ddp_ext.errors import ConfigurationError

__all__ = [
    "GlobalStateSnapshot",
    "Callback",
    "CheckpointIO",
    "ClusterEnvironment",
    "CombinedLoader",
    "DDPStrategy",
    "LayerSync",
    "LightningEnvironment",
    "LightningModule",
    "Loop",
    "ModelCheckpoint",
    "MultiProcessingLauncher",
    "Precision",
    "ProgressBar",
    "RichProgressBar",
    "RunningStage",
    "SIGTERMException",
    "SLURMEnvironment",
    "Accelerator",
    "Strategy",
    "StrategyRegistry",
    "SubprocessScriptLauncher",
    "TorchCheckpointIO",
    "TorchElasticEnvironment",
    "TorchSyncBatchNorm",
    "Trainer",
    "TrainerStatus",
    "TunerExitException",
    "calling_result",
    "check_missing_main_guard",
    "disable_module_memory_sharing",
    "lightning_name",
    "lightning_version",
    "rank_zero_info",
    "rank_zero_warn",
    "refuse_missing",
    "set_num_threads_if_needed",
    "update_dataloader",
]

_FABRIC_OF = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_CHOICES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _pick() -> str:
    chosen = os.environ.get("DDPX_LIGHTNING")
    if chosen is not None:
        if chosen not in _CHOICES:
            raise ConfigurationError(
                f"DDPX_LIGHTNING must be one of {', '.join(_CHOICES)} (got {chosen!r}); "
                "name the package that your code imports, or unset it"
            )
        return _CHOICES[chosen]
    imported = [tree for tree in _FABRIC_OF if tree in sys.modules]
    installed = [tree for name, tree in _CHOICES.items() if importlib.util.find_spec(name) is not None]
    return (imported or installed or ["lightning.pytorch"])[0]


def _private(module: str, name: str) -> Any:
    """A private name of Lightning, or an error that says what is to be done when it is gone."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise _missing(f"{module}.{name}") from None


def refuse_missing(owner: type, *names: str) -> None:
    """Fail clearly where methods of Lightning's that we put ours in the place of are gone.

    Raises:
        ImportError: says which, and what to do.
    """
    for name in names:
        if not hasattr(owner, name):
            raise _missing(f"{owner.__module__}.{owner.__qualname__}.{name}")


def _missing(name: str) -> ImportError:
    return ImportError(
        f"lightning_ddp_ext needs {name}, which {lightning_name} {lightning_version} does not have; "
        "install a version of Lightning that this release supports (see README.md)"
    )


if TYPE_CHECKING:
    from lightning.fabric.plugins.environments import (
        ClusterEnvironment,
        LightningEnvironment,
        SLURMEnvironment,
        TorchElasticEnvironment,
    )
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar
    from lightning.pytorch.loops.loop import _Loop as Loop
    from lightning.pytorch.plugins import CheckpointIO, LayerSync, Precision, TorchCheckpointIO, TorchSyncBatchNorm
    from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers.multiprocessing import (
        _GlobalStateSnapshot as GlobalStateSnapshot,
    )
    from lightning.pytorch.strategies.launchers.multiprocessing import (
        _MultiProcessingLauncher as MultiProcessingLauncher,
    )
    from lightning.pytorch.strategies.launchers.subprocess_script import (
        _SubprocessScriptLauncher as SubprocessScriptLauncher,
    )
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
    from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.data import _update_dataloader as update_dataloader
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

    lightning_name: str
    lightning_version: str

    from lightning.fabric.strategies.launchers.multiprocessing import (
        _check_missing_main_guard as check_missing_main_guard,
    )
    from lightning.fabric.strategies.launchers.multiprocessing import (
        _disable_module_memory_sharing as disable_module_memory_sharing,
    )
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed

else:
    lightning_name = _pick()
    _fabric = _FABRIC_OF[lightning_name]
    _root = import_module(lightning_name)
    lightning_version = _root.__version__
    Callback, LightningModule, Trainer = _root.Callback, _root.LightningModule, _root.Trainer
    _environments = import_module(f"{_fabric}.plugins.environments")
    ClusterEnvironment = _environments.ClusterEnvironment
    LightningEnvironment = _environments.LightningEnvironment
    SLURMEnvironment = _environments.SLURMEnvironment
    TorchElasticEnvironment = _environments.TorchElasticEnvironment
    Accelerator = import_module(f"{lightning_name}.accelerators").Accelerator
    _plugins = import_module(f"{lightning_name}.plugins")
    CheckpointIO, Precision = _plugins.CheckpointIO, _plugins.Precision
    TorchCheckpointIO = _plugins.TorchCheckpointIO
    LayerSync, TorchSyncBatchNorm = _plugins.LayerSync, _plugins.TorchSyncBatchNorm
    _strategies = import_module(f"{lightning_name}.strategies")
    DDPStrategy, StrategyRegistry = _strategies.DDPStrategy, _strategies.StrategyRegistry
    Strategy = _strategies.Strategy
    _callbacks = import_module(f"{lightning_name}.callbacks")
    ModelCheckpoint = _callbacks.ModelCheckpoint
    ProgressBar, RichProgressBar = _callbacks.ProgressBar, _callbacks.RichProgressBar
    _states = import_module(f"{lightning_name}.trainer.states")
    RunningStage, TrainerStatus = _states.RunningStage, _states.TrainerStatus
    CombinedLoader = import_module(f"{lightning_name}.utilities").CombinedLoader
    _rank_zero = import_module(f"{lightning_name}.utilities.rank_zero")
    rank_zero_info, rank_zero_warn = _rank_zero.rank_zero_info, _rank_zero.rank_zero_warn
    _launchers = f"{lightning_name}.strategies.launchers"
    MultiProcessingLauncher = _private(f"{_launchers}.multiprocessing", "_MultiProcessingLauncher")
    GlobalStateSnapshot = _private(f"{_launchers}.multiprocessing", "_GlobalStateSnapshot")
    SubprocessScriptLauncher = _private(f"{_launchers}.subprocess_script", "_SubprocessScriptLauncher")
    Loop = _private(f"{lightning_name}.loops.loop", "_Loop")
    _ResultMetric = _private(f"{lightning_name}.trainer.connectors.logger_connector.result", "_ResultMetric")
    SIGTERMException = import_module(f"{lightning_name}.utilities.exceptions").SIGTERMException
    TunerExitException = _private(f"{lightning_name}.utilities.exceptions", "_TunerExitException")
    _multiprocessing = f"{_fabric}.strategies.launchers.multiprocessing"
    check_missing_main_guard = _private(_multiprocessing, "_check_missing_main_guard")
    disable_module_memory_sharing = _private(_multiprocessing, "_disable_module_memory_sharing")
    set_num_threads_if_needed = _private(f"{_fabric}.utilities.distributed", "_set_num_threads_if_needed")
    update_dataloader = _private(f"{lightning_name}.utilities.data", "_update_dataloader")


def calling_result() -> tuple[Any, bool]:
    """The result object of the logged value that ``Strategy.reduce`` was called for, if any; and whether to update it.

    A user may call ``reduce`` with the same arguments, and needs the answer at once: only the calling frame differs.
    """
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name == "reduce":  # also of a strategy that inherits from ours
        frame = frame.f_back
    is_update = frame.f_code is _ResultMetric.update.__code__
    is_logged = is_update or frame.f_code is _ResultMetric.compute.__code__
    return (frame.f_locals["self"] if is_logged else None), is_update
