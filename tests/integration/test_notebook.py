"""`ddp_ext_notebook` where Lightning takes the session for an interactive one; a real kernel runs the example."""

from __future__ import annotations

from tests.harness.scripts import run_script

NOTEBOOK = """
    import sys

    sys.ps1 = ">>> "  # what Lightning looks for

    import os

    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    import lightning_ddp_ext
    from tests.harness.training import Net, assert_same, make_trainer, weights

    for ranks in (2, 3):
        model, checkpoint, variables = Net(), ModelCheckpoint(f"{ranks} ranks"), dict(os.environ)
        before = model.layers[0].weight.detach().clone()
        options = {"callbacks": [checkpoint], "enable_checkpointing": True, "max_epochs": ranks}
        trainer = make_trainer("ddp_ext_notebook", devices=ranks, **options)
        trainer.fit(model)
        assert_same(torch.load(checkpoint.best_model_path)["state_dict"], weights(model))
        assert not torch.equal(before, model.layers[0].weight)
        [tested] = trainer.test(model, verbose=False)
        assert [*tested] == ["test_loss"]
        assert dict(os.environ) == variables and not torch.distributed.is_initialized()
        print(os.path.relpath(checkpoint.best_model_path), sorted(trainer.callback_metrics), flush=True)
    try:
        make_trainer("ddp_ext")
    except MisconfigurationException as error:
        print("refused:", error, flush=True)
"""


def test_cells_of_a_notebook_train_one_after_another() -> None:
    """Each gets metrics, best checkpoint and weights back into the session, which is left as it was."""
    done = run_script(NOTEBOOK, time_limit=100)
    assert done.returncode == 0, done.output
    metrics = ["loss", "loss_epoch", "loss_step", "test_loss", "val_loss"]
    assert f"2 ranks/epoch=1-step=8.ckpt {metrics}\n" in done.stdout
    assert f"3 ranks/epoch=2-step=9.ckpt {metrics}\n" in done.stdout
    assert "refused: `Trainer(strategy='ddp_ext')` is not compatible with an interactive environment" in done.stdout
