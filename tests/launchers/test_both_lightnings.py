"""Scripts that use ``pytorch_lightning``, whose classes are those of ``lightning`` from other
modules.
"""

import json
from pathlib import Path

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext.errors import ConfigurationError
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script
from tests.harness.training import raised

# Each of two ranks trains with ``pytorch_lightning``, and then with ``lightning``; it prints
# a report as a line of JSON after both.
TRAINS_WITH_BOTH = """
import json
import os
import sys

import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel

import lightning_ddp_ext

OPTIONS = dict(
    strategy="ddp_ext", devices=2, accelerator="cpu", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)


def report(trainer, **facts):
    bases = [each for each in type(trainer.strategy).mro() if each.__name__ == "DDPStrategy"]
    facts |= {
        "lightnings": [base.__module__.partition(".")[0] for base in bases],
        "rank": trainer.global_rank,
        "world size": trainer.world_size,
        "steps": trainer.global_step,
    }
    sys.stdout.write(json.dumps(facts) + "\\n")
    sys.stdout.flush()


def use_pytorch_lightning(path):
    pl.seed_everything(1)
    consistency = lightning_ddp_ext.RankConsistency()
    trainer = pl.Trainer(max_steps=2, callbacks=[consistency], **OPTIONS)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(path)

    resumed = pl.Trainer(max_steps=4, **OPTIONS)
    model = BoringModel()
    resumed.fit(model, ckpt_path=path)
    resumed.predict(model)
    predictions = lightning_ddp_ext.gather_predictions(resumed)
    report(
        resumed,
        predictions=None if predictions is None else len(predictions),
        weights=model.layer.weight.sum().item().hex(),
        imported=[name for name in sys.modules if name.partition(".")[0] == "lightning"],
    )


def use_lightning():
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = L.Trainer(max_steps=1, **OPTIONS)
    trainer.fit(BoringModel())
    report(trainer)


directory = sys.argv[1]
rank = str(int(os.fork() == 0))  # after the imports, which take seconds
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
os.environ["DDPX_INIT_METHOD"] = f"file://{directory}/store"
use_pytorch_lightning(f"{directory}/2.ckpt")
use_lightning()
if rank == "0":
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_a_script_uses_both_lightnings(tmp_path: Path) -> None:
    """``pytorch_lightning`` trains, resumes and predicts on both ranks without importing
    ``lightning``, whose Trainer then trains on the same ranks.
    """
    output = run_script(TRAINS_WITH_BOTH, str(tmp_path))
    reports = sorted(
        (json.loads(line) for line in output.splitlines() if line.startswith("{")),
        key=lambda report: (report["steps"], report["rank"]),
    )
    of_lightning = {"lightnings": ["lightning"], "world size": 2, "steps": 1}
    of_pytorch_lightning = {
        "lightnings": ["pytorch_lightning"],
        "world size": 2,
        "steps": 4,
        "imported": [],
        "weights": reports[-1].get("weights"),  # the same on both ranks
    }
    assert reports == [
        {"rank": 0, **of_lightning},
        {"rank": 1, **of_lightning},
        {"rank": 0, "predictions": 64, **of_pytorch_lightning},
        {"rank": 1, "predictions": None, **of_pytorch_lightning},
    ], output


def give_callback_of_pytorch_lightning(rank: int, world_size: int) -> str:
    """Return the error of a Trainer of ``lightning``."""
    from lightning_ddp_ext.pytorch_lightning import RankConsistency

    class UsersCallback(RankConsistency):
        """A user's own class, which the error names by that of the package."""

    trainer = L.Trainer(
        strategy="ddp_ext",
        callbacks=[UsersCallback(60)],
        devices=1,
        accelerator="cpu",
        logger=False,
    )
    return str(raised(ConfigurationError, trainer.fit, BoringModel()))


def test_a_callback_of_the_other_lightning_is_refused() -> None:
    """The error names its Lightning, and the right import."""
    assert run_ranks(give_callback_of_pytorch_lightning, 1) == [
        "RankConsistency is made for pytorch_lightning, but this Trainer is from lightning; "
        "write 'from lightning_ddp_ext.lightning import RankConsistency'"
    ]
