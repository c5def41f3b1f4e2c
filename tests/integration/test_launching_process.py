"""What a script that starts its own ranks finds afterwards: its environment, its results, ranks that were right."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.ranks import free_port, run_ranks
from tests.harness.scripts import Completed, run_script
from tests.harness.training import Net, make_trainer

HEAD = """
    import json
    import os
    import sys

    import lightning as L
    import torch
    import torch.distributed as dist
    import lightning_ddp_ext as ddpx
    from lightning.fabric.plugins.environments import LightningEnvironment
    from tests.harness.training import Net, data, make_trainer, weights


    def tell(what, **facts):
        sys.stdout.write(json.dumps({"what": what, **facts}) + "\\n")
        sys.stdout.flush()


    class OwnPort(LightningEnvironment):
        @property
        def main_port(self):
            return int(os.environ["HOUSE_PORT"])


    class Seed(L.Callback):
        def on_fit_start(self, trainer, module):
            names = ("PL_GLOBAL_SEED", "SET_BEFORE_FIT", "RANK")
            flag = torch.are_deterministic_algorithms_enabled()
            tell("variables", rank=trainer.global_rank, flag=flag, **{name: os.environ.get(name) for name in names})


    def digest(model):
        return {name: value.double().sum().item().hex() for name, value in weights(model).items()}


    def train(what, strategy, **options):
        L.seed_everything(5)
        os.environ["SET_BEFORE_FIT"] = what
        before, model = dict(os.environ), Net()
        trainer = make_trainer(strategy, **options)
        trainer.fit(model)
        after = dict(os.environ)
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        tell(what, rank=trainer.global_rank, changed=changed, weights=digest(model), found=found)
        return trainer
"""


def reports(done: Completed, what: str) -> list[dict[str, Any]]:
    """What the processes have told of ``what``, by rank."""
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted((report for report in told if report["what"] == what), key=lambda report: int(report["rank"]))


# The script is run again for rank 1: all of its Trainers must work with the two processes that there are then.
BY_SCRIPT = (
    HEAD
    + """
    if __name__ == "__main__":
        tell("start", rank=os.environ.get("LOCAL_RANK", 0), seed=os.environ.get("PL_GLOBAL_SEED"))
        train("first", "ddp_ext", plugins=[OwnPort()], callbacks=[Seed()])
        trainer = train("second", ddpx.DDPExtStrategy(timeout=77))
        group = dist.distributed_c10d._get_default_group()._get_backend(trainer.strategy.root_device)
        tell("timeout", rank=trainer.global_rank, seconds=group.options._timeout.total_seconds())
        train("stock", "ddp")
        train("one alone", "auto", devices=1)
        try:
            train("one", "ddp_ext", devices=1)
        except ddpx.GroupInUseError as error:
            tell("refused", rank=trainer.global_rank, message=str(error))
        tell("end", rank=trainer.global_rank)
"""
)


@pytest.mark.lowest
def test_a_script_and_its_trainers() -> None:
    """A plain script, in a shell where somebody has exported a RANK, starts its ranks once for all that it does."""
    env = {"RANK": "0", "HOUSE_PORT": str(free_port()), "OMP_NUM_THREADS": None}
    done = run_script(BY_SCRIPT, env=env, time_limit=100)
    assert done.returncode == 0, done.output
    expect_ranks_started_once(done)
    expect_trained_alike(done)
    expect_environment_kept(done)
    expect_second_trainer_served_or_refused(done)


def expect_ranks_started_once(done: Completed) -> None:
    """Later Trainers use the ranks that there are, stock ones among them; one line says how these have met."""
    assert [report["rank"] for report in reports(done, "start")] == [0, "1"]
    for what in ("first", "second", "stock"):
        first, second = reports(done, what)
        assert (first["rank"], second["rank"]) == (0, 1)
        assert first["found"] == second["found"], what
    assert len(reports(done, "end")) == 2
    assert done.output.count("process group: gloo, 2 ranks, env://\n") == 1


def expect_trained_alike(done: Completed) -> None:
    """The same seed gives the same weights by ours and by stock; one process alone gives others."""
    trained = {what: reports(done, what)[0]["weights"] for what in ("first", "second", "stock", "one alone")}
    assert trained["first"] == trained["second"] == trained["stock"]
    assert trained["one alone"] != trained["stock"]


def expect_environment_kept(done: Completed) -> None:
    """Nothing is added to it, a stray RANK is neither followed nor taken away, and started ranks have the seed."""
    # The script is a rank, too, and Lightning limits the threads of each rank, as it does with stock.
    assert reports(done, "first")[0]["changed"] == ["OMP_NUM_THREADS"]
    assert reports(done, "second")[0]["changed"] == []
    assert [report["RANK"] for report in reports(done, "variables")] == ["0", None]
    assert [report["seed"] for report in reports(done, "start")] == [None, "5"], "from its first line"


def expect_second_trainer_served_or_refused(done: Completed) -> None:
    """Another timeout it gets; with other devices every rank says that they cannot be had."""
    assert [report["seconds"] for report in reports(done, "timeout")] == [77, 77]
    for report in reports(done, "refused"):
        assert report["message"].startswith("this script's world_size is 2 already, and this Trainer wants 1; give")
    assert len(reports(done, "refused")) == 2


BY_PROCESSES = (
    HEAD
    + """
    if __name__ == "__main__":
        torch.use_deterministic_algorithms(True)
        for method in ("fork", "forkserver"):
            train(method, f"ddp_ext_{method}", callbacks=[Seed()])
"""
)


def test_a_script_by_fork_and_by_forkserver() -> None:
    """Started processes have the environment, the seed and torch's flags of that moment, and memory of their own."""
    done = run_script(BY_PROCESSES, time_limit=100)
    assert done.returncode == 0, done.output
    seen = {(report["SET_BEFORE_FIT"], report["rank"]) for report in reports(done, "variables")}
    assert seen == {("fork", 0), ("fork", 1), ("forkserver", 0), ("forkserver", 1)}, "also from an older fork server"
    assert {report["PL_GLOBAL_SEED"] for report in reports(done, "variables")} == {"5"}
    assert all(report["flag"] for report in reports(done, "variables"))
    (fork,), (forkserver,) = reports(done, "fork"), reports(done, "forkserver")
    assert fork["changed"] == forkserver["changed"] == [], "the launching process's own environment"
    assert fork["weights"] == forkserver["weights"], "nobody writes into another rank's parameters"
    assert fork["found"] == forkserver["found"]


class Talkative(Net):
    """Logs as many metrics as somebody with a hundred classes does."""

    def on_train_epoch_end(self) -> None:
        for number in range(400):
            self.log(f"accuracy_of_class_number_{number}", float(number))


def count_metrics(rank: int, world_size: int) -> tuple[int, float]:
    trainer = make_trainer(DDPExtStrategy(start_method="fork"), max_epochs=1)
    trainer.fit(Talkative())
    return len(trainer.callback_metrics), float(trainer.callback_metrics["accuracy_of_class_number_399"])


@pytest.mark.lowest
def test_results_of_any_size_come_back() -> None:
    """More than a pipe holds: Lightning reads it when the ranks have ended, and they end when it is read."""
    assert run_ranks(count_metrics, 1) == [(404, 399.0)]


def environment_around_fork(rank: int, world_size: int) -> None:
    before = dict(os.environ)
    trainer = make_trainer(DDPExtStrategy(start_method="fork"))
    trainer.fit(Net())
    trainer.test(Net(), verbose=False)
    assert dict(os.environ) == before


def test_the_environment_stays_what_it_was_around_a_fork() -> None:
    """As by the other ways to start ranks."""
    run_ranks(environment_around_fork, 1, env={"RANK": "0"})
