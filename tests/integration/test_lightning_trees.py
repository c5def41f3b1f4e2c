"""`lightning.pytorch` and `pytorch_lightning` are two class trees: ours belongs to the one that the user works with."""

from __future__ import annotations

import importlib
import importlib.abc
import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import import_package_anew, launch_ranks, run_ranks
from tests.harness.scripts import run_script

# A rank of the harness has imported lightning.pytorch already, and not the other tree.


class Without(importlib.abc.MetaPathFinder):
    """Finds what another finder finds, except the packages of a distribution that is to seem not installed."""

    def __init__(self, finder: Any, names: Sequence[str]) -> None:
        self.finder, self.names = finder, names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self.names:
            return None
        spec: ModuleSpec | None = self.finder.find_spec(name, path, target)
        return spec


def hide(*names: str) -> None:
    sys.meta_path[:] = [Without(finder, names) for finder in sys.meta_path]


def tree_in_use(rank: int, world_size: int, imports: Sequence[str], hidden: Sequence[str] = ()) -> str:
    """The package that our strategy's base class comes from, after these imports."""
    hide(*hidden)
    for name in imports:
        importlib.import_module(name)
    ours = import_package_anew()
    tree: str = ours.DDPExtStrategy.__mro__[1].__module__.partition(".")[0]
    pl = importlib.import_module("lightning.pytorch" if tree == "lightning" else tree)
    assert isinstance(pl.Trainer(strategy="ddp_ext", devices=2, accelerator="cpu").strategy, ours.DDPExtStrategy)
    return tree


@pytest.mark.parametrize(
    ("imports", "variable", "tree"),
    [
        ([], None, "lightning"),
        (["pytorch_lightning"], None, "lightning"),
        ([], "lightning", "lightning"),
        ([], "pytorch_lightning", "pytorch_lightning"),
        (["pytorch_lightning"], "pytorch_lightning", "pytorch_lightning"),
    ],
)
def test_the_variable_names_the_tree_and_else_the_imports(imports: list[str], variable: str | None, tree: str) -> None:
    """With both trees imported it is `lightning`, unless `DDPX_LIGHTNING` says otherwise."""
    assert run_ranks(tree_in_use, 1, imports, env={"DDPX_LIGHTNING": variable}) == [tree]


def test_lightning_alone_will_do() -> None:
    """Without the other distribution nothing is missed."""
    assert run_ranks(tree_in_use, 1, [], ["pytorch_lightning", "lightning_fabric"]) == ["lightning"]


@pytest.mark.parametrize("value", ["lightning.pytorch", "pl", ""])
def test_another_value_of_the_variable_is_refused(value: str) -> None:
    """The message names the variable, what it may be, what it is and what to do."""
    outcome = launch_ranks(tree_in_use, 1, [], env={"DDPX_LIGHTNING": value})[0]
    assert outcome.error is not None
    assert outcome.error.type_name == "ConfigurationError"
    assert outcome.error.message == (
        f"DDPX_LIGHTNING must be one of lightning, pytorch_lightning (got {value!r}); "
        "name the package that your code imports, or unset it"
    )


OTHER_TREE = """
    import json
    import sys

    if sys.argv[1] == "alone":
        from tests.integration.test_lightning_trees import hide

        hide("lightning")
    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel
    import lightning_ddp_ext

    if __name__ == "__main__":
        pl.seed_everything(1)
        options = dict(
            strategy="ddp_ext", devices=int(sys.argv[2]), accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer = pl.Trainer(max_steps=2, **options)
        trainer.fit(BoringModel())
        trainer.save_checkpoint(sys.argv[3])
        trainer = pl.Trainer(max_steps=4, **options)
        model = BoringModel()
        trainer.fit(model, ckpt_path=sys.argv[3])
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
        sys.stdout.write(json.dumps(report) + "\\n")
        sys.stdout.flush()
"""


@pytest.mark.parametrize(("lightning", "ranks"), [("beside", 2), ("alone", 1)])
def test_the_other_tree_trains(lightning: str, ranks: int, tmp_path: Path) -> None:
    """With `import pytorch_lightning as pl` its Trainer trains, resumes and predicts; `lightning` is not imported."""
    done = run_script(OTHER_TREE, lightning, str(ranks), str(tmp_path / "it.ckpt"), time_limit=100)
    assert done.returncode == 0, done.output
    reports = sorted(
        (json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"), key=lambda r: r["rank"]
    )
    assert [(report["rank"], report["world"], report["steps"]) for report in reports] == [
        (rank, ranks, 4) for rank in range(ranks)
    ]
    assert [report["predictions"] for report in reports] == [64, *[None] * (ranks - 1)]
    assert len({report["weights"] for report in reports}) == 1
    assert all(report["is of this tree"] for report in reports)
    assert not any(report["other tree"] for report in reports)
