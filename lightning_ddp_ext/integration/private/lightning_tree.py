"""Import Lightning's names from the tree that this module is loaded for.

The tree is ``lightning.pytorch`` or ``pytorch_lightning``; see ``trees``. ``pl`` and
``fabric`` are its packages. The private names that this package uses are imported only
here, without the leading underscore, and some public names, so that their uses are short.
``compat`` reads the private attributes of objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.trees import ADAPTERS

if TYPE_CHECKING or __name__.startswith(f"{ADAPTERS['lightning.pytorch']}."):
    import lightning.fabric as fabric
    import lightning.pytorch as pl
else:
    import lightning_fabric as fabric
    import pytorch_lightning as pl

lightning_name: str = pl.__name__
lightning_version: str = pl.__version__


def missing(name: str) -> ImportError:
    """Return the error for a missing Lightning name that this package needs."""
    return ImportError(
        f"lightning_ddp_ext needs {name}, which {lightning_name} {lightning_version} does not have;"
        " install a version of Lightning that this release supports (see README.md)"
    )


def refuse_missing(owner: type, *names: str) -> None:
    """Raise if methods or attributes of a Lightning class are missing.

    Raises:
        ImportError: the first missing one.
    """
    for name in names:
        if not hasattr(owner, name):
            raise missing(f"{owner.__module__}.{owner.__qualname__}.{name}")


def refuse_other_tree(*objects: object) -> None:
    """Raise if some of our callbacks or plugins were made for the other tree.

    Raises:
        ConfigurationError: the message shows the right import.
    """
    [other_name] = ADAPTERS.keys() - {lightning_name}
    own = lightning_name.partition(".")[0]
    other = other_name.partition(".")[0]
    for extension in objects:
        for base in type(extension).__mro__:
            if base.__module__.startswith(f"{ADAPTERS[other_name]}."):
                raise ConfigurationError(
                    f"{base.__name__} is made for {other}, but this Trainer is from {own}; "
                    f"write 'from lightning_ddp_ext.{own} import {base.__name__}'"
                )


try:
    ClusterEnvironment = fabric.plugins.environments.ClusterEnvironment
    LightningEnvironment = fabric.plugins.environments.LightningEnvironment
    RunningStage = pl.trainer.states.RunningStage
    SLURMEnvironment = fabric.plugins.environments.SLURMEnvironment
    TorchElasticEnvironment = fabric.plugins.environments.TorchElasticEnvironment
    TrainerStatus = pl.trainer.states.TrainerStatus
    is_param_in_hook_signature = pl.utilities.signature_utils.is_param_in_hook_signature
    rank_zero_info = pl.utilities.rank_zero.rank_zero_info
    rank_zero_warn = pl.utilities.rank_zero.rank_zero_warn

    # Private.
    GlobalStateSnapshot = pl.strategies.launchers.multiprocessing._GlobalStateSnapshot
    Loop = pl.loops.loop._Loop
    MultiProcessingLauncher = pl.strategies.launchers.multiprocessing._MultiProcessingLauncher
    SubprocessScriptLauncher = pl.strategies.launchers.subprocess_script._SubprocessScriptLauncher
    TunerExitException = pl.utilities.exceptions._TunerExitException
    check_bad_cuda_fork = fabric.strategies.launchers.multiprocessing._check_bad_cuda_fork
    check_missing_main_guard = fabric.strategies.launchers.multiprocessing._check_missing_main_guard
    disable_module_memory_sharing = (
        fabric.strategies.launchers.multiprocessing._disable_module_memory_sharing
    )
    set_num_threads_if_needed = fabric.utilities.distributed._set_num_threads_if_needed
except AttributeError as error:
    raise missing(f"{getattr(error.obj, '__name__', lightning_name)}.{error.name}") from None

# Methods that our subclasses override or call.
refuse_missing(pl.callbacks.ModelCheckpoint, "_monitor_candidates")
refuse_missing(pl.strategies.DDPStrategy, "_configure_launcher")
refuse_missing(MultiProcessingLauncher, "_recover_results_in_main_process", "_wrapping_function")
refuse_missing(SubprocessScriptLauncher, "_call_children_scripts")
