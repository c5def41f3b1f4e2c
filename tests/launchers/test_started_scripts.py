"""Scripts: how the ranks that one starts itself begin; ``python -m lightning_ddp_ext``, which
describes each rank and times an all-reduce; and those that use ``pytorch_lightning``, whose
classes are those of ``lightning`` from other modules.
"""

import json
import re
from importlib import metadata
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_ddp_ext.errors import ConfigurationError
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_on_ranks, run_script
from tests.harness.training import raised

# How the ranks of a script start.

SCRIPT = """
import json
import os
import sys

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ddp_ext

trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp_ext", max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(BoringModel())
start = {
    "arguments": sys.argv[1:],
    "directory": os.getcwd(),
    "rank": trainer.global_rank,
    "world_size": trainer.world_size,
}
sys.stdout.write(f"started: {json.dumps(start)}\\n")
sys.stdout.flush()
"""
# ``run_script`` appends the script's path. If the launcher's words name a module, this
# harmless path becomes the last argument.
NO_SCRIPT = "/dev/null"


def test_ranks_of_a_module_start_as_it_did(tmp_path: Path) -> None:
    """With ``python -m``, the ranks have the same arguments and directory."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "train.py").write_text(SCRIPT)
    output = run_script(
        NO_SCRIPT,
        launcher=("env", "-C", str(tmp_path), "python", "-m", "pkg.train", "--lr", "0.1"),
    )
    starts = map(json.loads, re.findall(r"^started: (.*)$", output, re.MULTILINE))
    expected = {
        "arguments": ["--lr", "0.1", NO_SCRIPT],
        "directory": str(tmp_path),
        "world_size": 2,
    }
    assert sorted(starts, key=lambda start: start["rank"]) == [
        {**expected, "rank": rank} for rank in (0, 1)
    ]


TIME_LIMIT = 90.0  # seconds; ranks that do not find each other would wait for init_timeout
# Trains on one device, in the first process only if "guarded", and then on two.
ALONE_FIRST = """
import os
import sys

import lightning_ddp_ext
from tests.harness.training import At, Net, make_trainer


def show_place(trainer):
    place = " of ".join(os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE"))
    sys.stdout.write(f"trains: rank {place}\\n")
    sys.stdout.flush()


def train(devices):
    callbacks = [At("on_train_start", show_place)]
    make_trainer("ddp_ext", devices=devices, callbacks=callbacks, max_steps=1).fit(Net())


if __name__ == "__main__":
    is_guarded = sys.argv[1] == "guarded"
    if not is_guarded or "LOCAL_RANK" not in os.environ:  # this process starts the others
        train(devices=1)
    train(devices=2)
"""


def test_a_process_that_trained_alone_starts_ranks_and_joins_them() -> None:
    """A script may try its model on one device, and then train on all of them.

    A ``RANK`` without the other variables of a launcher has no effect.
    """
    output = run_script(ALONE_FIRST, "guarded", env={"RANK": "3"}, time_limit=TIME_LIMIT)
    trains = re.findall(r"^trains: (.*)$", output, re.MULTILINE)
    assert sorted(trains) == ["rank 0 of 1", "rank 0 of 2", "rank 1 of 2"], output


@pytest.mark.nightly
def test_a_started_rank_refuses_a_trainer_with_fewer_devices() -> None:
    """Otherwise, the rank would train alone, as the launching process already did."""
    output = run_script(ALONE_FIRST, "on all ranks", exit_code=1, time_limit=TIME_LIMIT)
    assert (
        "ConfigurationError: this process is local rank 1, but this Trainer has devices=1; use"
        in output
    )


# The script of the package itself.


def test_each_rank_is_described_before_an_all_reduce(tmp_path: Path) -> None:
    """Under a launcher, each rank prints its place, and rank 0 the time."""
    command = tmp_path / "command.py"
    command.write_text(
        "import runpy\n\n"
        "runpy.run_module('lightning_ddp_ext', run_name='__main__', alter_sys=True)\n"
    )
    output = run_on_ranks(command, "--accelerator", "cpu", cwd=tmp_path)
    versions = rf"torch {re.escape(metadata.version('torch'))}, lightning \S+, lightning-ddp-ext \S"
    for rank in (0, 1):
        place = rf"^rank {rank} of 2: local rank {rank} of node 0, .*, pid \d+, cpu \(CPU\); "
        assert re.search(f"{place}.*{versions}", output, re.MULTILINE), output
    assert re.search(r"^env://: all-reduce of 4 MiB in \d+\.\d ms$", output, re.MULTILINE), output


# Both Lightnings.


# Each of two ranks reports on Trainers of ``pytorch_lightning``, and then on one of
# ``lightning``.
OF_BOTH_TREES = """
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
    output = run_script(OF_BOTH_TREES, str(tmp_path))
    reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    first, second = sorted(
        (report for report in reports if report["strategy"] == ["pl"]),
        key=lambda report: report["rank"],
    )
    common = {
        "world size": 2,
        "steps": 4,
        "strategy": ["pl"],
        "imported": [],
        "weights": first["weights"],
    }
    assert first == {"rank": 0, "predictions": 64, **common}
    assert second == {"rank": 1, "predictions": None, **common}
    of_lightning = [report for report in reports if report["strategy"] == ["L"]]
    assert sorted(report["rank"] for report in of_lightning) == [0, 1]
    assert {(report["world size"], report["steps"]) for report in of_lightning} == {(2, 1)}


def give_callback_of_pytorch_lightning(rank: int, world_size: int) -> str:
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


def test_a_callback_of_another_tree_is_refused() -> None:
    """The error names its tree, and the right import."""
    assert run_ranks(give_callback_of_pytorch_lightning, 1) == [
        "RankConsistency is made for pytorch_lightning, but this Trainer is from lightning; "
        "write 'from lightning_ddp_ext.lightning import RankConsistency'"
    ]
