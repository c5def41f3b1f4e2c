"""One rank reads a file as ``torch.load`` does, onto the chosen devices, and detects
damage wherever it is.
"""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext import CheckpointError, DamagedCheckpointError, RankZeroCheckpointIO
from lightning_ddp_ext.checkpoint.load import Archive, LoadOptions, load
from lightning_ddp_ext.checkpoint.save import write
from tests.checkpoint.content import MAPPED, flip, kinds, numbers, restored, same

pytestmark = pytest.mark.filterwarnings(
    "ignore:TypedStorage is deprecated", "ignore:Detected pickle protocol"
)


def is_mapped(path: Path) -> bool:
    """Whether the file, removed or not, is mapped into this process."""
    return str(path) in Path("/proc/self/maps").read_text()


def test_a_large_file_with_tensors_that_cannot_be_copied_is_read(tmp_path: Path) -> None:
    """Tensors of every kind are as saved, and remain so once the file is empty."""
    path = tmp_path / "it.ckpt"
    checkpoint = {"state_dict": {"weight": numbers(MAPPED)}, **kinds()}
    torch.save(checkpoint, path)
    value = restored(path, map_weights=True).content
    assert not is_mapped(path)
    os.truncate(path, 0)
    assert same(value, checkpoint)


def test_weights_stay_in_the_file_until_they_are_dropped(tmp_path: Path) -> None:
    """The file is mapped until the state dict is dropped; all other tensors are copies."""
    path = tmp_path / "it.ckpt"
    weight = numbers(MAPPED)
    weights = {"a": weight, "part": weight[100:], "small": numbers(3)}
    checkpoint = {"state_dict": weights, "same": weight, "kept": weight[5:]}
    torch.save(checkpoint, path)
    value = restored(path, map_weights=True).content
    assert is_mapped(path)
    assert same(value, checkpoint)
    del value["state_dict"], checkpoint["state_dict"]
    assert not is_mapped(path)
    os.truncate(path, 0)
    assert same(value, checkpoint)


def test_a_url_that_means_no_file_is_refused() -> None:
    """The error has the reason, such as a missing library, and the form of a URL."""
    says = r"'s4://bucket/it\.ckpt' cannot be used \(ValueError: Protocol not known: s4\); write"
    with pytest.raises(CheckpointError, match=says):
        RankZeroCheckpointIO().load_checkpoint("s4://bucket/it.ckpt")


@pytest.fixture
def path_of_gpu_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint whose tensors were saved from cuda:0, according to the file."""
    path = tmp_path / "gpu.ckpt"
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpoint = {"state_dict": net.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize(
    ("map_location", "device"),
    [
        (None, "cpu"),
        (torch.device("meta"), "meta"),
        ({"cuda:0": "cpu", "cuda:1": "meta"}, "cpu"),
        (lambda storage, location: storage if location == "cuda:0" else None, "cpu"),
        ("rank", "meta"),
    ],
)
def test_tensors_are_on_the_chosen_device(
    map_location: Any, device: str, path_of_gpu_file: Path
) -> None:
    """``map_location`` chooses it for the weights and for the optimiser, as in ``torch.load``.

    With ``"rank"`` it is the rank's own device.
    """
    content = restored(
        path_of_gpu_file, device="meta", map_weights=True, map_location=map_location
    ).content
    [state] = content["optimizer_states"]
    assert content["state_dict"]["weight"].device.type == device
    assert state["state"][0]["exp_avg"].device.type == device


def test_a_checkpoint_io_reads_to_its_own_device_or_to_the_callers(path_of_gpu_file: Path) -> None:
    """The argument of ``load_checkpoint`` takes precedence.

    Without a strategy and a GPU, a rank's own device is the CPU.
    """
    io = RankZeroCheckpointIO("rank")
    meta = torch.device("meta")
    on_meta = io.load_checkpoint(path_of_gpu_file, map_location=meta)
    assert on_meta["state_dict"]["weight"].device == meta
    on_cpu = io.load_checkpoint(path_of_gpu_file)
    assert on_cpu["state_dict"]["weight"].device.type == "cpu"


class Raises:
    """Cannot be unpickled."""

    def __init__(self) -> None:
        self.field = 1

    def __setstate__(self, state: Any) -> None:
        raise ValueError("field is of an older version")


def test_a_class_that_raises_does_not_make_a_file_damaged(tmp_path: Path) -> None:
    """The message contains the error of the class, unless the file is also damaged."""
    path = tmp_path / "it.ckpt"
    torch.save({"object": Raises()}, path)
    with pytest.raises(CheckpointError, match="ValueError: field is of an older version") as caught:
        restored(path, weights_only=False)
    assert caught.type is CheckpointError
    with pytest.raises(DamagedCheckpointError, match=r"data\.pkl does not match"):
        restored(flip(path, "data.pkl"), weights_only=False)


# Damage.


def small() -> dict[str, Any]:
    return {
        "state_dict": {"a": numbers(20), "b": torch.ones(3, dtype=torch.int8)},
        "empty": torch.empty(0),
        "rest": [1, None],
    }


@pytest.fixture(scope="module")
def path_of_small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a small checkpoint that tests do not change."""
    path = tmp_path_factory.mktemp("small") / "it.ckpt"
    torch.save(small(), path)
    return path


def test_no_changed_byte_gives_other_content(path_of_small_file: Path) -> None:
    """If a byte of the file changes, the content is still as written, or an error of the
    package is raised.
    """
    copy = path_of_small_file.with_name("changed.ckpt")
    original = path_of_small_file.read_bytes()
    positions = range(0, len(original), 2)  # for speed; numbers of records have 2 or 4 bytes
    chance = random.Random(1)
    refused = 0
    for position in positions:
        changed = bytearray(original)
        changed[position] ^= chance.choice([0xFF, 1 << chance.randrange(8)])
        copy.write_bytes(changed)
        try:
            content = restored(copy, weights_only=True).content
        except CheckpointError:
            refused += 1
        else:
            assert same(content, small()), f"byte {position}"
    assert refused > len(positions) / 2, "less than half of the file is padding"


def test_a_file_that_is_replaced_while_it_is_read_gives_its_old_content(
    path_of_small_file: Path,
) -> None:
    """It is not called damaged: a run may save the file that another process reads."""
    copy = path_of_small_file.with_name("replaced.ckpt")
    shutil.copy(path_of_small_file, copy)
    with copy.open("rb") as file:
        archive = Archive(file, str(copy))
        write({"another": numbers(30)}, copy)
        archive.check()
        assert same(load(archive, LoadOptions(), torch.device("cpu")), small())
