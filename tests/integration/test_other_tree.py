"""Scripts that use ``pytorch_lightning``, whose classes are those of ``lightning`` from other
modules.
"""

import json
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext.errors import ConfigurationError
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script

# Each of two ranks reports on Trainers of ``pytorch_lightning``, and then on one of
# ``lightning``.
SCRIPT = """
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


    def report(trainer, ddp, **facts):
        facts |= {
            "rank": trainer.global_rank,
            "world size": trainer.world_size,
            "steps": trainer.global_step,
            "strategy": [each for each in ("pl", "L") if isinstance(trainer.strategy, ddp[each])],
        }
        sys.stdout.write(json.dumps(facts) + "\\n")
        sys.stdout.flush()


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
    imported = [name for name in sys.modules if name.partition(".")[0] == "lightning"]

    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel as LightningModel

    ddp = {"pl": pl.strategies.DDPStrategy, "L": L.pytorch.strategies.DDPStrategy}
    report(
        trainer,
        ddp,
        predictions=None if predictions is None else len(predictions),
        weights=model.layer.weight.sum().item().hex(),
        imported=imported,
    )
    trainer = L.Trainer(max_steps=1, **options)
    trainer.fit(LightningModel())
    report(trainer, ddp)
    if rank == "0":
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_script_uses_both_trees(tmp_path: Path) -> None:
    """``pytorch_lightning`` trains, resumes and predicts on both ranks without importing
    ``lightning``, whose Trainer then trains on the same ranks.
    """
    output = run_script(SCRIPT, str(tmp_path))
    reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    first, second = sorted(
        (report for report in reports if report["strategy"] == ["pl"]),
        key=lambda report: report["rank"],
    )
    common = {"world size": 2, "steps": 4, "strategy": ["pl"], "imported": []}
    common["weights"] = first["weights"]
    assert first == {"rank": 0, "predictions": 64, **common}
    assert second == {"rank": 1, "predictions": None, **common}
    of_lightning = [report for report in reports if report["strategy"] == ["L"]]
    assert sorted(report["rank"] for report in of_lightning) == [0, 1]
    assert {(report["world size"], report["steps"]) for report in of_lightning} == {(2, 1)}


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
