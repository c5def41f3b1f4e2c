"""Checkpoints in an object store: a real S3 server that is slow, breaks off or dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.errors import DDPExtError
from tests.field.object_store import ObjectStore, why_unavailable
from tests.harness import training
from tests.harness.environment import by_hand_env, skip_because
from tests.harness.outcomes import Outcome
from tests.harness.ranks import launch_ranks
from tests.harness.training import At, assert_same, make_strategy, make_trainer, weights

pytestmark = pytest.mark.field

STEPS = 4  # of an epoch
PART = 5 << 20  # the smallest one that S3 accepts
# So that a store that never replies is given up within seconds; by default, the client
# waits for six minutes.
IMPATIENT = {"config_kwargs": {"read_timeout": 1, "retries": {"max_attempts": 1}}}


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """Start an S3 server with a bucket; skip if it is not installed."""
    skip_because(why_unavailable())
    with ObjectStore(tmp_path_factory.mktemp("store") / "log") as started:
        yield started


class Net(training.Net):
    """A model whose checkpoint has four parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.Linear(1, 1))
        self.register_buffer("large", torch.arange(PART * 3 // 4, dtype=torch.float32))


def train(
    rank: int,
    world_size: int,
    directory: Path,
    url: str,
    epochs: int,
    client: Any = None,
    act: Any = None,
    background: bool = False,
    keeps: int = -1,
    stop_checkpoint: str | None = "last-preempted.ckpt",
) -> dict[str, Any]:
    """Run one command, which saves after each epoch and continues where it finds a
    checkpoint.
    """
    fsspec.config.conf["s3"] = {"default_block_size": PART, **(client or {})}
    L.seed_everything(3)
    begun: list[int] = []
    callbacks: list[L.Callback] = [
        ModelCheckpoint(url, save_last=True, save_top_k=keeps),
        At("on_train_start", lambda trainer: begun.append(trainer.global_step)),
    ]
    if act is not None:
        callbacks.append(At("on_train_batch_end", partial(act, rank), earlier=5))
    trainer = make_trainer(
        make_strategy("ours", directory, stop_checkpoint=stop_checkpoint),
        callbacks=callbacks,
        plugins=[RankZeroCheckpointIO(background=background)],
        enable_checkpointing=True,
        max_epochs=epochs,
        default_root_dir=directory,
    )
    model = Net()
    trainer.fit(model, ckpt_path="last")
    return {"from": begun[0], "to": trainer.global_step, "weights": weights(model)}


def run(store: ObjectStore, directory: Path, *args: Any, **options: Any) -> list[Outcome]:
    """Train on two ranks that reach the store by the gateway."""
    env = {**by_hand_env(2), **store.environment}
    return launch_ranks(train, 2, directory, *args, env=env, **options)


def results(outcomes: list[Outcome]) -> list[Any]:
    assert [each.exit_code for each in outcomes] == [0, 0], "\n".join(
        each.story() for each in outcomes
    )
    return [each.result for each in outcomes]


def errors(outcomes: list[Outcome]) -> list[str]:
    """Return the errors of all ranks, each of which must have one of ours."""
    found = [each.failure.exception for each in outcomes]
    assert all(isinstance(each, DDPExtError) for each in found), "\n".join(
        each.story() for each in outcomes
    )
    return [str(each) for each in found]


def verified(store: ObjectStore, *urls: str) -> tuple[int, str]:
    """Return the status and the output of ``lightning-ddp-ext checkpoint verify``."""
    command = [sys.executable, "-m", "lightning_ddp_ext", "checkpoint", "verify", *urls]
    done = subprocess.run(
        command,
        env={**os.environ, **store.environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="session")
def undisturbed(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of a run of two epochs."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with store.gateway():
        first, _ = results(run(store, directory, "s3://bucket/undisturbed", 2))
    return first["weights"]


def test_the_same_command_resumes(store: ObjectStore, tmp_path: Path, undisturbed: Any) -> None:
    """Rank 0 reads and sends the object; the files are whole and no upload is left."""
    url = "s3://bucket/resumes"
    with store.gateway():
        assert [each["from"] for each in results(run(store, tmp_path, url, 1))] == [0, 0]
        resumed = results(run(store, tmp_path, url, 2))
        status, printed = verified(store, f"{url}/last.ckpt", f"{url}/epoch=1-step=8.ckpt")
    assert [(each["from"], each["to"]) for each in resumed] == [(STEPS, 2 * STEPS)] * 2
    for each in resumed:
        assert_same(each["weights"], undisturbed)
    assert status == 0, printed
    names = {"last.ckpt", "epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"}
    assert {key.partition("/")[2] for key in store.objects("resumes")} == names
    assert store.uploads("resumes") == []


def stop(rank: int, trainer: L.Trainer) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_stop_checkpoint_is_in_the_store(
    store: ObjectStore, tmp_path: Path, undisturbed: Any
) -> None:
    """The same command continues with the next step, and removes the object when it
    finishes.
    """
    url = "s3://bucket/stopped"
    with store.gateway():
        stopped = run(store, tmp_path, url, 2, act=stop)
        assert [each.exit_code for each in stopped] == [143, 143], stopped[0].story()
        assert "stopped/last-preempted.ckpt" in store.objects("stopped")
        resumed = results(run(store, tmp_path, url, 2))
    assert [STEPS < each["from"] < 2 * STEPS for each in resumed] == [True, True], resumed
    for each in resumed:
        assert_same(each["weights"], undisturbed)
    assert "stopped/last-preempted.ckpt" not in store.objects("stopped")


def replace(source: str, key: str, address: str, rank: int, trainer: L.Trainer) -> None:
    """Copy an object over another, as another run does."""
    if rank == 0:
        import boto3

        client = boto3.client("s3", endpoint_url=address)
        client.copy_object(Bucket="bucket", Key=key, CopySource=f"bucket/{source}")


def test_an_object_that_another_run_has_replaced_stays(store: ObjectStore, tmp_path: Path) -> None:
    """A finished run removes the stop checkpoint only if it is the one that it resumed
    from.
    """
    # In a directory in which the run saves nothing, the client keeps what it has listed.
    key = "replaced-stop/it.ckpt"
    options = {"stop_checkpoint": f"s3://bucket/{key}"}
    with store.gateway():
        stopped = run(store, tmp_path, "s3://bucket/replaced", 2, act=stop, **options)
        assert [each.exit_code for each in stopped] == [143, 143], stopped[0].story()
        act = partial(replace, "replaced/last.ckpt", key, store.environment["AWS_ENDPOINT_URL"])
        results(run(store, tmp_path, "s3://bucket/replaced", 4, act=act, **options))
    assert key in store.objects("replaced-stop")


FAULTS = {
    "that is busy": [("busy", "PUT", ""), ("busy", "GET", "")],
    "that cuts uploads and downloads": [("resets", "PUT", ""), ("resets", "GET", "last.ckpt")],
    "that is slow": [("slow", "PUT", ""), ("slow", "GET", "")],
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_run_survives_a_store(
    store: ObjectStore, tmp_path: Path, faults: Any, background: bool, undisturbed: Any
) -> None:
    """The files are whole, and a resumed run has the weights of an undisturbed one."""
    name = f"{faults[0][0]}-{background}"
    with store.gateway(*faults[0]):
        results(run(store, tmp_path, f"s3://bucket/{name}", 1, background=background))
    with store.gateway(*faults[1]):
        resumed = results(run(store, tmp_path, f"s3://bucket/{name}", 2, background=background))
    assert [each["from"] for each in resumed] == [STEPS, STEPS]
    for each in resumed:
        assert_same(each["weights"], undisturbed)
    assert store.uploads(name) == []


@pytest.mark.parametrize("request_text", ["partNumber=2", "uploadId="])
@pytest.mark.parametrize("background", [False, True])
def test_a_server_dies_in_a_save(
    store: ObjectStore, tmp_path: Path, request_text: str, background: bool, undisturbed: Any
) -> None:
    """Every rank raises the error; the previous checkpoint is whole, and the same
    command resumes from it.
    """
    name = f"dies-{background}-{request_text.strip('=')}"
    url = f"s3://bucket/{name}"
    with store.gateway():
        results(run(store, tmp_path, url, 1))
    before = store.objects(name)
    method = "PUT" if "part" in request_text else "POST"
    with store.gateway("dies", method, request_text) as gateway:
        texts = errors(run(store, tmp_path, url, 2, background=background))
        assert gateway.wait() == 1
    for text in texts:
        assert f"cannot save checkpoint {url}/epoch=1-step=8.ckpt: " in text
    assert store.objects(name) == before
    with store.gateway():
        assert verified(store, f"{url}/last.ckpt")[0] == 0
        resumed = results(run(store, tmp_path, url, 2))
    assert [each["from"] for each in resumed] == [STEPS, STEPS]
    assert_same(resumed[0]["weights"], undisturbed)


def test_a_server_dies_in_a_load(store: ObjectStore, tmp_path: Path) -> None:
    """Every rank raises the error, and the same command resumes when the server is back."""
    name = "dies-load"
    url = f"s3://bucket/{name}"
    with store.gateway():
        results(run(store, tmp_path, url, 1))
    before = store.objects(name)
    with store.gateway("dies", "GET", f"last.ckpt bytes={PART}-{2 * PART - 1}") as gateway:
        texts = errors(run(store, tmp_path, url, 2))
        assert gateway.wait() == 1
        assert verified(store, f"{url}/last.ckpt")[0] == 1
    for text in texts:
        assert f"checkpoint {url}/last.ckpt cannot be fetched: " in text
    assert store.objects(name) == before
    with store.gateway():
        assert [each["from"] for each in results(run(store, tmp_path, url, 2))] == [4, 4]


UNREACHABLE = {
    "refuses to list": (("denies", "GET", "list-type"), "checkpoint {url}/last"),
    "never replies": (("stalls", "GET", "list-type"), "cannot search {url} for checkpoints: "),
    "is not there": (None, "cannot search {url} for checkpoints: "),
}


@pytest.mark.parametrize(("fault", "error"), UNREACHABLE.values(), ids=UNREACHABLE)
def test_last_is_not_missing_in_a_store_that(
    store: ObjectStore, tmp_path: Path, fault: Any, error: str
) -> None:
    """Every rank resumes or raises an error; no run starts anew and replaces the
    checkpoints.
    """
    name = f"unreachable-{fault and fault[0]}"
    url = f"s3://bucket/{name}"
    with store.gateway():
        results(run(store, tmp_path, url, 1, keeps=0))
    before = store.objects(name)
    with store.gateway(*fault) if fault else nullcontext():
        # With other numbers, Lightning lists the directory after us.
        options = {"client": IMPATIENT, "keeps": 0, "stop_checkpoint": None}
        outcomes = run(store, tmp_path, url, 2, **options)
    with suppress(AssertionError):
        assert [each["from"] for each in results(outcomes)] == [STEPS, STEPS]
        return
    for text in errors(outcomes):
        assert error.format(url=url) in text
    assert store.objects(name) == before


@pytest.mark.parametrize(("method", "text"), [("PUT", "partNumber"), ("POST", "uploadId=")])
def test_a_refused_upload_is_aborted(
    store: ObjectStore, tmp_path: Path, method: str, text: str
) -> None:
    """Every rank raises the store's reason, also if the store refuses only one request;
    no upload is left.
    """
    name = f"refused-{method}"
    with store.gateway("denies once", method, text):
        texts = errors(run(store, tmp_path, f"s3://bucket/{name}", 1))
    assert texts == [texts[0]] * 2
    assert "/epoch=0-step=4.ckpt: PermissionError: Access Denied; check its space" in texts[0]
    assert store.uploads(name) == []
    assert store.objects(name) == {}
