"""Signals at other moments than in the middle of training, other signals, and whose they are besides."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy, RankZeroCheckpoint, RankZeroCheckpointIO
from lightning_ddp_ext.errors import RankDiedError
from tests.harness.ranks import RankProcesses, by_hand_env, hold, launch_ranks, run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration.continuing import Net, Numbers
from tests.integration.stopping import Signalled, Stopped, fit, shuffled
from tests.launchers.environments import by_srun

EARLY = ("setup", "on_load_checkpoint", "on_fit_start")
EVALUATIONS = {
    "fit": "on_validation_batch_start",  # its sanity check
    "validate": "on_validation_batch_start",
    "test": "on_test_batch_start",
    "predict": "on_predict_batch_start",
}


def on_rank_one(rank: int, hook: str, number: int = 0, signum: int = signal.SIGTERM) -> list[L.Callback]:
    return [Signalled((hook, number), signum)] if rank == 1 else []


# Where nothing is to be saved.


def stopped_early(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """How runs that go on from a checkpoint end if they are stopped before they have done anything."""
    first = directory / "first"
    fit(make_strategy("ours", directory), first, shuffled(), callbacks=on_rank_one(rank, "on_train_batch_end"))
    found: dict[str, Any] = {}
    for hook in EARLY:
        resumed = fit(
            make_strategy("ours", directory),
            directory / hook,
            shuffled(),
            ckpt_path=str(first / "preempted.ckpt"),
            callbacks=on_rank_one(rank, hook),
        )
        found[hook] = (resumed.status, resumed.files, resumed.steps)
    return found


def test_before_the_first_step_nothing_is_saved_and_all_end(tmp_path: Path) -> None:
    """Whether it is in setup, in a restore, or after it."""
    expected = dict.fromkeys(EARLY, (143, [], []))
    assert run_ranks(stopped_early, 2, tmp_path, env=by_hand_env(2)) == [expected, expected]


class Evaluated(Net):
    """Counts the steps that it evaluates, of very many."""

    def __init__(self) -> None:
        super().__init__(shuffled())
        self.evaluated = 0

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(200), batch_size=1)

    def validation_step(self, batch: Any, index: int) -> None:
        self.evaluated += 1
        dist.all_reduce(torch.zeros(1))  # in step, or one rank may be at the end before it hears of the signal

    test_step = predict_step = validation_step


def stopped_in_evaluation(rank: int, world_size: int, directory: Path) -> list[Any]:
    """How evaluations of 100 steps end that get a signal in the second one."""
    found = []
    for function, hook in EVALUATIONS.items():
        callbacks = on_rank_one(rank, hook, 1)
        settings = {"default_root_dir": directory, "num_sanity_val_steps": -1}
        trainer = make_trainer(make_strategy("ours", directory), callbacks=callbacks, **settings)
        net = Evaluated()
        try:
            getattr(trainer, function)(net, **({} if function == "fit" else {"dataloaders": net.val_dataloader()}))
        except SystemExit as end:
            found.append((function, end.code, net.evaluated, sorted(directory.glob("*.ckpt"))))
    return found


def test_an_evaluation_stops_in_the_middle(tmp_path: Path) -> None:
    """All ranks after the same step; there is nothing to save."""
    found = run_ranks(stopped_in_evaluation, 2, tmp_path, env=by_hand_env(2))
    assert found[0] == found[1]
    assert [(function, status) for function, status, *_ in found[0]] == [(function, 143) for function in EVALUATIONS]
    assert all(1 <= steps < 100 and not files for _, _, steps, files in found[0])


class TakesWakeUps(L.Callback):
    """As asyncio does, and whoever else wants to hear of signals in a loop of its own."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        signal.set_wakeup_fd(-1)


def stopped_unheard(rank: int, world_size: int, directory: Path) -> tuple[int | None, list[str]]:
    callbacks = [TakesWakeUps(), *on_rank_one(rank, "on_train_batch_end", 1)]
    found = fit(make_strategy("ours", directory), directory, shuffled(), callbacks=callbacks)
    return found.status, found.files


def test_a_signal_is_heeded_where_somebody_else_is_woken_by_it(tmp_path: Path) -> None:
    """Python has one descriptor to wake a loop up with, and others may have put theirs in place of ours."""
    assert run_ranks(stopped_unheard, 2, tmp_path, env=by_hand_env(2)) == [(143, ["preempted.ckpt"])] * 2


class Dies(L.Callback):
    """Kills its rank in the second step."""

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def told_and_terminated(rank: int, world_size: int, directory: Path) -> str:
    """A launcher's SIGTERM comes when the Trainer has ended because of a death, and nothing is printed yet."""
    try:
        fit(make_strategy("ours", directory), directory, shuffled(), callbacks=[Dies()] if rank == 0 else [])
    except RankDiedError as error:
        os.kill(os.getpid(), signal.SIGTERM)
        return str(error)
    raise AssertionError("rank 0 has died")


def test_a_launchers_sigterm_leaves_time_to_say_who_has_died(tmp_path: Path) -> None:
    """It follows within a tenth of a second, and would end a process at once."""
    died, told = launch_ranks(told_and_terminated, 2, tmp_path, env=by_hand_env(2))
    assert died.exit_code == -signal.SIGKILL
    assert told.exit_code == 0, told.story()
    assert told.result.startswith("rank 0 (host ")


# Where to save, and what else is saved.


def saved_elsewhere(rank: int, world_size: int, directory: Path) -> list[list[str]]:
    """What runs leave that save their checkpoints in other places, or not at all."""

    def files_of(name: str, *callbacks: L.Callback, **options: Any) -> list[str]:
        place = directory / name
        strategy = make_strategy("ours", directory, **options)
        signals = on_rank_one(rank, "on_train_batch_end", 1)
        settings = {"enable_checkpointing": bool(callbacks)}
        assert fit(strategy, place, shuffled(), callbacks=[*callbacks, *signals], **settings).status == 143
        return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.ckpt") if name in str(path))

    beside = RankZeroCheckpoint(directory / "beside" / "models", save_last=True, every_n_epochs=1)
    often = RankZeroCheckpoint(directory / "background", every_n_train_steps=1, save_top_k=-1)
    return [
        files_of("beside", beside),
        files_of("background", often, checkpoint_io=RankZeroCheckpointIO(background=True)),
        files_of("given", stop_checkpoint=directory / "given" / "here" / "stopped.ckpt"),
        files_of("nothing", stop_checkpoint=None),
    ]


def test_the_checkpoint_is_where_it_was_asked_for(tmp_path: Path) -> None:
    """Beside the others by default; what is saved in the background is complete, too."""
    for beside, background, given, nothing in run_ranks(saved_elsewhere, 2, tmp_path, env=by_hand_env(2)):
        assert "beside/models/preempted.ckpt" in beside
        assert "background/preempted.ckpt" in background
        assert len(background) >= 3
        assert given == ["given/here/stopped.ckpt"]
        assert nothing == []
    for path in tmp_path.rglob("*.ckpt"):
        assert torch.load(path, weights_only=False)["state_dict"]


def stopped_in_a_save(rank: int, world_size: int, directory: Path) -> Stopped:
    callbacks = [RankZeroCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)]
    signals = on_rank_one(rank, "on_save_checkpoint", 1)
    settings = {"enable_checkpointing": True, "callbacks": [*callbacks, *signals]}
    return fit(make_strategy("ours", directory), directory, shuffled(), **settings)


def test_a_save_that_has_begun_is_finished_first(tmp_path: Path) -> None:
    """And what it is about to replace or leave is complete."""
    found = run_ranks(stopped_in_a_save, 2, tmp_path, env=by_hand_env(2))
    assert [stopped.status for stopped in found] == [143, 143]
    assert {"preempted.ckpt", "step=1.ckpt", "step=2.ckpt"} <= set(found[0].files)
    for path in tmp_path.glob("*.ckpt"):
        assert torch.load(path, weights_only=False)["state_dict"]


# Which signal, and whose else it is.


def by_each_signal(rank: int, world_size: int, directory: Path) -> list[Any]:
    found = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        heard: list[int] = []
        users = lambda number, frame: heard.append(number)  # noqa: B023, E731 # read in this turn
        for install in (False, True):
            before = signal.signal(signum, users) if install else signal.getsignal(signum)
            callbacks = on_rank_one(rank, "on_train_batch_end", 1, signum)
            name = f"{signum}-{install}"
            stopped = fit(make_strategy("ours", directory), directory / name, shuffled(), callbacks=callbacks)
            is_restored = signal.getsignal(signum) is (users if install else before)
            found.append((signum, stopped.status, stopped.files, list(heard), is_restored))
            signal.signal(signum, before)
    return found


def test_each_signal_ends_with_its_status_and_is_passed_on(tmp_path: Path) -> None:
    """To the handler that the user had put there before, which is there again afterwards; SIGUSR1 is theirs alone."""
    for rank, found in enumerate(run_ranks(by_each_signal, 2, tmp_path, env=by_hand_env(2))):
        for number, (signum, status, files, heard, is_restored) in enumerate(found):
            is_theirs = signum == signal.SIGUSR1 and number % 2 == 1
            expected = (None, []) if is_theirs else (128 + signum, ["preempted.ckpt"])
            assert ((status, files), is_restored) == (expected, True)
            assert heard in ([], [signum] if rank == 1 else [])
        assert [len(heard) for *_, heard, _ in found] == [0, rank, 0, rank, 0, rank]


def with_faulthandler(rank: int, world_size: int, directory: Path) -> tuple[int | None, str]:
    """A user prints stacks at SIGUSR1; the run's status, and what has been printed."""
    with (directory / f"stacks-{rank}").open("w+") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        callbacks = on_rank_one(rank, "on_train_batch_end", 1, signal.SIGUSR1)
        status = fit(make_strategy("ours", directory), directory, shuffled(), callbacks=callbacks).status
        faulthandler.unregister(signal.SIGUSR1)
        stacks.seek(0)
        return status, stacks.read()


def test_a_signal_of_faulthandlers_stays_its_own(tmp_path: Path) -> None:
    """Python knows nothing of handlers in C; the run goes on."""
    (first, _), (second, stacks) = run_ranks(with_faulthandler, 2, tmp_path, env=by_hand_env(2))
    assert (first, second) == (None, None)
    assert "most recent call first" in stacks


class ValidatesElsewhere(L.Callback):
    """Runs another Trainer within a step of this one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            inner = make_trainer(make_strategy("ours", self.directory), limit_val_batches=2)
            inner.validate(Evaluated(), verbose=False)


def stopped_after_a_nested_run(rank: int, world_size: int, directory: Path) -> tuple[int | None, list[str], list[int]]:
    callbacks = [ValidatesElsewhere(directory), *on_rank_one(rank, "on_train_batch_end", 2)]
    run = fit(make_strategy("ours", directory), directory / "run", shuffled(), callbacks=callbacks)
    return run.status, run.files, run.steps


def test_a_nested_run_leaves_the_outer_ones_signals_in_place(tmp_path: Path) -> None:
    """SIGTERM after a validation inside of a callback stops and saves the run around it."""
    for status, files, steps in run_ranks(stopped_after_a_nested_run, 2, tmp_path, env=by_hand_env(2)):
        assert (status, files) == (143, ["preempted.ckpt"])
        assert len(steps) == 3


class Impatient(L.Callback):
    """Ctrl-C, and again before the step has ended."""

    def on_train_batch_start(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def interrupted_twice(rank: int, world_size: int, directory: Path) -> Any:
    stopped = fit(make_strategy("ours", directory), directory, shuffled(), callbacks=[Impatient()])
    return stopped.status, stopped.files


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    """As Lightning ends on Ctrl-C, without waiting for the step, and so without a checkpoint."""
    assert run_ranks(interrupted_twice, 2, tmp_path, env=by_hand_env(2)) == [(1, [])] * 2


def ignoring(rank: int, world_size: int, directory: Path) -> Any:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    callbacks = on_rank_one(rank, "on_train_batch_start", 1, signal.SIGINT)
    stopped = fit(make_strategy("ours", directory), directory, shuffled(), callbacks=callbacks)
    return stopped.status, len(stopped.steps), signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_signal_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As Ctrl-C is for what a shell runs in the background."""
    assert run_ranks(ignoring, 2, tmp_path, env=by_hand_env(2)) == [(None, 6, True)] * 2


# Whatever else goes wrong.


class Held(L.Callback):
    """Holds a rank in the middle of a step."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, index: int) -> None:
        if index == 1:
            hold("in step 1")


def held(rank: int, world_size: int, directory: Path, **options: Any) -> None:
    callbacks = [Held()] if rank > 0 else []
    strategy = DDPExtStrategy(init_method=f"file://{directory}/store", **options)
    trainer = make_trainer(strategy, devices=world_size, callbacks=callbacks, default_root_dir=directory)
    trainer.fit(Net(shuffled()))


def test_a_death_overrules_a_request_to_stop(tmp_path: Path) -> None:
    """The rank that was asked to stop says which one has died, and nothing is saved."""
    with RankProcesses(held, 3, tmp_path, env=by_hand_env(3)) as ranks:
        for rank in (1, 2):
            ranks.wait_for("in step 1", rank)
        ranks.kill(0, signal.SIGTERM)
        ranks.kill(1, signal.SIGTERM)
        ranks.kill(2, signal.SIGKILL)
        ranks.release(1)
        for outcome in ranks.wait(0, 1):
            assert outcome.exit_code == 1
            assert "RankDiedError: rank 2 (host" in outcome.story()
    assert not list(tmp_path.glob("*.ckpt"))


def test_all_end_within_the_deadline_though_a_rank_does_not_stop(tmp_path: Path) -> None:
    """With the signal's status, where each of them was, and who has not answered."""
    with RankProcesses(held, 2, tmp_path, env=by_hand_env(2), save_deadline=1) as ranks:
        ranks.wait_for("in step 1", rank=1)
        ranks.kill(1, signal.SIGSTOP)
        ranks.kill(0, signal.SIGTERM)
        (first,) = ranks.wait(0)
        assert first.exit_code == 143
        assert "not stopped within save_deadline 1 s (rank 1 (host" in first.output
        ranks.kill(1, signal.SIGCONT)
        (second,) = ranks.wait(1)
        assert second.exit_code != 0


# SLURM.


def requeued(rank: int, world_size: int, directory: Path) -> Any:
    callbacks = on_rank_one(rank, "on_train_batch_end", 1, signal.SIGUSR1)
    stopped = fit(DDPExtStrategy(), directory, shuffled(), callbacks=callbacks)
    again = fit(DDPExtStrategy(), directory, shuffled())
    return stopped.status, stopped.files, len(stopped.steps), len(again.steps)


def test_a_job_that_slurm_warns_is_requeued_and_goes_on(tmp_path: Path) -> None:
    """The checkpoint is the one that Lightning finds by itself in a requeued job."""
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requests\n')
    scontrol.chmod(0o755)
    environment = {**by_srun(2), "PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    found = run_ranks(requeued, 2, tmp_path, env=environment)
    for status, files, done, again in found:
        assert (status, files) == (138, ["hpc_ckpt_1.ckpt"])
        assert done + again == 6
    assert (tmp_path / "requests").read_text() == f"requeue {environment['SLURM_JOB_ID']}\n"
