"""Files that are laid out as nobody writes them: they are read as `torch.load` reads them, or refused in a sentence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.serialization import set_crc32_options

from lightning_ddp_ext import HangWatchdog, RankZeroCheckpointIO, SamplerEpochSeeding
from lightning_ddp_ext.integration.checkpoints import wants_content
from tests.harness.damage import with_overlapping_records, with_shadow_records
from tests.harness.training import assert_same, make_trainer
from tests.integration.checkpointing import AtStart, Keeper, Net, Side, everything, on_ranks, trainer_for

MODES = pytest.mark.parametrize("mode", ["map", "broadcast"])


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    """The checkpoint of a short run, whose callback keeps a large tensor, and what there was to be saved."""
    torch.manual_seed(1)
    keeper = Keeper(torch.arange(100_000.0))
    trainer = make_trainer("auto", devices=1, max_epochs=1, callbacks=[keeper])
    trainer.fit(Net(width=64))
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    return tmp_path / "it.ckpt", everything(trainer, keeper)


def resumed(side: Side, directory: Path, path: Path, mode: Any) -> dict[str, Any]:
    keeper = Keeper()
    at_start = AtStart(keeper)
    trainer = trainer_for(side, directory, RankZeroCheckpointIO(restore=mode), [keeper, at_start], max_epochs=2)
    trainer.fit(Net(width=64), ckpt_path=path)
    return at_start.state


@MODES
def test_records_that_nothing_refers_to_are_harmless(mode: str, saved: tuple[Path, Any], tmp_path: Path) -> None:
    """Whatever else lies in the file and wherever, weights, optimisers and callbacks get what is theirs."""
    path, before = saved
    with_shadow_records(path)
    for state in on_ranks(resumed, "strategy", tmp_path, path, mode):
        assert_same(state | {"epoch": 0}, before | {"epoch": 0, "mapped": []})


def refused(side: Side, directory: Path, path: Path, mode: Any) -> str:
    try:
        resumed(side, directory, path, mode)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@MODES
@pytest.mark.parametrize("spoil", [lambda path: with_overlapping_records(path, 30)])
def test_records_that_overlap_are_refused(
    mode: str, spoil: Callable[[Path], Path], saved: tuple[Path, Any], tmp_path: Path
) -> None:
    """A small file cannot claim gigabytes of work; the error names two of the records, on every rank."""
    path, _ = saved
    spoil(path)
    for told in on_ranks(refused, "strategy", tmp_path, path, mode):
        assert told.startswith(f"DamagedCheckpointError: checkpoint {path} is damaged: records data/")
        assert "overlap; use an earlier checkpoint" in told


def warned(side: Side, directory: Path, path: Path, mode: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed(side, directory, path, mode)
    return [str(each.message) for each in caught if "checksums" in str(each.message)]


@MODES
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_without_checksums_is_read_with_a_warning(mode: str, saved: tuple[Path, Any], tmp_path: Path) -> None:
    """On rank 0: nobody can tell whether such a file is what was written."""
    path, _ = saved
    set_crc32_options(False)
    try:
        torch.save(torch.load(path, weights_only=False), path)
    finally:
        set_crc32_options(True)
    told, others = on_ranks(warned, "strategy", tmp_path, path, mode)
    assert len(told) == 1
    assert told[0].startswith(f"checkpoint {path} has no checksums, so altered numbers cannot be told from right ones")
    assert others == []


class Looks(L.Callback):
    """Reads what is about to be loaded."""

    def on_load_checkpoint(self, *_: Any) -> None: ...


def test_the_packages_own_hooks_do_not_look_at_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a watchdog weights are mapped; beside a user's hook they are not."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")  # the watchdog would leave it there
    for callback, looks in ((HangWatchdog(60), False), (SamplerEpochSeeding(), False), (Looks(), True)):
        trainer = make_trainer("auto", devices=1, callbacks=[callback])
        assert wants_content(Net(), trainer) is looks
