"""Import everything that the package takes from Lightning, of the tree that this module was loaded for.

That is ``lightning.pytorch``, or ``pytorch_lightning``; see ``trees``. Private names of Lightning are imported here and
nowhere else, without the underscore in front of them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ddp_ext.errors import ConfigurationError

_IS_SECOND = __package__ == "lightning_ddp_ext.pytorch_lightning"
_OTHER_PACKAGE = "lightning_ddp_ext.integration" if _IS_SECOND else "lightning_ddp_ext.pytorch_lightning"


def refuse_missing(owner: type, *names: str) -> None:
    """Fail clearly where methods of Lightning's that we put ours in the place of are gone.

    Raises:
        ImportError: says which, and what to do.
    """
    for name in names:
        if not hasattr(owner, name):
            raise _missing(f"{owner.__module__}.{owner.__qualname__}.{name}")


def refuse_other_tree(*objects: object) -> None:
    """Refuse callbacks and plugins of ours that are for Trainers of the other tree.

    Raises:
        ConfigurationError: says what to import instead.
    """
    own, other = ("pytorch_lightning", "lightning") if _IS_SECOND else ("lightning", "pytorch_lightning")
    for each in objects:
        for base in type(each).__mro__:
            if base.__module__.startswith(f"{_OTHER_PACKAGE}."):
                raise ConfigurationError(
                    f"{base.__name__} is made for {other}, and this Trainer is of {own}; "
                    f"write from lightning_ddp_ext.{own} import {base.__name__}"
                )


def imported_script_launchers() -> list[type[SubprocessScriptLauncher]]:
    """The class with which stock strategies start ranks, of each tree that is imported."""
    names = [f"{tree}.strategies.launchers.subprocess_script" for tree in ("lightning.pytorch", "pytorch_lightning")]
    return [sys.modules[name]._SubprocessScriptLauncher for name in names if name in sys.modules]


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
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
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
    lightning_name = "pytorch_lightning" if _IS_SECOND else "lightning.pytorch"
    lightning_version = import_module(lightning_name).__version__
    _root, _fabric = lightning_name, "lightning_fabric" if _IS_SECOND else "lightning.fabric"
    _NAMES = {
        _root: ("Callback", "LightningModule", "Trainer"),
        f"{_root}.accelerators": ("Accelerator",),
        f"{_root}.callbacks": ("ModelCheckpoint", "ProgressBar", "RichProgressBar"),
        f"{_root}.loops.loop": ("_Loop",),
        f"{_root}.plugins": ("CheckpointIO", "LayerSync", "Precision", "TorchCheckpointIO", "TorchSyncBatchNorm"),
        f"{_root}.strategies": ("DDPStrategy", "Strategy", "StrategyRegistry"),
        f"{_root}.strategies.launchers.multiprocessing": ("_GlobalStateSnapshot", "_MultiProcessingLauncher"),
        f"{_root}.strategies.launchers.subprocess_script": ("_SubprocessScriptLauncher",),
        f"{_root}.trainer.connectors.logger_connector.result": ("_ResultMetric",),
        f"{_root}.trainer.states": ("RunningStage", "TrainerStatus"),
        f"{_root}.utilities": ("CombinedLoader",),
        f"{_root}.utilities.data": ("_update_dataloader",),
        f"{_root}.utilities.exceptions": ("SIGTERMException", "_TunerExitException"),
        f"{_root}.utilities.rank_zero": ("rank_zero_info", "rank_zero_warn"),
        f"{_fabric}.plugins.environments": (
            "ClusterEnvironment",
            "LightningEnvironment",
            "SLURMEnvironment",
            "TorchElasticEnvironment",
        ),
        f"{_fabric}.strategies.launchers.multiprocessing": (
            "_check_missing_main_guard",
            "_disable_module_memory_sharing",
        ),
        f"{_fabric}.utilities.distributed": ("_set_num_threads_if_needed",),
    }
    for _module, _names in _NAMES.items():
        for _name in _names:
            try:
                globals()[_name.lstrip("_")] = getattr(import_module(_module), _name)
            except (ImportError, AttributeError):
                raise _missing(f"{_module}.{_name}") from None


def calling_result() -> tuple[Any, bool]:
    """The result object of the logged value that ``Strategy.reduce`` was called for, if any; and whether to update it.

    A user may call ``reduce`` with the same arguments, and needs the answer at once: only the calling frame differs.
    """
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name == "reduce":  # also of a strategy that inherits from ours
        frame = frame.f_back
    is_update = frame.f_code is ResultMetric.update.__code__
    is_logged = is_update or frame.f_code is ResultMetric.compute.__code__
    return (frame.f_locals["self"] if is_logged else None), is_update
