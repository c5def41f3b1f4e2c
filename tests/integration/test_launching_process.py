"""The process that starts the ranks: its Trainers, its variables, and its results."""

import json
from typing import Any

import pytest

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.ranks import free_port, run_ranks
from tests.harness.scripts import run_script
from tests.harness.training import Net, make_trainer

pytestmark = pytest.mark.lowest

SEED = "5"
TRAINERS = ("first", "second", "stock", "stock with callbacks")
# Each process reports its state at its start ("start"), in a step of each Trainer ("in
# first"), and after each training ("first").
SCRIPT = """
    import copy
    import json
    import os
    import sys
    import warnings
    from types import FunctionType

    import lightning as L
    import torch

    from tests.harness.training import At, Net, make_trainer, weights

    LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")
    VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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


    def report(what, **facts):
        facts = {"what": what, "other definitions": changed(BEFORE), **facts}
        sys.stdout.write(json.dumps(facts) + "\\n")
        sys.stdout.flush()


    def report_step(what, trainer):
        variables = {name: os.environ.get(name) for name in VARIABLES}
        report(f"in {what}", rank=trainer.global_rank, **variables)


    def train(what, strategy, *callbacks, **options):
        L.seed_everything(int(sys.argv[1]))
        before = dict(os.environ)
        model = Net()
        in_step = At("on_train_batch_start", lambda trainer: report_step(what, trainer))
        trainer = make_trainer(strategy, callbacks=[in_step, *callbacks], **options)
        trainer.fit(model)
        names = {name for name, _ in before.items() ^ dict(os.environ).items()}
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        sums = {name: value.double().sum().item().hex() for name, value in weights(model).items()}
        report(
            what,
            rank=trainer.global_rank,
            changed=sorted(names),
            weights=sums,
            metrics=metrics,
        )


    if __name__ == "__main__":
        report(
            "start",
            rank=os.environ.get("LOCAL_RANK", 0),
            seed=os.environ.get("PL_GLOBAL_SEED"),
        )
        train("first", "ddp_ext")
        ours = [
            ddpx.SyncBatchNormConversion(),
            ddpx.SamplerEpochSeeding(),
            ddpx.RankZeroCheckpoint("checkpoints"),
        ]
        train("second", "ddp_ext", *ours, enable_checkpointing=True)
        train("stock", "ddp")
        # Callbacks can be copied after a run, for example for the next fold.
        train("stock with callbacks", "ddp", *copy.deepcopy(ours), enable_checkpointing=True)
"""


@pytest.fixture(scope="module")
def script() -> str:
    """Return the output of the script; the user has exported ``RANK`` and ``DDPX_INIT_METHOD``."""
    url = f"tcp://127.0.0.1:{free_port()}"
    env = {"RANK": "0", "OMP_NUM_THREADS": None, "DDPX_INIT_METHOD": url}
    output = run_script(SCRIPT, SEED, env=env)
    formed = f"process group: gloo, 2 ranks, {url}\n"
    assert output.count(formed) == 1, "the ranks connect once, for all Trainers"
    return output


def reports(script: str, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the launching process and rank 1 reported at a point."""
    lines = [json.loads(line) for line in script.splitlines() if line.startswith("{")]
    at_point = [report for report in lines if report["what"] == what]
    on_rank_0, on_rank_1 = sorted(at_point, key=lambda report: int(report["rank"]))
    return on_rank_0, on_rank_1


def test_all_trainers_of_a_script_use_the_same_ranks(script: str) -> None:
    """The ranks start once, and stock Trainers train on them as well."""
    for what in TRAINERS:
        on_rank_0, on_rank_1 = reports(script, what)
        assert (on_rank_0["rank"], on_rank_1["rank"]) == (0, 1)
        assert on_rank_0["metrics"] == on_rank_1["metrics"]
        assert on_rank_0["weights"] == on_rank_1["weights"]


def test_a_trainer_learns_what_a_stock_one_learns(script: str) -> None:
    """In one script, with the same seed, the weights are equal to the last bit."""
    (ours, _), (stock, _) = reports(script, "first"), reports(script, "stock")
    assert ours["weights"] == stock["weights"]


def test_a_started_rank_has_the_seed_from_its_first_line_on(script: str) -> None:
    """The seed of the launching process is set before the script runs again."""
    on_rank_0, on_rank_1 = reports(script, "start")
    assert (on_rank_0["seed"], on_rank_1["seed"]) == (None, SEED)


def test_the_launching_process_keeps_its_environment(script: str) -> None:
    """After the first run, two variables are new or changed; after the second, none.

    Stock's launcher leaves these, and also MASTER_ADDR, MASTER_PORT and NODE_RANK.
    """
    (first, _), (second, _) = reports(script, "first"), reports(script, "second")
    assert (first["changed"], second["changed"]) == (["LOCAL_RANK", "OMP_NUM_THREADS"], [])


def test_the_launching_process_has_the_variables_of_a_rank(script: str) -> None:
    """In each run, both processes have the variables by which user code divides data; a
    ``RANK`` that the user exports stays, and a started rank does not inherit it.
    """
    for what in ("in first", "in second"):
        on_rank_0, on_rank_1 = reports(script, what)
        assert (on_rank_0["LOCAL_RANK"], on_rank_1["LOCAL_RANK"]) == ("0", "1")
        assert (on_rank_0["NODE_RANK"], on_rank_0["WORLD_SIZE"]) == ("0", "2")
        for name in ("NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            assert on_rank_0[name] == on_rank_1[name] is not None
        assert (on_rank_0["RANK"], on_rank_1["RANK"]) == ("0", None)


def test_no_definition_of_lightning_or_torch_changes(script: str) -> None:
    """This holds after the import, during each run and after it."""
    for what in ("start", *TRAINERS, *(f"in {trainer}" for trainer in TRAINERS)):
        for report in reports(script, what):
            assert report["other definitions"] == []


METRIC = "accuracy_of_class_number_"
METRICS = 400


class Talkative(Net):
    """Logs as many metrics as a model with hundreds of classes."""

    def on_train_epoch_end(self) -> None:
        for number in range(METRICS):
            self.log(f"{METRIC}{number}", float(number))


def fit_by_fork(rank: int, world_size: int) -> dict[str, float]:
    trainer = make_trainer(DDPExtStrategy(start_method="fork"), max_epochs=1)
    trainer.fit(Talkative())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_results_of_any_size_are_returned() -> None:
    """Results may be larger than a pipe.

    Lightning would read the pipe after the ranks exit, and they would exit after that.
    """
    [metrics] = run_ranks(fit_by_fork, 1)
    logged = {name: value for name, value in metrics.items() if name.startswith(METRIC)}
    assert logged == {f"{METRIC}{number}": float(number) for number in range(METRICS)}
