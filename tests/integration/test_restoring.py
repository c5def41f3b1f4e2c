"""All ranks get the whole content of a file that they resume or evaluate from, whether
it is mapped or sent; a file that a hook reads by itself does not decide where they begin.
``ckpt_path="last"`` means the newest file of this fit that rank 0 finds. If a file cannot be
read, every rank raises the same named error.
"""

import argparse
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from lightning_ddp_ext import CheckpointError, RankZeroCheckpointIO
from tests.checkpoint.content import MAPPED, flip, without_checksums
from tests.harness import training
from tests.harness.ranks import HOST, free_port
from tests.integration import checkpointing, continuing


def mixed_precision(**scaler: float) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **scaler))


def resume(kind: training.Kind, directory: Path, path: Path, is_mapped: bool) -> dict[str, Any]:
    """Resume; return the state at the start of training, and the last step."""
    trainer = checkpointing.trainer_for(
        kind,
        directory,
        RankZeroCheckpointIO(),
        max_epochs=2,
        devices=int(os.environ["WORLD_SIZE"]),
        plugins=[mixed_precision()],
    )
    path = checkpointing.reachable(path, directory, is_mapped=is_mapped)
    return {**checkpointing.fit_from(trainer, path), "last step": trainer.global_step}


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("kind", "world_size", "is_mapped"),
    [
        pytest.param("ours", 2, True, id="ours, mapped"),
        pytest.param("stock", 2, True, id="stock, mapped"),
        pytest.param("ours", 4, False, id="ours, sent to four ranks"),
    ],
)
def test_a_run_continues_with_all_that_was_saved(
    kind: training.Kind, world_size: int, is_mapped: bool, tmp_path: Path
) -> None:
    """Each rank has the same weights, optimiser, schedules, scaler and progress as before."""
    path = tmp_path / "it.ckpt"
    before = checkpointing.train_and_save(path, [mixed_precision(init_scale=12.0)])
    before["last step"] = before["step"] + 8 // world_size
    results = training.on_ranks(kind, resume, tmp_path, path, is_mapped, world_size=world_size)
    training.assert_same(results, [before] * world_size)


class SwapsWeights(checkpointing.Net):
    """Reads and changes the content before it is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        loaded = checkpoint["state_dict"]
        self.seen = loaded["layers.3.weight"].clone()
        self.kept = loaded["layers.0.bias"]
        loaded["layers.3.weight"] = loaded["layers.3.weight"].flip(1)
        loaded["layers.0.bias"] = torch.zeros(8)


def evaluate(kind: training.Kind, directory: Path, path: Path, is_mapped: bool) -> dict[str, Any]:
    """Test; return what the hook saw and kept, the weights that were loaded, and whether the
    file is still mapped.
    """
    model = SwapsWeights()
    path = checkpointing.reachable(path, directory, is_mapped=is_mapped)
    trainer = checkpointing.trainer_for(kind, directory, RankZeroCheckpointIO())
    trainer.test(model, ckpt_path=path, verbose=False)
    return {
        "seen": model.seen,
        "kept": model.kept,
        "weights": training.weights(model),
        "is mapped": path.name in Path("/proc/self/maps").read_text(),
    }


@checkpointing.MAPPED_AND_SENT
def test_a_hook_chooses_what_is_loaded(
    kind: training.Kind, is_mapped: bool, tmp_path: Path
) -> None:
    """`on_load_checkpoint` reads, changes and keeps the file's content, in memory."""
    path = tmp_path / "it.ckpt"
    before = checkpointing.train_and_save(path)["weights"]
    torch.save({**torch.load(path), "large": torch.zeros(MAPPED)}, path)
    for rank in training.on_ranks(kind, evaluate, tmp_path, path, is_mapped):
        assert not rank["is mapped"]
        training.assert_same(rank["seen"], before["layers.3.weight"])
        training.assert_same(rank["kept"], before["layers.0.bias"])
        training.assert_same(rank["weights"]["layers.3.weight"], rank["seen"].flip(1))
        assert not rank["weights"]["layers.0.bias"].any()


def use_the_plugin_alone(kind: training.Kind, directory: Path, path: Path) -> None:
    """Have a Trainer with only the plugin test, save to a file, train, and save to
    another store.
    """
    alone, remote = (
        training.make_trainer(
            training.make_strategy(kind, directory), plugins=[RankZeroCheckpointIO()]
        )
        for _ in range(2)
    )
    alone.test(checkpointing.Net(), ckpt_path=path, verbose=False)
    alone.save_checkpoint(directory / "alone.ckpt")
    remote.fit(checkpointing.Net())
    remote.save_checkpoint("memory://checkpoints/it.ckpt")


def test_the_plugin_serves_a_stock_strategy_alone(tmp_path: Path) -> None:
    """`Trainer(strategy="ddp", plugins=[RankZeroCheckpointIO()])` tests, trains and
    saves, also to other stores.

    What it saves is what `load_from_checkpoint` takes.
    """
    path = tmp_path / "it.ckpt"
    checkpointing.train_and_save(path)
    training.on_ranks("stock", use_the_plugin_alone, tmp_path, path)
    alone = checkpointing.Net.load_from_checkpoint(tmp_path / "stock" / "alone.ckpt")
    training.assert_same(training.weights(alone), torch.load(path)["state_dict"])


# Files that hooks read.


FIRST_STEP = "train_batch_end-1"
HOOKS = ("setup", "on_fit_start", "on_train_start", "on_train_batch_start")


def save_early(side: training.Kind, directory: Path, model: type[continuing.Net]) -> str:
    """Return the checkpoint of a run after its first step."""
    options = {"max_epochs": 1, "model": model}
    run = continuing.Training(continuing.shuffled(12), directory, options=options).run(FIRST_STEP)
    return run.saved[FIRST_STEP]


def load_in_hooks(
    side: training.Kind, directory: Path, teacher: Path, plain: Path
) -> dict[str, Any]:
    """Train, and read files in hooks: a checkpoint on all ranks, and weights on rank 0.

    Return what is read, and what the run trains.
    """
    read: list[Any] = []

    def load(trainer: L.Trainer) -> None:
        read.append(trainer.strategy.load_checkpoint(teacher)["state_dict"])
        if trainer.is_global_zero:
            read.append(trainer.strategy.load_checkpoint(plain))

    options = {"max_epochs": 1, "callbacks": [training.At(hook, load) for hook in HOOKS]}
    run = continuing.Training(continuing.shuffled(12), directory, side=side, options=options).run()
    return {"read": read, "steps": run.steps, "counts": run.counts, "weights": run.weights}


def test_a_file_read_in_a_hook_does_not_change_where_training_starts(tmp_path: Path) -> None:
    """Training starts at the first batch, and each rank gets the content of the file that it
    reads, as with stock.
    """
    teacher, _ = training.on_ranks("ours", save_early, tmp_path, continuing.Net)
    plain = tmp_path / "plain.pt"
    torch.save({"layers.0.weight": torch.ones(4, 1)}, plain)
    ours, stock = training.on_both(load_in_hooks, tmp_path, Path(teacher), plain)
    training.assert_same(ours, stock)
    assert len(ours[0]["read"]) == 2 * len(HOOKS)


class Tuned(continuing.Net):
    """Has the one optimiser that a finder of learning rates needs."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def find_a_rate(side: training.Kind, directory: Path, path: str) -> dict[str, Any]:
    """Resume a run that first looks for a learning rate, which needs four more steps.

    Return the epoch and batch of each step, and the counts at the end.
    """
    finder = LearningRateFinder(num_training_steps=4, update_attr=False)
    options = {
        "model": Tuned,
        "callbacks": [finder],
        "max_epochs": 2,
        "default_root_dir": directory,
    }
    run = continuing.Training(continuing.shuffled(12), directory, side=side, options=options).run(
        ckpt_path=path
    )
    return {"moments": [step.moment for step in run.steps], "counts": run.counts}


def test_a_finder_of_learning_rates_restores_its_own_file(tmp_path: Path) -> None:
    """After the search, training continues with the batch after the file's, as with stock."""
    path, _ = training.on_ranks("ours", save_early, tmp_path, Tuned)
    ours, stock = training.on_both(find_a_rate, tmp_path, path)
    assert ours == stock


# Files that cannot be read.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The checkpoint of a short run."""
    checkpointing.train_and_save(tmp_path / "it.ckpt")
    return tmp_path / "it.ckpt"


def set_entry(path: Path, name: str, value: Any) -> None:
    torch.save({**torch.load(path, weights_only=False), name: value}, path)


class WouldRun:
    """Makes a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.directory),)


class Fault(NamedTuple):
    """A fault of a file, and what every rank's error says about it."""

    spoil: Callable[[Path], object]
    text: str
    error: str = "DamagedCheckpointError"

    def is_named(self, message: str) -> bool:
        """Whether a message, which begins with its class, is that of this fault."""
        return message.startswith(f"{self.error}: ") and self.text in message


MISMATCH = "is damaged: {} does not match the recorded CRC"
FAULTS = {
    # Of two records of equal size, side by side, each rank checks one.
    "a record of rank 0": Fault(partial(flip, record="data/1"), MISMATCH.format("data/1")),
    "a record of rank 1": Fault(partial(flip, record="data/2"), MISMATCH.format("data/2")),
    "the pickle": Fault(partial(flip, record="data.pkl"), MISMATCH.format("data.pkl")),
    "truncated": Fault(lambda path: os.truncate(path, 999), "was probably truncated"),
    "empty": Fault(
        lambda path: os.truncate(path, 0), "is not a checkpoint: its 0 bytes begin with b''"
    ),
    "text": Fault(
        lambda path: path.write_text("anything"),
        "is not a checkpoint: its 8 bytes begin with b'anyt'",
    ),
    "missing": Fault(
        os.unlink, f".ckpt does not exist for rank 0 on host {HOST}", "FileNotFoundError"
    ),
    "a class": Fault(
        lambda path: set_entry(path, "hyper_parameters", argparse.Namespace(lr=0.1)),
        "add_safe_globals([argparse.Namespace])",
        "CheckpointError",
    ),
    "a call": Fault(
        lambda path: set_entry(path, "state_dict", WouldRun(path.parent / "it-ran")),
        "posix.mkdir",
        "CheckpointError",
    ),
    "no weights": Fault(
        lambda path: torch.save({"model": {}, "epoch": 3}, path),
        "has no entry 'state_dict'",
        "CheckpointError",
    ),
    "only weights": Fault(
        lambda path: torch.save(checkpointing.Net().state_dict(), path),
        "call model.load_state_dict(torch.load('",
        "CheckpointError",
    ),
}


def errors_of_tests(
    kind: training.Kind, directory: Path, files: dict[str, Path], is_mapped: bool
) -> dict[str, str]:
    """Test with each file, one after another in one process; return the errors."""
    errors = {}
    for name, file in files.items():
        path = checkpointing.reachable(file, directory, is_mapped=is_mapped)
        trainer = checkpointing.trainer_for(
            kind,
            directory,
            # None is torch's own default, which is also True.
            RankZeroCheckpointIO(weights_only=True if kind == "stock" else None),
        )
        error = training.raised(
            (CheckpointError, FileNotFoundError),
            trainer.test,
            checkpointing.Net(),
            ckpt_path=path,
            verbose=False,
        )
        errors[name] = f"{type(error).__name__}: {error}"
    return errors


@pytest.mark.lowest
@checkpointing.MAPPED_AND_SENT
def test_every_rank_names_the_fault_of_a_file(
    kind: training.Kind, is_mapped: bool, path: Path, tmp_path: Path
) -> None:
    """Damage is named by record, and refusals by class; nothing of a file is run."""
    files = {name: Path(shutil.copy(path, tmp_path / f"{name}.ckpt")) for name in FAULTS}
    for name, fault in FAULTS.items():
        fault.spoil(files[name])
    errors, of_rank_1 = training.on_ranks(kind, errors_of_tests, tmp_path, files, is_mapped)
    assert errors == of_rank_1
    wrong = {name: error for name, error in errors.items() if not FAULTS[name].is_named(error)}
    assert not wrong
    assert not (tmp_path / "it-ran").exists()


def warnings_of_test(
    kind: training.Kind, directory: Path, path: Path, is_mapped: bool
) -> list[str]:
    """Test with a file; return the warnings about checksums."""
    path = checkpointing.reachable(path, directory, is_mapped=is_mapped)
    trainer = checkpointing.trainer_for(kind, directory, RankZeroCheckpointIO())
    with training.warnings_with("checksums") as told:
        trainer.test(checkpointing.Net(), ckpt_path=path, verbose=False)
    return told


@checkpointing.MAPPED_AND_SENT
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_without_checksums_is_read_with_a_warning(
    kind: training.Kind, is_mapped: bool, path: Path, tmp_path: Path
) -> None:
    """Rank 0 warns, because changes to such a file cannot be detected."""
    with without_checksums():
        torch.save(torch.load(path, weights_only=False), path)
    [warning], others = training.on_ranks(kind, warnings_of_test, tmp_path, path, is_mapped)
    shown = path if is_mapped else path.name
    assert warning.startswith(f"checkpoint {shown} has no checksums, so damage cannot be detected")
    assert others == []


# `ckpt_path="last"`.


def resume_last(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Resume from "last" in a directory that differs by rank, and is empty on rank 1."""
    callback = checkpointing.checkpoint_callback(
        kind, dirpath=directory / os.environ["RANK"], save_last=True
    )
    return checkpointing.fit_from(
        checkpointing.trainer_for(kind, directory, None, [callback], max_epochs=2), "last"
    )


@pytest.mark.lowest
@pytest.mark.parametrize("kind", training.KINDS)
def test_last_is_what_rank_zero_finds(kind: training.Kind, tmp_path: Path) -> None:
    """A rank whose disk has no `last.ckpt` resumes from rank 0's."""
    for rank in ("0", "1"):
        (tmp_path / kind / rank).mkdir(parents=True)
    before = checkpointing.train_and_save(tmp_path / kind / "0" / "last.ckpt")
    for state in training.on_ranks(kind, resume_last, tmp_path):
        training.assert_same(state, before)


STEPS = 4  # of an epoch
STOP_CHECKPOINT = "*/last-preempted.ckpt"
EPOCHS = 10  # so that the ranks have time to agree on a stop


def run_command(
    kind: training.Kind, directory: Path, kept: Path | str, *callbacks: L.Callback
) -> tuple[int, int]:
    """Run one command line, from its newest file on; return the steps at which the run
    begins and ends.
    """
    begun: list[int] = []
    begin = training.At("on_train_start", lambda trainer: begun.append(trainer.global_step))
    trainer = checkpointing.trainer_for(
        kind,
        directory,
        RankZeroCheckpointIO(),
        [begin, ModelCheckpoint(kept, save_last=True), *callbacks],
        max_epochs=EPOCHS,
        default_root_dir=directory,
    )
    with suppress(SystemExit):
        trainer.fit(checkpointing.Net(), ckpt_path="last")
    return begun[0], trainer.global_step


def error_of_command(kind: training.Kind, directory: Path, kept: Path | str) -> str:
    """Return the error of a command that resumes."""
    error = training.raised(CheckpointError, run_command, kind, directory, kept)
    return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a command that was stopped in its second epoch."""
    directory = tmp_path_factory.mktemp("stopped")
    kept = directory / "kept"
    stop = training.signalled("on_train_batch_end", STEPS + 1, ranks=[1])
    (begun_at, stopped_at), _ = training.on_ranks("ours", run_command, directory, kept, stop)
    assert begun_at == 0
    assert stopped_at > STEPS + 1
    return kept


@pytest.fixture
def kept(stopped_once: Path, tmp_path: Path) -> Path:
    """A copy of them, in which `last.ckpt` has a version in its name."""
    kept = Path(shutil.copytree(stopped_once, tmp_path / "kept"))
    return (kept / "last.ckpt").rename(kept / "last-v1.ckpt").parent


def round_times(kept: Path) -> None:
    """Give all files the same time, as a store does that rounds times."""
    for file in kept.rglob("*.ckpt"):
        os.utime(file, (0, 0), follow_symlinks=False)


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/mem")  # where nothing is mapped, reading is an error


@pytest.mark.parametrize(
    ("damage", "begin", "remedy"),
    [
        pytest.param(
            partial(flip, record="data/1"),
            "DamagedCheckpointError: checkpoint {} is damaged: ",
            "use an earlier checkpoint (with ckpt_path='last', delete this file)",
            id="damaged",
        ),
        pytest.param(
            make_unreadable,
            "CheckpointError: checkpoint {} could not be read: OSError: ",
            "",
            id="unreadable",
        ),
    ],
)
def test_last_is_the_stop_checkpoint_even_if_it_cannot_be_read(
    damage: Callable[[Path], object], begin: str, remedy: str, kept: Path, tmp_path: Path
) -> None:
    """Every rank names the file, also if its time is that of `last.ckpt`."""
    [newest] = kept.glob(STOP_CHECKPOINT)
    damage(newest)
    round_times(kept)
    own, of_rank_1 = training.on_ranks("ours", error_of_command, tmp_path, kept)
    assert of_rank_1 == own
    assert own.startswith(begin.format(newest))
    assert remedy in own


def test_without_the_stop_checkpoint_last_is_the_one_before(kept: Path, tmp_path: Path) -> None:
    """The same command continues at the end of an epoch, also if the file's name has a version."""
    [newest] = kept.glob(STOP_CHECKPOINT)
    stopped_at = torch.load(newest, weights_only=False)["global_step"]
    newest.unlink()
    round_times(kept)
    (resumed_at, ended_at), _ = training.on_ranks("ours", run_command, tmp_path, kept)
    assert resumed_at in range(STEPS, stopped_at + 1, STEPS), "an epoch's end"
    assert ended_at == EPOCHS * STEPS


def resume_from_store(kind: training.Kind, directory: Path) -> list[int]:
    """Return the steps at which two runs begin that save to the same URL."""
    begun: list[int] = []
    for epochs in (1, 2):
        begin = training.At("on_train_start", lambda trainer: begun.append(trainer.global_step))
        training.fit(
            kind,
            directory,
            training.Net(),
            ModelCheckpoint("memory://bucket/run", save_last=True),
            begin,
            ckpt_path="last",
            enable_checkpointing=True,
            max_epochs=epochs,
        )
    return begun


def test_last_is_found_at_a_url(tmp_path: Path) -> None:
    """A file system lists files without the protocol of the URL."""
    assert training.on_ranks("ours", resume_from_store, tmp_path) == [[0, 4]] * 2


def test_a_url_that_cannot_be_reached_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """It has the reason of the rank that searched, and a remedy."""
    url = f"http://127.0.0.1:{free_port()}/run"
    error, of_rank_1 = training.on_ranks("ours", error_of_command, tmp_path, url)
    assert of_rank_1 == error
    assert error.startswith(f"CheckpointError: cannot search {url} for checkpoints: ")
    assert "check that it can be reached, or pass the path of a checkpoint" in error
