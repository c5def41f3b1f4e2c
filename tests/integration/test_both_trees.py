"""One program with Trainers of `lightning` and of `pytorch_lightning`, as where a library brings the other one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lightning_ddp_ext
from tests.harness.ranks import run_ranks
from tests.harness.scripts import run_script

BOTH = """
    import json
    import os
    import sys
    from importlib import import_module

    for name in sys.argv[2].split():
        import_module(name)

    import lightning as L
    import pytorch_lightning as pl
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel as LightningModel
    from pytorch_lightning.demos.boring_classes import BoringModel as OtherModel

    import lightning_ddp_ext
    import lightning_ddp_ext.lightning
    import lightning_ddp_ext.pytorch_lightning

    def train(tree, model, callbacks):
        options = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = tree.Trainer(
            strategy=sys.argv[1], devices=2, accelerator="cpu", max_steps=2, callbacks=callbacks, **options
        )
        torch.manual_seed(1)
        model = model()
        trainer.fit(model)
        return {
            "rank": trainer.global_rank,
            "steps": trainer.global_step,
            "weights": model.layer.weight.sum().item().hex(),
            "of its tree": isinstance(trainer.strategy, tree.strategies.DDPStrategy),
        }

    if __name__ == "__main__":
        first = train(L.pytorch, LightningModel, [lightning_ddp_ext.lightning.RankConsistency()])
        second = train(pl, OtherModel, [lightning_ddp_ext.pytorch_lightning.RankConsistency()])
        report = json.dumps([first, second, lightning_ddp_ext.RankConsistency.__module__])
        sys.stdout.write(report + "\\n")
        sys.stdout.flush()
"""

LIGHTNING, OTHER = "lightning_ddp_ext.integration", "lightning_ddp_ext.pytorch_lightning"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "imports", "package"),
    [
        ("ddp_ext", "lightning lightning_ddp_ext", LIGHTNING),
        ("ddp_ext", "pytorch_lightning lightning_ddp_ext", OTHER),
        ("ddp_ext_spawn", "lightning_ddp_ext pytorch_lightning", LIGHTNING),
    ],
)
def test_trainers_of_both_trees_train_on_the_same_ranks(strategy: str, imports: str, package: str) -> None:
    """Whatever is imported first, both know the names, use one process group, and learn the same on all ranks."""
    done = run_script(BOTH, strategy, imports, time_limit=100)
    assert done.returncode == 0, done.output
    reports = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "["]
    assert sorted(first["rank"] for first, _, _ in reports) == ([0] if "spawn" in strategy else [0, 1])
    trained = [each for first, second, _ in reports for each in (first, second)]
    assert all(each["of its tree"] for each in trained)
    if "spawn" not in strategy:  # from spawned ranks the weights come back, and no counters
        assert {each["steps"] for each in trained} == {2}
    assert len({each["weights"] for each in trained}) == 1
    assert all(module.startswith(f"{package}.") for _, _, module in reports)


def test_adapters_import_one_another_relatively() -> None:
    """By an absolute name the second tree's adapters would get those of the first."""
    package = Path(lightning_ddp_ext.__file__).parent / "integration"
    absolute = [path.name for path in package.rglob("*.py") if "lightning_ddp_ext.integration" in path.read_text()]
    assert absolute == ["lightning_tree.py"]  # which says what each package is called


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
    """The error says which tree it is for, and what to import."""
    assert run_ranks(give_other_callback, 1) == [
        "HangWatchdog is made for pytorch_lightning, and this Trainer is of lightning; "
        "write from lightning_ddp_ext.lightning import HangWatchdog"
    ]


def import_tree_without_us(rank: int, world_size: int) -> str:
    import sys

    import lightning_ddp_ext  # noqa: F401

    sys.modules["lightning_ddp_ext.pytorch_lightning"] = None  # type: ignore[assignment] # as with an old version
    import pytorch_lightning

    return pytorch_lightning.__name__


def test_an_unsupported_version_of_the_other_tree_can_be_imported() -> None:
    """A library may need it for Trainers that are none of ours."""
    assert run_ranks(import_tree_without_us, 1) == ["pytorch_lightning"]
