"""Which run saved a file is told by the identity in it."""

from pathlib import Path

import torch

from lightning_ddp_ext.integration.checkpoints.fit_identity import KEY, FitIdentity
from lightning_ddp_ext.integration.checkpoints.last_search import choose
from tests.harness.scripts import run_script


def identity(*, job: str, node: str) -> FitIdentity:
    return FitIdentity({}, {"NODE": node}, job, is_in_a_hook=False)


def save_identity(path: str, *, job: str, node: str) -> None:
    torch.save({KEY: identity(job=job, node=node).to_entry()}, path)


def test_a_requeued_job_prefers_its_own_file_though_a_variable_has_changed(tmp_path: Path) -> None:
    """Another job's newer file is left alone, even if that job had the same variables."""
    own = str(tmp_path / "own.ckpt")
    other = str(tmp_path / "other.ckpt")
    save_identity(own, job="1", node="before")
    save_identity(other, job="2", node="now")
    chosen = choose([other, own], set(), identity(job="1", node="now")).chosen
    assert chosen is not None
    assert chosen.path == own
    assert chosen.changed == ["NODE"]


PRINT_HASH = """
    import sys

    import lightning as L
    from lightning_ddp_ext.integration.checkpoints.fit_identity import identify

    model = L.LightningModule()
    model.save_hyperparameters({"cfg": {"drop": {"a", "b", "c"}, "keep": ["d"]}})
    sys.stdout.write(identify((model,), 1).facts["module.cfg"])
"""


def test_hyperparameters_with_sets_have_the_same_identity_in_each_process() -> None:
    """The order of a set differs between processes."""
    hashes = [run_script(PRINT_HASH, env={"PYTHONHASHSEED": seed}).output for seed in "123"]
    assert len(set(hashes)) == 1, hashes
