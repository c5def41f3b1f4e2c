"""`lightning.pytorch` and `pytorch_lightning` are two class trees: ours belongs to the one that the user works with."""

from __future__ import annotations

import importlib
import importlib.abc
import json
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import launch_ranks, run_ranks
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
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_ddp_ext"]:
        del sys.modules[name]  # as in a process that has not imported it
    ours = importlib.import_module("lightning_ddp_ext")
    tree: str = ours.DDPExtStrategy.__mro__[1].__module__.partition(".")[0]
    pl = importlib.import_module("lightning.pytorch" if tree == "lightning" else tree)
    assert isinstance(pl.Trainer(strategy="ddp_ext", devices=2, accelerator="cpu").strategy, ours.DDPExtStrategy)
    return tree


@pytest.mark.parametrize(
    ("imports", "hidden", "variable", "tree"),
    [
        (["pytorch_lightning"], [], None, "lightning"),
        ([], [], "pytorch_lightning", "pytorch_lightning"),
        ([], ["pytorch_lightning", "lightning_fabric"], None, "lightning"),
    ],
    ids=["both imported", "the other one asked for", "the other one not installed"],
)
def test_the_variable_names_the_tree_and_else_the_imports(
    imports: list[str], hidden: list[str], variable: str | None, tree: str
) -> None:
    """With both trees imported it is `lightning`, unless `DDPX_LIGHTNING` says otherwise."""
    assert run_ranks(tree_in_use, 1, imports, hidden, env={"DDPX_LIGHTNING": variable}) == [tree]


def test_another_value_of_the_variable_is_refused() -> None:
    """The message names the variable, what it may be, what it is and what to do."""
    (outcome,) = launch_ranks(tree_in_use, 1, [], env={"DDPX_LIGHTNING": "pl"})
    assert outcome.error is not None
    assert f"{outcome.error.type_name}: {outcome.error.message}" == (
        "ConfigurationError: DDPX_LIGHTNING must be one of lightning, pytorch_lightning (got 'pl'); "
        "name the package that your code imports, or unset it"
    )


OTHER_TREE = """
    import json
    import logging
    import sys

    if sys.argv[1] == "alone":
        from tests.integration.test_lightning_trees import hide

        hide("lightning")
    import pytorch_lightning as pl
    from pytorch_lightning.demos.boring_classes import BoringModel
    import lightning_ddp_ext
    from lightning_ddp_ext import RankLogging, rank_logger

    logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(message)s")
    log = rank_logger("user", ranks=0)
    everywhere = rank_logger("user")

    class Model(BoringModel):
        def on_train_start(self):
            log.info("trains")
            everywhere.info("here")

    if __name__ == "__main__":
        log.info("starts")
        pl.seed_everything(1)
        options = dict(
            strategy="ddp_ext", devices=int(sys.argv[2]), accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer = pl.Trainer(max_steps=2, callbacks=[RankLogging(sys.argv[4])], **options)
        trainer.fit(Model())
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
    """With `import pytorch_lightning as pl` its Trainer trains, resumes and predicts; `lightning` is not imported.

    What rank 0 alone logs is there once, also before the ranks meet, and each rank has a file of its own.
    """
    done = run_script(OTHER_TREE, lightning, str(ranks), str(tmp_path / "it.ckpt"), str(tmp_path), time_limit=100)
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
    assert done.stderr.count("INFO|starts\n") == 1
    said = sorted(re.findall(r"INFO\|(?:\[rank (\d)/2 [^ ]+\] )?(here|trains)\n", done.stderr))
    assert said == ([("", "here"), ("", "trains")] if ranks == 1 else [("0", "here"), ("0", "trains"), ("1", "here")])
    for rank in range(ranks):
        assert "INFO user: here\n" in (tmp_path / f"rank-{rank}.log").read_text()


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
        ("ddp_ext", "pytorch_lightning lightning_ddp_ext", OTHER),
        ("ddp_ext_fork", "lightning_ddp_ext pytorch_lightning", LIGHTNING),
    ],
)
def test_trainers_of_both_trees_train_on_the_same_ranks(strategy: str, imports: str, package: str) -> None:
    """Whatever is imported first, both know the names, use one process group, and learn the same on all ranks."""
    done = run_script(BOTH, strategy, imports, env={"OMP_NUM_THREADS": "1"}, time_limit=100)
    assert done.returncode == 0, done.output
    reports = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "["]
    assert sorted(first["rank"] for first, _, _ in reports) == ([0] if "fork" in strategy else [0, 1])
    trained = [each for first, second, _ in reports for each in (first, second)]
    assert all(each["of its tree"] for each in trained)
    if "fork" not in strategy:  # from forked ranks the weights come back, and no counters
        assert {each["steps"] for each in trained} == {2}
    assert len({each["weights"] for each in trained}) == 1
    assert all(module.startswith(f"{package}.") for _, _, module in reports)


def test_adapters_import_one_another_relatively() -> None:
    """By an absolute name the second tree's adapters would get those of the first."""
    import lightning_ddp_ext

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
