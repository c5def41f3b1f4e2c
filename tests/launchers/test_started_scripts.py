"""How the ranks begin that a script starts itself: as the script did, and after a training in
its first process.
"""

import json
from pathlib import Path

import pytest

from tests.harness.scripts import run_script


def texts_after(label: str, output: str) -> list[str]:
    """Return the rest of each line that begins with a label, sorted."""
    return sorted(
        line.removeprefix(label) for line in output.splitlines() if line.startswith(label)
    )


# Replaces itself by a module of its working directory.
RUNS_MODULE = """
import os
import sys

os.execv(sys.executable, [sys.executable, "-m", "pkg.train", "--lr", "0.1"])
"""
PRINTS_START = """
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
    "rank": trainer.global_rank,
    "world_size": trainer.world_size,
    "arguments": sys.argv[1:],
    "directory": os.getcwd(),
}
sys.stdout.write(f"started: {json.dumps(start)}\\n")
sys.stdout.flush()
"""


def test_ranks_of_a_module_start_as_it_did(tmp_path: Path) -> None:
    """With ``python -m``, the ranks have the same arguments and directory."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(PRINTS_START)
    output = run_script(RUNS_MODULE, cwd=tmp_path)
    same = {"world_size": 2, "arguments": ["--lr", "0.1"], "directory": str(tmp_path)}
    starts = [*map(json.loads, texts_after("started: ", output))]
    assert starts == [{"rank": 0, **same}, {"rank": 1, **same}], output


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
    places = texts_after("trains: ", output)
    assert places == ["rank 0 of 1", "rank 0 of 2", "rank 1 of 2"], output


@pytest.mark.nightly
def test_a_started_rank_refuses_a_trainer_with_fewer_devices() -> None:
    """Otherwise, the rank would train alone, as the launching process already did."""
    output = run_script(ALONE_FIRST, "on all ranks", exit_code=1, time_limit=TIME_LIMIT)
    assert (
        "ConfigurationError: this process is local rank 1, but this Trainer has devices=1; use"
        in output
    )
