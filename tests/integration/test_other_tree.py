"""Scripts that use ``pytorch_lightning``, whose classes are those of ``lightning`` from other
modules.
"""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext.errors import ConfigurationError
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script

START_TWO_RANKS = """
    import json
    import os
    import sys

    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel
    import lightning_ddp_ext

    rank = str(int(os.fork() == 0))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    os.environ["DDPX_INIT_METHOD"] = f"file://{sys.argv[1]}/store"
    options = dict(
        strategy="ddp_ext", devices=2, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
"""
TRAIN_RESUME_AND_PREDICT = """
    pl.seed_everything(1)
    path = f"{sys.argv[1]}/2.ckpt"
    trainer = pl.Trainer(max_steps=2, callbacks=[lightning_ddp_ext.RankConsistency()], **options)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(path)
    trainer = pl.Trainer(max_steps=4, **options)
    model = BoringModel()
    trainer.fit(model, ckpt_path=path)
    trainer.predict(model)
    predictions = lightning_ddp_ext.gather_predictions(trainer)
    report = {
        "rank": trainer.global_rank,
        "world size": trainer.world_size,
        "steps": trainer.global_step,
        "predictions": None if predictions is None else len(predictions),
        "is pytorch_lightning's": isinstance(trainer.strategy, pl.strategies.DDPStrategy),
        "weights": model.layer.weight.sum().item().hex(),
        "imported of lightning": [
            name for name in sys.modules if name.partition(".")[0] == "lightning"
        ],
    }
"""
TRAIN_WITH_BOTH = """
    pl.Trainer(max_steps=2, **options).fit(BoringModel())

    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel as LightningModel

    trainer = L.Trainer(max_steps=1, **options)
    trainer.fit(LightningModel())
    report = {
        "rank": trainer.global_rank,
        "world size": trainer.world_size,
        "steps": trainer.global_step,
        "is lightning's": isinstance(trainer.strategy, L.pytorch.strategies.DDPStrategy),
    }
"""
PRINT_REPORT_AND_EXIT = """
    sys.stdout.write(json.dumps(report) + "\\n")
    sys.stdout.flush()
    if rank == "0":
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def reports_of(train: str, directory: Path) -> list[dict[str, Any]]:
    """Return the ``report`` that this part of a script makes on each of two ranks."""
    done = run_script(START_TWO_RANKS + train + PRINT_REPORT_AND_EXIT, str(directory))
    assert done.exit_code == 0, done.output
    reports = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    return sorted(reports, key=lambda report: report["rank"])


def test_pytorch_lightning_trains_resumes_and_predicts(tmp_path: Path) -> None:
    """Its Trainer runs on both ranks, and ``lightning`` is not imported."""
    first, second = reports_of(TRAIN_RESUME_AND_PREDICT, tmp_path)
    common = {
        "world size": 2,
        "steps": 4,
        "is pytorch_lightning's": True,
        "weights": first["weights"],
        "imported of lightning": [],
    }
    assert first == {"rank": 0, "predictions": 64, **common}
    assert second == {"rank": 1, "predictions": None, **common}


def test_a_script_can_import_lightning_later(tmp_path: Path) -> None:
    """The Trainer of ``lightning`` then trains on the same ranks."""
    common = {"world size": 2, "steps": 1, "is lightning's": True}
    assert reports_of(TRAIN_WITH_BOTH, tmp_path) == [{"rank": rank, **common} for rank in (0, 1)]


def give_callback_of_pytorch_lightning(rank: int, world_size: int) -> str:
    from lightning_ddp_ext.pytorch_lightning import RankConsistency

    class UsersCallback(RankConsistency):
        pass

    options = {"devices": 1, "accelerator": "cpu", "logger": False}
    trainer = L.Trainer(strategy="ddp_ext", callbacks=[UsersCallback(60)], **options)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(BoringModel())
    return str(caught.value)


def test_a_callback_of_another_tree_is_refused() -> None:
    """The error names its tree, and the right import."""
    assert run_ranks(give_callback_of_pytorch_lightning, 1) == [
        "RankConsistency is made for pytorch_lightning, but this Trainer is from lightning; "
        "write 'from lightning_ddp_ext.lightning import RankConsistency'"
    ]
