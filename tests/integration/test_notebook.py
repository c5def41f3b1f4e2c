"""`ddp_ext_notebook` where Lightning takes the session for an interactive one."""

from __future__ import annotations

import json

from tests.harness.scripts import run_script

# The two cells differ in their model, their number of ranks and their callbacks.
NOTEBOOK = """
    import sys

    sys.ps1 = ">>> "  # what Lightning looks for

    import json
    import os

    import lightning as L
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    import lightning_ddp_ext
    from tests.harness.training import Net, make_trainer, weights

    for number, ranks in enumerate((2, 3)):
        L.seed_everything(1)
        model, checkpoint = Net(), ModelCheckpoint(f"cell{number}")
        before, variables = weights(model), dict(os.environ)
        trainer = make_trainer(
            "ddp_ext_notebook", devices=ranks, callbacks=[checkpoint], enable_checkpointing=True, max_epochs=1 + number
        )
        trainer.fit(model)
        saved = torch.load(checkpoint.best_model_path, weights_only=True)
        tested = trainer.test(model, verbose=False)
        report = {
            "metrics": sorted(trainer.callback_metrics),
            "best": os.path.relpath(checkpoint.best_model_path),
            "has learnt": any(not torch.equal(before[name], value) for name, value in weights(model).items()),
            "is what was saved": all(torch.equal(saved["state_dict"][n], v) for n, v in weights(model).items()),
            "state": str(trainer.state.status.value),
            "tested": [sorted(metrics) for metrics in tested],
            "environment kept": dict(os.environ) == variables,
            "group here": torch.distributed.is_initialized(),
        }
        print(json.dumps(report), flush=True)
    try:
        make_trainer("ddp_ext")
    except MisconfigurationException as error:
        print("refused:", error, flush=True)
"""


def test_cells_of_a_notebook_train_one_after_another() -> None:
    """Each gets metrics, best checkpoint and weights back into the session, which is left as it was."""
    done = run_script(NOTEBOOK, time_limit=100)
    assert done.returncode == 0, done.output
    cells = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [cell.pop("best") for cell in cells] == ["cell0/epoch=0-step=4.ckpt", "cell1/epoch=1-step=6.ckpt"]
    expected = {
        "metrics": ["loss", "loss_epoch", "loss_step", "test_loss", "val_loss"],
        "has learnt": True,
        "is what was saved": True,
        "state": "finished",
        "tested": [["test_loss"]],
        "environment kept": True,
        "group here": False,
    }
    assert cells == [expected, expected]
    assert "refused: `Trainer(strategy='ddp_ext')` is not compatible with an interactive environment" in done.stdout
