"""The process that starts the ranks: its Trainers, its variables, and its results."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.ranks import free_port, run_ranks
from tests.harness.scripts import run_script
from tests.harness.training import Net, make_trainer

pytestmark = pytest.mark.lowest

SEED = "5"
TRAINERS = ("first", "second", "stock", "stock with callbacks")
# Trains with each of these Trainers. Both processes run it, and print a ``Report`` at each
# moment.
SCRIPT = """
    import copy
    import json
    import os
    import sys
    import warnings
    from types import FunctionType

    import lightning as L
    import torch

    from tests.harness.scripts import print_line
    from tests.harness.training import At, Net, make_trainer, weights

    LIBRARIES = ("lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics")
    RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    VARIABLES = (*RANK_VARIABLES, "PL_GLOBAL_SEED")
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


    def replaced_since(before):
        now = definitions()
        return sorted(name for name, value in before.items() if now.get(name) is not value)


    torch.optim.SGD([torch.zeros(1)])  # torch changes SGD.step when it makes the first one
    BEFORE = definitions()
    import lightning_ddp_ext as ddpx


    def report(moment, trainer, rank, **facts):
        facts |= {"moment": moment, "trainer": trainer, "rank": rank}
        facts["replaced"] = replaced_since(BEFORE)
        facts["environment"] = {name: os.environ.get(name) for name in VARIABLES}
        print_line(json.dumps(facts))


    def train(name, strategy, *callbacks, **options):
        L.seed_everything(int(sys.argv[1]))
        before = dict(os.environ)
        model = Net()
        in_step = At(
            "on_train_batch_start", lambda trainer: report("step", name, trainer.global_rank)
        )
        trainer = make_trainer(strategy, callbacks=[in_step, *callbacks], **options)
        trainer.fit(model)
        report(
            "end",
            name,
            trainer.global_rank,
            changed=sorted({name for name, _ in before.items() ^ dict(os.environ).items()}),
            metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
            weights={name: x.double().sum().item().hex() for name, x in weights(model).items()},
        )


    if __name__ == "__main__":
        report("start", "", int(os.environ.get("LOCAL_RANK", 0)))
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


class Report(NamedTuple):
    """The state of one process at a moment of the script.

    Attributes:
        moment: the "start" of the script, a "step" of a Trainer, or the "end" of its
            training.
        trainer: the Trainer's name; empty at the start.
        rank: the process's rank; the launching process is rank 0.
        replaced: the definitions of Lightning and torch that are others than before the
            import of this package.
        environment: some variables.
        changed: the variables that the training has changed; given at its end, as are the
            metrics and the sum of each weight.
    """

    moment: str
    trainer: str
    rank: int
    replaced: list[str]
    environment: dict[str, str | None]
    changed: Sequence[str] = ()
    metrics: Mapping[str, float] = {}
    weights: Mapping[str, str] = {}


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    """Run the script, after the user has exported ``RANK`` and ``DDPX_INIT_METHOD``."""
    url = f"tcp://127.0.0.1:{free_port()}"
    output = run_script(
        SCRIPT, SEED, env={"RANK": "0", "OMP_NUM_THREADS": None, "DDPX_INIT_METHOD": url}
    )
    # The ranks connect once, for all Trainers.
    assert output.count(f"process group: gloo, 2 ranks, {url}\n") == 1
    return [Report(**json.loads(line)) for line in output.splitlines() if line.startswith("{")]


def on_both_ranks(reports: list[Report], moment: str, trainer: str = "") -> list[Report]:
    """Return the reports of the launching process and of rank 1, in this order."""
    found = [report for report in reports if (report.moment, report.trainer) == (moment, trainer)]
    return sorted(found, key=lambda report: report.rank)


def test_all_trainers_of_a_script_use_the_same_ranks(reports: list[Report]) -> None:
    """The ranks start once, and stock Trainers train on them as well."""
    for trainer in TRAINERS:
        launching, started = on_both_ranks(reports, "end", trainer)
        assert (launching.rank, started.rank) == (0, 1)
        assert launching.metrics == started.metrics
        assert launching.weights == started.weights


def test_a_trainer_learns_what_a_stock_one_learns(reports: list[Report]) -> None:
    """In one script, with the same seed, the weights are equal to the last bit."""
    ours, _ = on_both_ranks(reports, "end", "first")
    stock, _ = on_both_ranks(reports, "end", "stock")
    assert ours.weights == stock.weights


def test_a_started_rank_has_the_seed_from_its_first_line_on(reports: list[Report]) -> None:
    """The seed of the launching process is set before the script runs again."""
    seeds = [each.environment["PL_GLOBAL_SEED"] for each in on_both_ranks(reports, "start")]
    assert seeds == [None, SEED]


def test_the_launching_process_keeps_its_environment(reports: list[Report]) -> None:
    """After the first run, two variables are new or changed; after the second, none.

    Stock's launcher leaves these, and also MASTER_ADDR, MASTER_PORT and NODE_RANK.
    """
    first, _ = on_both_ranks(reports, "end", "first")
    second, _ = on_both_ranks(reports, "end", "second")
    assert (first.changed, second.changed) == (["LOCAL_RANK", "OMP_NUM_THREADS"], [])


def test_the_launching_process_has_the_variables_of_a_rank(reports: list[Report]) -> None:
    """In each run, both processes have the variables by which user code divides data; a
    ``RANK`` that the user exports stays, and a started rank does not inherit it.
    """
    for trainer in ("first", "second"):
        launching, started = (
            report.environment for report in on_both_ranks(reports, "step", trainer)
        )
        assert (launching["LOCAL_RANK"], started["LOCAL_RANK"]) == ("0", "1")
        assert (launching["NODE_RANK"], launching["WORLD_SIZE"]) == ("0", "2")
        for name in ("NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            assert launching[name] == started[name] is not None
        assert (launching["RANK"], started["RANK"]) == ("0", None)


def test_no_definition_of_lightning_or_torch_changes(reports: list[Report]) -> None:
    """This holds after the import, during each run and after it."""
    assert [report for report in reports if report.replaced] == []
    moments = [("start", ""), *itertools.product(("step", "end"), TRAINERS)]
    reported = sorted((report.moment, report.trainer, report.rank) for report in reports)
    assert reported == sorted((*moment, rank) for moment in moments for rank in (0, 1))


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
