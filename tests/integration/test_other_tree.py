"""``pytorch_lightning`` has the same classes as ``lightning``, from other modules."""

import json
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext.errors import ConfigurationError
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script

FIT_RESUME_AND_PREDICT = """
    import json
    import os
    import sys

    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel
    import lightning_ddp_ext

    if __name__ == "__main__":
        rank = str(int(os.fork() == 0))
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        os.environ["DDPX_INIT_METHOD"] = f"file://{sys.argv[2]}"
        pl.seed_everything(1)
        options = dict(
            strategy="ddp_ext", devices=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        consistency = lightning_ddp_ext.RankConsistency()
        trainer = pl.Trainer(max_steps=2, callbacks=[consistency], **options)
        trainer.fit(BoringModel())
        trainer.save_checkpoint(sys.argv[1])
        trainer = pl.Trainer(max_steps=4, **options)
        model = BoringModel()
        trainer.fit(model, ckpt_path=sys.argv[1])
        trainer.predict(model)
        predictions = lightning_ddp_ext.gather_predictions(trainer)
        report = {
            "rank": trainer.global_rank,
            "world size": trainer.world_size,
            "steps": trainer.global_step,
            "predictions": None if predictions is None else len(predictions),
            "is of this tree": isinstance(trainer.strategy, pl.strategies.DDPStrategy),
            "weights": model.layer.weight.sum().item().hex(),
            "other tree": [name for name in sys.modules if name.partition(".")[0] == "lightning"],
        }
        import lightning as L
        from lightning.pytorch.demos.boring_classes import BoringModel as LightningModel

        trainer = L.Trainer(max_steps=1, **options)
        trainer.fit(LightningModel())
        report["steps with lightning"] = trainer.global_step
        sys.stdout.write(json.dumps(report) + "\\n")
        sys.stdout.flush()
        if rank == "0":
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_the_other_tree_trains(tmp_path: Path) -> None:
    """The Trainer of `pytorch_lightning` trains, resumes and predicts.

    `lightning` is not imported. Where the script imports it later, its Trainer trains
    on the same ranks.
    """
    done = run_script(FIT_RESUME_AND_PREDICT, str(tmp_path / "2.ckpt"), str(tmp_path / "store"))
    assert done.exit_code == 0, done.output
    reports = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    first, second = sorted(reports, key=lambda report: report["rank"])
    common = {
        "world size": 2,
        "steps": 4,
        "is of this tree": True,
        "weights": first["weights"],
        "other tree": [],
        "steps with lightning": 1,
    }
    assert first == {"rank": 0, "predictions": 64, **common}
    assert second == {"rank": 1, "predictions": None, **common}


def give_other_callback(rank: int, world_size: int) -> str:
    from lightning_ddp_ext.pytorch_lightning import HangWatchdog  # imports the other tree

    class UsersWatchdog(HangWatchdog):
        pass

    options = {"devices": 1, "accelerator": "cpu", "logger": False}
    trainer = L.Trainer(strategy="ddp_ext", callbacks=[UsersWatchdog(60)], **options)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(BoringModel())
    return str(caught.value)


def test_a_callback_of_the_other_tree_is_refused() -> None:
    """The error names its tree, and the right import."""
    assert run_ranks(give_other_callback, 1) == [
        "HangWatchdog is made for pytorch_lightning, but this Trainer is from lightning; "
        "write 'from lightning_ddp_ext.lightning import HangWatchdog'"
    ]
