"""A script that starts its own ranks keeps its environment, gets the results, and its
ranks had the right settings.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.outcomes import Outcome
from tests.harness.ranks import free_port, run_ranks
from tests.harness.scripts import run_script
from tests.harness.training import Net, make_trainer

SCRIPT = """
    import gc
    import json
    import os
    import sys
    import warnings
    from types import FunctionType

    import lightning as L
    import torch

    from tests.harness.training import At, Net, make_trainer, weights

    LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")
    KINDS = (FunctionType, type, property, classmethod, staticmethod)


    def definitions():
        # Functions and classes of all imported modules, and the methods of these classes.
        warnings.simplefilter("ignore", FutureWarning)  # of torch's module attributes
        found = {}
        for module_name, module in list(sys.modules.items()):
            if module_name.partition(".")[0] in LIBRARIES:
                found |= defined_in(module, module_name)
                for name, cls in list(vars(module).items()):
                    if isinstance(cls, type) and cls.__module__ == module_name:
                        found |= defined_in(cls, f"{module_name}.{name}")
        return found


    def defined_in(owner, name):
        items = list(vars(owner).items())
        return {f"{name}.{key}": value for key, value in items if isinstance(value, KINDS)}


    def changed(before):
        now = definitions()
        return sorted(name for name, value in before.items() if now.get(name) is not value)


    torch.optim.SGD([torch.zeros(1)])  # torch changes SGD.step when it makes the first one
    BEFORE = definitions()
    import lightning_ddp_ext as ddpx


    def tell(what, **facts):
        facts = {"what": what, "other definitions": changed(BEFORE), **facts}
        sys.stdout.write(json.dumps(facts) + "\\n")
        sys.stdout.flush()


    def train(what, strategy, *callbacks, **options):
        L.seed_everything(5)
        before = dict(os.environ)
        model = Net()
        in_step = At(
            "on_train_batch_start",
            lambda trainer: tell(
                f"in {what}", rank=trainer.global_rank, RANK=os.environ.get("RANK")
            ),
        )
        trainer = make_trainer(strategy, callbacks=[in_step, *callbacks], **options)
        trainer.fit(model)
        after = dict(os.environ)
        both = sorted(before.keys() | after.keys())
        names = [name for name in both if before.get(name) != after.get(name)]
        digest = {name: value.double().sum().item().hex() for name, value in weights(model).items()}
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        tell(what, rank=trainer.global_rank, changed=names, weights=digest, found=found)


    def train_with_callbacks(what, strategy):
        ours = [
            ddpx.SyncBatchNormConversion(),
            ddpx.SamplerEpochSeeding(),
            ddpx.RankZeroCheckpoint("checkpoints"),
        ]
        train(what, strategy, *ours, enable_checkpointing=True)


    if __name__ == "__main__":
        collects = gc.isenabled(), gc.get_freeze_count() < 1000  # Python 3.12 starts with some 400
        tell(
            "start",
            rank=os.environ.get("LOCAL_RANK", 0),
            seed=os.environ.get("PL_GLOBAL_SEED"),
            collects=collects,
        )
        train("first", "ddp_ext")
        train_with_callbacks("second", "ddp_ext")
        train("stock", "ddp")
        train_with_callbacks("stock with callbacks", "ddp")
"""


def reports(done: Outcome, what: str) -> list[dict[str, Any]]:
    """Return the processes' reports on ``what``, by rank."""
    told = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    return sorted(
        (report for report in told if report["what"] == what),
        key=lambda report: int(report["rank"]),
    )


@pytest.mark.lowest
def test_a_script_and_its_trainers() -> None:
    """A plain script, in a shell with an exported RANK, starts its ranks once for all
    its Trainers.

    Stock ones among its Trainers use the same ranks; a variable may say where these
    meet. No class and no module of Lightning or torch is changed, by the import, and in
    and after each run.
    """
    url = f"tcp://127.0.0.1:{free_port()}"
    env = {"RANK": "0", "OMP_NUM_THREADS": None, "DDPX_INIT_METHOD": url}
    done = run_script(SCRIPT, env=env)
    assert done.exit_code == 0, done.output
    trained = {
        what: reports(done, what) for what in ("first", "second", "stock", "stock with callbacks")
    }
    for what, (one, other) in trained.items():
        assert (one["rank"], other["rank"]) == (0, 1), what
        assert one["found"] == other["found"], what
        assert one["weights"] == other["weights"], what
    assert trained["first"][0]["weights"] == trained["stock"][0]["weights"]
    assert done.output.count(f"process group: gloo, 2 ranks, {url}\n") == 1
    started = [(report["rank"], report["seed"]) for report in reports(done, "start")]
    assert started == [(0, None), ("1", "5")], "once, with the seed from the first line on"
    collects = [report["collects"] for report in reports(done, "start")]
    assert collects == [[True, True], [True, False]], "a started rank leaves its imports out"
    # As with stock, whose launcher leaves MASTER_ADDR, MASTER_PORT and NODE_RANK behind
    # as well.
    assert [trained[what][0]["changed"] for what in ("first", "second")] == [
        ["DDPX_RANK_PID", "LOCAL_RANK", "OMP_NUM_THREADS"],
        [],
    ]
    variables = [report["RANK"] for report in reports(done, "in first")]
    assert variables == ["0", None], "a stray RANK is neither followed nor taken away"
    looks = re.findall(r'"other definitions": (.*?), "rank"', done.output)
    assert looks == ["[]"] * 2 * (1 + 2 * len(trained)), looks


class Talkative(Net):
    """Logs as many metrics as a model with a hundred classes."""

    def on_train_epoch_end(self) -> None:
        for number in range(400):
            self.log(f"accuracy_of_class_number_{number}", float(number))


def fit_by_fork(rank: int, world_size: int) -> tuple[int, float, bool]:
    changed = set()
    sys.addaudithook(
        lambda event, args: changed.add(args[0]) if event in ("os.putenv", "os.unsetenv") else None
    )
    trainer = make_trainer(DDPExtStrategy(start_method="fork"), max_epochs=1)
    trainer.fit(Talkative())
    metrics = dict(trainer.callback_metrics)
    trainer.test(Net(), verbose=False)
    return len(metrics), float(metrics["accuracy_of_class_number_399"]), b"PATH" in changed


@pytest.mark.lowest
def test_results_of_any_size_are_returned() -> None:
    """Results may exceed a pipe: Lightning would read it after the ranks exit, and the
    ranks exit after it is read.

    Other threads find a variable such as PATH in the environment all the time.
    """
    assert run_ranks(fit_by_fork, 1) == [(404, 399.0, False)]
