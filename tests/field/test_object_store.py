"""Runs save to a real S3 server and resume from it, though it refuses requests or dies."""

import contextlib
import importlib.util
import logging
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fsspec
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.errors import DDPExtError
from tests.harness import training
from tests.harness.environment import skip_because
from tests.harness.ranks import Outcome, by_hand_env, free_port, launch_ranks, stories

STEPS = 4  # of an epoch
FILE_OF_EPOCH = [f"epoch={epoch}-step={STEPS * (epoch + 1)}.ckpt" for epoch in range(2)]
STOP_FILE = "last-preempted.ckpt"  # the default, in a folder next to the other checkpoints
PART = 5 << 20  # bytes; the smallest part of an upload that S3 accepts
NEEDED = ("moto", "flask", "s3fs")
DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


class Fault(NamedTuple):
    """A fault of the server, which begins with the first request that a pattern finds in
    its method, its URL and its range of bytes.

    The server ``dies``: this connection and all later ones are cut. Or it ``refuses`` this
    request.
    """

    kind: Literal["dies", "refuses"]
    request: str


class ObjectStore:
    """A server with one bucket, ``s3://bucket``: moto's, in this process, behind faults.

    Attributes:
        environment: the variables with which every S3 client finds the server.
    """

    def __init__(self) -> None:
        from moto.moto_server import werkzeug_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        port = free_port()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "field",
            "AWS_SECRET_ACCESS_KEY": "field",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # so that a dead server is given up within seconds
        }
        self._fault: Fault | None = None
        self._concerned = 0  # requests, since the fault began
        self._moto = werkzeug_app.DomainDispatcherApplication(werkzeug_app.create_backend_app)
        server = make_server(
            "127.0.0.1",
            port,
            self._answer,
            threaded=True,
            request_handler=werkzeug_app.MotoRequestHandler,
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.end = server.shutdown
        self.client.create_bucket(Bucket="bucket")

    @property
    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            region_name="us-east-1",
            aws_access_key_id="field",
            aws_secret_access_key="field",
        )

    @contextlib.contextmanager
    def fault(self, fault: Fault | None) -> Iterator[None]:
        """Have the fault during the block, if there is one; fail if it does not happen."""
        self._fault = fault
        self._concerned = 0
        yield
        assert fault is None or self._concerned > 0, f"{fault} did not happen"
        self._fault = None

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer a request as moto does, unless the fault strikes it; a WSGI application."""
        if self._fault is None:
            return self._moto(environ, start_response)
        words = [environ[name] for name in ("REQUEST_METHOD", "PATH_INFO", "QUERY_STRING")]
        request = " ".join([*words, environ.get("HTTP_RANGE", "")])
        is_concerned = re.search(self._fault.request, request) is not None
        self._concerned += is_concerned
        if self._fault.kind == "dies" and self._concerned > 0:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start_response("503 Service Unavailable", [])
            return []
        if is_concerned and self._concerned == 1:
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [DENIED]
        return self._moto(environ, start_response)


class Net(training.Net):
    """A model whose checkpoint has four parts, and which records where a run starts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(1, 1))
        self.register_buffer("large", torch.arange(PART * 3 // 4, dtype=torch.float32))

    def on_train_start(self) -> None:
        self.first_step = self.global_step


class Trained(NamedTuple):
    """The step from which a run trained, and its weights."""

    first_step: int
    weights: dict[str, Tensor]


def train(
    rank: int,
    world_size: int,
    directory: Path,
    url: str,
    epochs: int,
    *,
    callback: L.Callback | None = None,
    is_background: bool = False,
    stop_checkpoint: str = STOP_FILE,
) -> Trained:
    """Run one command, which saves after each epoch and continues where it finds a
    checkpoint.
    """
    fsspec.config.conf["s3"] = {"default_block_size": PART}
    L.seed_everything(3)
    io = RankZeroCheckpointIO()
    trainer = training.make_trainer(
        training.make_strategy("ours", directory, stop_checkpoint=stop_checkpoint),
        callbacks=[
            ModelCheckpoint(url, save_last=True, save_top_k=-1),
            callback or L.Callback(),
        ],
        plugins=[AsyncCheckpointIO(io) if is_background else io],
        enable_checkpointing=True,
        max_epochs=epochs,
        default_root_dir=directory,
    )
    model = Net()
    trainer.fit(model, ckpt_path="last")
    return Trained(model.first_step, training.weights(model))


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
        self, *, epochs: int = 2, fault: Fault | None = None, **options: Any
    ) -> list[Outcome]:
        """Run the command while the store has a fault, if any."""
        env = {**by_hand_env(2), **self.store.environment}
        with self.store.fault(fault):
            return launch_ranks(train, 2, self.directory, self.url, epochs, env=env, **options)

    def run(self, **options: Any) -> list[Trained]:
        """Run the command by ``launch``, and fail unless it succeeds."""
        outcomes = self.launch(**options)
        assert [outcome.exit_code for outcome in outcomes] == [0, 0], stories(outcomes)
        return [outcome.result for outcome in outcomes]

    def run_until_sigterm(self, **options: Any) -> None:
        """Stop the command in its second epoch, by a signal to rank 1."""
        stop = training.signalled("on_train_batch_end", STEPS + 1, ranks=[1])
        outcomes = self.launch(callback=stop, **options)
        assert [outcome.exit_code for outcome in outcomes] == [training.STOPPED] * 2, stories(
            outcomes
        )

    def files(self) -> dict[str, str]:
        """Return the files that the store has, with hashes of their contents."""
        listed = self.store.client.list_objects_v2(Bucket="bucket", Prefix=self.name)
        files = listed.get("Contents", [])
        return {file["Key"].removeprefix(f"{self.name}/"): file["ETag"] for file in files}

    def has_uploads(self) -> bool:
        """Whether an upload was begun, and neither completed nor aborted."""
        listed = self.store.client.list_multipart_uploads(Bucket="bucket")
        return any(upload["Key"].startswith(self.name) for upload in listed.get("Uploads", []))


def errors_of(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the error of each rank; fail unless it is an error of the package."""
    errors = [outcome.failure.exception for outcome in outcomes]
    assert all(isinstance(error, DDPExtError) for error in errors), stories(outcomes)
    return [str(error) for error in errors]


@pytest.fixture(scope="session")
def store() -> Iterator[ObjectStore]:
    """Start an S3 server with a bucket; skip if it is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    skip_because(f"{', '.join(missing)} not installed (the extra `field`)" if missing else None)
    started = ObjectStore()
    yield started
    started.end()


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
        assert trained.first_step == STEPS
        training.assert_same(trained.weights, undisturbed)


@pytest.mark.parametrize("is_background", [False, True])
def test_the_same_command_resumes(
    is_background: bool, job: Job, undisturbed: dict[str, Tensor]
) -> None:
    """A run of two epochs continues that of one, and leaves no upload."""
    assert [trained.first_step for trained in job.run(epochs=1)] == [0, 0]
    expect_resumed_after_first_epoch(job.run(is_background=is_background), undisturbed)
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


def copy_object(source: str, target: str, trainer: L.Trainer) -> None:
    """Copy an object over another, as another run does."""
    import boto3

    boto3.client("s3").copy_object(Bucket="bucket", Key=target, CopySource=f"bucket/{source}")


def test_an_object_that_another_run_has_replaced_stays(job: Job) -> None:
    """A finished run removes the stop checkpoint only if it is the one that it resumed
    from.
    """
    # In a directory in which the run saves nothing, the client keeps what it has listed.
    key = f"{job.name}-elsewhere/stopped.ckpt"
    url = f"s3://bucket/{key}"
    job.run_until_sigterm(stop_checkpoint=url)
    replace = partial(copy_object, f"{job.name}/last.ckpt", key)
    callback = training.At("on_train_batch_end", replace, earlier=STEPS + 1, ranks=[0])
    job.run(epochs=4, callback=callback, stop_checkpoint=url)
    assert key in job.files()


CANNOT_SAVE = f"cannot save checkpoint {{}}/{FILE_OF_EPOCH[1]}: "


@pytest.mark.parametrize(
    ("pattern", "is_background", "message"),
    [
        pytest.param("PUT .*partNumber=2", False, CANNOT_SAVE, id="in a save"),
        pytest.param("PUT .*partNumber=2", True, CANNOT_SAVE, id="in a background save"),
        pytest.param("POST .*uploadId=", False, CANNOT_SAVE, id="at the end of a save"),
        pytest.param("POST .*uploadId=", True, CANNOT_SAVE, id="at the end of a background save"),
        pytest.param(
            f"GET .*/last.ckpt .*bytes={PART}-",
            False,
            "checkpoint {}/last.ckpt could not be read: ",
            id="in a load",
        ),
    ],
)
def test_every_rank_raises_if_the_server_dies(
    pattern: str, is_background: bool, message: str, job: Job, undisturbed: dict[str, Tensor]
) -> None:
    """The previous checkpoint is whole, and the same command resumes from it when the server
    is back.
    """
    job.run(epochs=1)
    files = job.files()
    outcomes = job.launch(fault=Fault("dies", pattern), is_background=is_background)
    for error in errors_of(outcomes):
        assert message.format(job.url) in error
    assert job.files() == files
    expect_resumed_after_first_epoch(job.run(), undisturbed)


@pytest.mark.parametrize("pattern", ["PUT .*partNumber", "POST .*uploadId="])
def test_a_refused_upload_is_aborted(
    pattern: str, job: Job, undisturbed: dict[str, Tensor]
) -> None:
    """Every rank raises the store's reason. Nothing is left of the upload, and the last
    step is saved, after which the same command continues.
    """
    first, second = errors_of(job.launch(epochs=1, fault=Fault("refuses", pattern)))
    assert first == second
    assert f"/{FILE_OF_EPOCH[0]}: PermissionError: Access Denied; check its space" in first
    assert not job.has_uploads()
    (saved,) = job.files()
    assert saved.endswith(f"/{STOP_FILE}")
    expect_resumed_after_first_epoch(job.run(), undisturbed)
    assert saved not in job.files()
