"""A save or a restore that takes long shows how far it is: on rank 0, and where the Trainer shows a bar at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar

from tests.integration.checkpointing import Net, trainer_for
from tests.ranks import by_hand_env, launch_ranks


def saves_and_restores(rank: int, world_size: int, directory: Path, bar: Any) -> None:
    from lightning_ddp_ext.integration import progress

    progress._LONG = 0.0  # everything takes long
    callbacks = [bar] if isinstance(bar, RichProgressBar) else []
    options = {"max_epochs": 1, "enable_progress_bar": bar is not None, "limit_val_batches": 0}
    trainer = trainer_for("strategy", directory, None, callbacks, **options)
    trainer.fit(Net())
    trainer.save_checkpoint(directory / "it.ckpt")
    trainer.test(Net(), ckpt_path=directory / "it.ckpt", verbose=False)


@pytest.mark.parametrize(("bar", "shown"), [("tqdm", True), (RichProgressBar(), True), (None, False)])
def test_what_takes_long_shows_a_bar_on_rank_zero(bar: Any, shown: bool, tmp_path: Path) -> None:
    """The Trainer's kind of bar, tqdm or rich; none where the Trainer's is off, and none on other ranks."""
    outcomes = launch_ranks(saves_and_restores, 2, tmp_path, bar, env={**by_hand_env(2), "FORCE_COLOR": "1"})
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()
    for what in ("checkpoint: saving", "checkpoint: verifying"):
        assert (what in outcomes[0].output) is shown, outcomes[0].output
        assert what not in outcomes[1].output
