"""Runs save to a real S3 server and resume from it, though it is slow, breaks off or
dies.
"""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import fsspec
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.errors import DDPExtError
from tests.field.object_store import NO_FAULT, Fault, ObjectStore, why_unavailable
from tests.harness import training
from tests.harness.environment import skip_because
from tests.harness.ranks import Outcome, by_hand_env, launch_ranks, stories
from tests.integration import checkpointing
from tests.supervision.model import terminate

STEPS = 4  # of an epoch
FILE_OF_EPOCH = [f"epoch={epoch}-step={STEPS * (epoch + 1)}.ckpt" for epoch in range(2)]
STOP_FILE = "last-preempted.ckpt"  # the default, in a folder next to the other checkpoints
STOPPED = 128 + signal.SIGTERM
PART = 5 << 20  # bytes; the smallest part of an upload that S3 accepts
# So that a store that never replies is given up within seconds; by default, the client
# waits for six minutes.
IMPATIENT = {"config_kwargs": {"read_timeout": 1, "retries": {"max_attempts": 1}}}


class Net(training.Net):
    """A model whose checkpoint has four parts, and which records where a run starts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(1, 1))
        self.register_buffer("large", torch.arange(PART * 3 // 4, dtype=torch.float32))

    def on_train_start(self) -> None:
        self.first_step = self.global_step


class Trained(NamedTuple):
    """The steps between which a run trained, and its weights."""

    first_step: int
    last_step: int
    weights: dict[str, Tensor]


def train(
    rank: int,
    world_size: int,
    directory: Path,
    url: str,
    epochs: int,
    *,
    callback: L.Callback | None = None,
    background: bool = False,
    save_top_k: int = -1,
    strategy: Mapping[str, Any] = MappingProxyType({}),
    client: Mapping[str, Any] = MappingProxyType({}),
) -> Trained:
    """Run one command, which saves after each epoch and continues where it finds a
    checkpoint.
    """
    fsspec.config.conf["s3"] = {"default_block_size": PART, **client}
    L.seed_everything(3)
    saver = ModelCheckpoint(url, save_last=True, save_top_k=save_top_k)
    trainer = training.make_trainer(
        training.make_strategy("ours", directory, **strategy),
        callbacks=[saver, callback or L.Callback()],
        plugins=[checkpointing.make_io(is_background=background)],
        enable_checkpointing=True,
        max_epochs=epochs,
        default_root_dir=directory,
    )
    model = Net()
    trainer.fit(model, ckpt_path="last")
    return Trained(model.first_step, trainer.global_step, training.weights(model))


def read_files(rank: int, world_size: int, urls: Sequence[str]) -> None:
    for url in urls:
        RankZeroCheckpointIO().load_checkpoint(url)


@dataclass(frozen=True)
class Job:
    """A command that trains on two ranks, and saves in its own place in the store."""

    store: ObjectStore
    directory: Path
    name: str

    @property
    def url(self) -> str:
        return f"s3://bucket/{self.name}"

    def launch(
        self, *, epochs: int = 2, fault: Fault | None = NO_FAULT, **options: Any
    ) -> list[Outcome]:
        """Run the command while the store has a fault, or is down if that is None."""
        env = {**by_hand_env(2), **self.store.environment}
        with self._gateway(fault) as gateway:
            outcomes = launch_ranks(train, 2, self.directory, self.url, epochs, env=env, **options)
            if fault and fault.kind == "dies":
                assert gateway.wait() == 1
        return outcomes

    def _gateway(self, fault: Fault | None) -> Any:
        return nullcontext() if fault is None else self.store.gateway(fault)

    def run(self, **options: Any) -> list[Trained]:
        """Run the command by ``launch``, and fail unless it succeeds."""
        outcomes = self.launch(**options)
        assert [outcome.exit_code for outcome in outcomes] == [0, 0], stories(outcomes)
        return [outcome.result for outcome in outcomes]

    def run_until_sigterm(self, **options: Any) -> None:
        """Stop the command in its second epoch, by a signal to rank 1."""
        stop = training.At("on_train_batch_end", terminate, earlier=STEPS + 1, ranks=[1])
        outcomes = self.launch(callback=stop, **options)
        assert [outcome.exit_code for outcome in outcomes] == [STOPPED, STOPPED], stories(outcomes)

    def files(self) -> dict[str, int]:
        """Return the files that the store has, with their sizes."""
        objects = self.store.objects(f"{self.name}/")
        return {key.removeprefix(f"{self.name}/"): size for key, size in objects.items()}

    def has_uploads(self) -> bool:
        """Whether an upload was begun, and neither completed nor aborted."""
        return bool(self.store.uploads(f"{self.name}/"))

    def read(self, *files: str) -> None:
        """Read checkpoints, which verifies them."""
        urls = [f"{self.url}/{file}" for file in files]
        with self._gateway(NO_FAULT):
            [outcome] = launch_ranks(read_files, 1, urls, env=self.store.environment)
        assert outcome.exit_code == 0, outcome.story()


def errors_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the error of each rank; fail unless it is an error of the package."""
    errors = [outcome.failure.exception for outcome in outcomes]
    assert all(isinstance(error, DDPExtError) for error in errors), stories(outcomes)
    return [str(error) for error in errors]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Start an S3 server with a bucket; skip if it is not installed."""
    skip_because(why_unavailable())
    with ObjectStore(tmp_path_factory.mktemp("store") / "log") as started:
        yield started


@pytest.fixture
def job(store: ObjectStore, tmp_path: Path, request: pytest.FixtureRequest) -> Job:
    return Job(store, tmp_path, re.sub(r"\W+", "-", request.node.name))


@pytest.fixture(scope="session")
def undisturbed(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Return the weights of a run of two epochs."""
    return Job(store, tmp_path_factory.mktemp("undisturbed"), "undisturbed").run()[0].weights


def expect_resumed_after_first_epoch(
    by_rank: Sequence[Trained], undisturbed: dict[str, Tensor]
) -> None:
    """Fail unless each rank trained in the second epoch only, and learned the same as
    without a stop.
    """
    for trained in by_rank:
        assert (trained.first_step, trained.last_step) == (STEPS, 2 * STEPS)
        training.assert_same(trained.weights, undisturbed)


def test_the_same_command_resumes(job: Job, undisturbed: dict[str, Tensor]) -> None:
    """A run of two epochs continues that of one; its files are whole, and no upload is
    left.
    """
    assert [trained.first_step for trained in job.run(epochs=1)] == [0, 0]
    expect_resumed_after_first_epoch(job.run(), undisturbed)
    job.read("last.ckpt", FILE_OF_EPOCH[1])
    assert job.files().keys() == {"last.ckpt", *FILE_OF_EPOCH}
    assert not job.has_uploads()


def test_a_stop_checkpoint_is_in_the_store(job: Job, undisturbed: dict[str, Tensor]) -> None:
    """The same command continues with the next step, and removes the object when it
    finishes.
    """
    job.run_until_sigterm()
    [path] = [path for path in job.files() if path.endswith(f"-1/{STOP_FILE}")]
    for trained in job.run():
        assert STEPS < trained.first_step < 2 * STEPS
        training.assert_same(trained.weights, undisturbed)
    assert path not in job.files()


def copy_object(source: str, target: str, endpoint: str, trainer: L.Trainer) -> None:
    """Copy an object over another, as another run does."""
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint)
    client.copy_object(Bucket="bucket", Key=target, CopySource=f"bucket/{source}")


def test_an_object_that_another_run_has_replaced_stays(job: Job) -> None:
    """A finished run removes the stop checkpoint only if it is the one that it resumed
    from.
    """
    # In a directory in which the run saves nothing, the client keeps what it has listed.
    stop_key = f"{job.name}-elsewhere/stopped.ckpt"
    strategy = {"stop_checkpoint": f"s3://bucket/{stop_key}"}
    job.run_until_sigterm(strategy=strategy)
    endpoint = job.store.environment["AWS_ENDPOINT_URL"]
    replace = partial(copy_object, f"{job.name}/last.ckpt", stop_key, endpoint)
    callback = training.At("on_train_batch_end", replace, earlier=STEPS + 1, ranks=[0])
    job.run(epochs=4, callback=callback, strategy=strategy)
    assert stop_key in job.store.objects(stop_key)


class Weakness(NamedTuple):
    """What goes wrong in a store without stopping a run."""

    in_uploads: Fault
    in_downloads: Fault


WEAKNESSES = {
    "busy": Weakness(Fault("busy", "PUT"), Fault("busy", "GET")),
    "cuts connections of uploads": Weakness(Fault("resets", "PUT"), Fault("slow", "GET")),
    "slow": Weakness(Fault("slow", "PUT"), Fault("slow", "GET")),
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("weakness", WEAKNESSES.values(), ids=WEAKNESSES)
def test_a_run_saves_and_resumes_in_a_weak_store(
    weakness: Weakness, background: bool, job: Job, undisturbed: dict[str, Tensor]
) -> None:
    """The resumed run has the weights of an undisturbed one, and no upload is left."""
    job.run(epochs=1, fault=weakness.in_uploads, background=background)
    resumed = job.run(fault=weakness.in_downloads, background=background)
    expect_resumed_after_first_epoch(resumed, undisturbed)
    assert not job.has_uploads()


DEATHS_IN_A_SAVE = {
    "in the second part": Fault("dies", "PUT", "partNumber=2"),
    "when the upload is completed": Fault("dies", "POST", "uploadId="),
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("fault", DEATHS_IN_A_SAVE.values(), ids=DEATHS_IN_A_SAVE)
def test_every_rank_raises_if_the_server_dies_in_a_save(
    fault: Fault, background: bool, job: Job, undisturbed: dict[str, Tensor]
) -> None:
    """The previous checkpoint is whole, and the same command resumes from it."""
    job.run(epochs=1)
    files = job.files()
    for error in errors_of(job.launch(fault=fault, background=background)):
        assert f"cannot save checkpoint {job.url}/{FILE_OF_EPOCH[1]}: " in error
    assert job.files() == files
    job.read("last.ckpt")
    expect_resumed_after_first_epoch(job.run(), undisturbed)


FAULTS_IN_A_LOAD = {
    "the server dies": Fault("dies", "GET", f"last.ckpt bytes={PART}-{2 * PART - 1}"),
    "connections are cut": Fault("resets", "GET", "last.ckpt"),
}


@pytest.mark.parametrize("fault", FAULTS_IN_A_LOAD.values(), ids=FAULTS_IN_A_LOAD)
def test_every_rank_raises_if_a_file_cannot_be_read(
    fault: Fault, job: Job, undisturbed: dict[str, Tensor]
) -> None:
    """The same command resumes when the server is back."""
    job.run(epochs=1)
    files = job.files()
    for error in errors_of(job.launch(fault=fault)):
        assert f"checkpoint {job.url}/last.ckpt could not be read: " in error
    assert job.files() == files
    expect_resumed_after_first_epoch(job.run(), undisturbed)


UNREACHABLE = {
    "refuses to list": Fault("denies", "GET", "list-type"),
    "never replies": Fault("stalls", "GET", "list-type"),
    "is down": None,
}


@pytest.mark.parametrize("fault", UNREACHABLE.values(), ids=UNREACHABLE)
def test_no_run_starts_anew_if_the_store_cannot_be_searched(fault: Fault | None, job: Job) -> None:
    """Every rank resumes or raises an error, so no checkpoint is replaced."""
    # With other numbers, Lightning lists the directory after us.
    save_only_last = {"save_top_k": 0, "strategy": {"stop_checkpoint": None}}
    job.run(epochs=1, save_top_k=0)
    files = job.files()
    outcomes = job.launch(fault=fault, client=IMPATIENT, **save_only_last)
    if outcomes[0].exit_code == 0:
        assert [outcome.result.first_step for outcome in outcomes] == [STEPS, STEPS]
        return
    for text in errors_of(outcomes):
        assert f"cannot search {job.url} for checkpoints: " in text
    assert job.files() == files


@pytest.mark.parametrize(("method", "text"), [("PUT", "partNumber"), ("POST", "uploadId=")])
def test_a_refused_upload_is_aborted(method: str, text: str, job: Job) -> None:
    """Every rank raises the store's reason, also if it refuses only one request. Nothing is
    left of the upload, and the last step is saved.
    """
    first, second = errors_of(job.launch(epochs=1, fault=Fault("denies once", method, text)))
    assert first == second
    assert f"/{FILE_OF_EPOCH[0]}: PermissionError: Access Denied; check its space" in first
    assert not job.has_uploads()
    (saved,) = job.files()
    assert saved.endswith("/last-preempted.ckpt")
