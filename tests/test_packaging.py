"""What an installed copy says about itself."""

import re
from importlib import metadata, resources
from pathlib import Path

import pytest

import lightning_ddp_ext

pytestmark = pytest.mark.lowest  # importing the package already leans on much of Lightning

CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"

PUBLIC = [
    "BatchNormError",
    "BatchNormInputError",
    "BatchNormMismatchError",
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointSaveError",
    "ConfigurationError",
    "ConversionError",
    "DDPExtError",
    "DDPExtStrategy",
    "DamagedCheckpointError",
    "DisagreementError",
    "DistributedBatchSamplerWrapper",
    "DistributedWeightedSampler",
    "DivergenceError",
    "DuplicateRankError",
    "DurationError",
    "Env",
    "ExactDistributedSampler",
    "ExactEvaluationError",
    "File",
    "GroupInUseError",
    "HangWatchdog",
    "InitMethodError",
    "LogMismatchError",
    "MissingRanksError",
    "NCCLOptions",
    "OptionError",
    "RankAbsentError",
    "RankConsistency",
    "RankDebugger",
    "RankDiedError",
    "RankFailedError",
    "RankHungError",
    "RankLeftError",
    "RankLogging",
    "RankMismatchError",
    "RankZeroCheckpoint",
    "RankZeroCheckpointIO",
    "RendezvousError",
    "ResumeError",
    "SamplerEpochSeeding",
    "SamplerError",
    "SamplingError",
    "ScalableDistributedSampler",
    "StoreError",
    "SyncBatchNorm",
    "SyncBatchNormConversion",
    "Tcp",
    "UnevenInputsError",
    "UnsafeCheckpointError",
    "World",
    "WorldError",
    "convert_sync_batchnorm",
    "gather_predictions",
    "rank_logger",
    "register_converter",
    "restore_batchnorm",
    "ring_all_reduce",
]


def test_changelog_opens_with_the_version_of_the_package() -> None:
    """The newest entry of the changelog is the version that the package reports."""
    newest = re.search(r"^## \[(\d\S*)\] - \d{4}-\d{2}-\d{2}$", CHANGELOG.read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None, "no line such as '## [0.1.0] - 2026-11-21' in CHANGELOG.md"
    assert newest[1] == lightning_ddp_ext.__version__


def test_installed_version_is_the_version_of_the_package() -> None:
    """`pip show` and `__version__` agree (when they do not: `make venv`)."""
    assert metadata.version("lightning-ddp-ext") == lightning_ddp_ext.__version__


def test_public_names_are_sorted_exact_and_there() -> None:
    """A name is added to or taken from the public surface on purpose, here too."""
    assert sorted(lightning_ddp_ext.__all__) == lightning_ddp_ext.__all__
    assert lightning_ddp_ext.__all__ == PUBLIC
    assert [name for name in PUBLIC if not hasattr(lightning_ddp_ext, name)] == []


def test_types_are_shipped() -> None:
    """Type checkers of users read our annotations."""
    assert resources.files("lightning_ddp_ext").joinpath("py.typed").is_file()
