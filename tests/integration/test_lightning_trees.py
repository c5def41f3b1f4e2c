"""`lightning.pytorch` and `pytorch_lightning` are two class trees: ours belongs to the one that the user works with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script

OTHER_TREE = """
    import json
    import os
    import sys

    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel
    import lightning_ddp_ext

    if __name__ == "__main__":
        rank = str(int(os.fork() == 0))
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "DDPX_INIT_METHOD": f"file://{sys.argv[2]}"}
        pl.seed_everything(1)
        options = dict(
            strategy="ddp_ext", devices=2, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer = pl.Trainer(max_steps=2, callbacks=[lightning_ddp_ext.RankConsistency()], **options)
        trainer.fit(BoringModel())
        trainer.save_checkpoint(sys.argv[1])
        trainer = pl.Trainer(max_steps=4, **options)
        model = BoringModel()
        trainer.fit(model, ckpt_path=sys.argv[1])
        trainer.predict(model)
        predictions = lightning_ddp_ext.gather_predictions(trainer)
        report = {
            "rank": trainer.global_rank,
            "world": trainer.world_size,
            "steps": trainer.global_step,
            "predictions": None if predictions is None else len(predictions),
            "is of this tree": isinstance(trainer.strategy, pl.strategies.DDPStrategy),
            "weights": model.layer.weight.sum().item().hex(),
            "other tree": sorted(name for name in sys.modules if name.partition(".")[0] == "lightning"),
        }
        import lightning as L
        from lightning.pytorch.demos.boring_classes import BoringModel as LightningModel

        trainer = L.Trainer(max_steps=1, **options)
        trainer.fit(LightningModel())
        report["steps with lightning"] = trainer.global_step
        sys.stdout.write(json.dumps(report) + "\\n")
        sys.stdout.flush()
        if rank == "0":
            sys.exit(os.wait()[1])
"""


def test_the_other_tree_trains(tmp_path: Path) -> None:
    """With `import pytorch_lightning as pl` its Trainer trains, resumes and predicts; `lightning` is not imported.

    Where the script imports it later, its Trainer trains on the same ranks.
    """
    done = run_script(OTHER_TREE, str(tmp_path / "it.ckpt"), str(tmp_path / "store"))
    assert done.exit_code == 0, done.output
    told = [json.loads(line) for line in done.output.splitlines() if line[:1] == "{"]
    reports = sorted(told, key=lambda report: report["rank"])
    assert [(report["rank"], report["world"], report["steps"]) for report in reports] == [(0, 2, 4), (1, 2, 4)]
    assert [report["predictions"] for report in reports] == [64, None]
    assert len({report["weights"] for report in reports}) == 1
    assert all(report["is of this tree"] for report in reports)
    assert not any(report["other tree"] for report in reports)
    assert [report["steps with lightning"] for report in reports] == [1, 1]


def give_other_callback(rank: int, world_size: int) -> str:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_ddp_ext.errors import ConfigurationError
    from lightning_ddp_ext.pytorch_lightning import HangWatchdog

    class Mine(HangWatchdog):
        pass

    trainer = L.Trainer(strategy="ddp_ext", devices=1, accelerator="cpu", callbacks=[Mine(60)], logger=False)
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(BoringModel())
    return str(caught.value)


def test_a_callback_of_the_other_tree_is_refused() -> None:
    """The error names its tree, and the right import."""
    assert run_ranks(give_other_callback, 1) == [
        "HangWatchdog is made for pytorch_lightning, but this Trainer is from lightning; "
        "write 'from lightning_ddp_ext.lightning import HangWatchdog'"
    ]
