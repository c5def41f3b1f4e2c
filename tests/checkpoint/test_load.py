"""One rank reads a file as ``torch.load`` does, onto the chosen devices."""

import os
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.registry import known_implementations

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.checkpoint.load import placement
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.structure import entry_of
from lightning_ddp_ext.errors import CheckpointError, ConfigurationError, DamagedCheckpointError
from tests.checkpoint import content
from tests.harness.ranks import run_ranks

META = torch.device("meta")

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


def is_mapped(path: Path) -> bool:
    """Whether the file, removed or not, is mapped into this process."""
    return str(path) in Path("/proc/self/maps").read_text()


def test_everything_but_the_weights_is_in_memory_of_this_process(tmp_path: Path) -> None:
    """Tensors of every kind equal what ``torch.load`` reads, even once the file is empty."""
    path = tmp_path / "it.ckpt"
    checkpoint = {
        "state_dict": {"weight": content.numbers(content.MAPPED)},
        **content.kinds(),
        **content.unusual(),
    }
    torch.save(checkpoint, path)
    expected = torch.load(path, weights_only=False)
    value = content.restored(path, weights_only=False, map_weights=True)
    assert content.same(value.pop("state_dict"), expected.pop("state_dict"))
    assert not is_mapped(path)
    os.truncate(path, 0)
    assert [name for name in expected if not content.same(value[name], expected[name])] == []


@pytest.mark.parametrize("is_plain", [False, True])
def test_weights_stay_in_the_file_until_they_are_dropped(is_plain: bool, tmp_path: Path) -> None:
    """The file is mapped until the weights are dropped.

    Tensors outside of the state dict, and a module's extra state, are copies.
    """
    path = tmp_path / "it.ckpt"
    weight = content.numbers(content.MAPPED)
    weights = {"a": weight, "part": weight[100:], "small": content.numbers(3)}
    extra = {"one._extra_state": weight[:5000], "other._extra_state": {"inner": weight[:5000]}}
    checkpoint: dict[str, Any] = {"state_dict": {**weights, **extra}, "kept": weight[5:]}
    if is_plain:
        checkpoint = weights.copy()
    torch.save(checkpoint, path)
    value = content.restored(path, map_weights=True)
    assert is_mapped(path)
    assert content.same(value, checkpoint)
    drop_entries(value, weights)
    drop_entries(checkpoint, weights)
    assert not is_mapped(path)
    os.truncate(path, 0)
    assert content.same(value, checkpoint)


def drop_entries(checkpoint: dict[str, Any], names: Iterable[str]) -> None:
    """Remove entries from the state dict, which may be the whole checkpoint."""
    for name in names:
        del checkpoint.get("state_dict", checkpoint)[name]


@pytest.mark.parametrize(
    ("map_location", "says"),
    [
        ("gpu", "contains 'gpu', which is not a device; write a name such as 'cpu' or 'cuda:0'"),
        ({"cuda:0": "cuda:1", "gpu": "cpu"}, "contains 'gpu'"),
        ({"cuda:0": None}, "contains None"),
        (0, r"must be a device, a device name, a mapping .* \(got 0\)"),
    ],
)
def test_invalid_locations_are_refused(map_location: Any, says: str) -> None:
    """The error names the mistake, the allowed values and the value received."""
    with pytest.raises(ConfigurationError, match=f"map_location {says}"):
        RankZeroCheckpointIO(map_location)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("store://it.ckpt", "needs a library that is not installed: install a_store"),
        (
            "s4://bucket/it.ckpt",
            r"is not a valid path or URL \(ValueError: Protocol not known: s4\)",
        ),
        ("github://it.ckpt", r"is not a valid path or URL \(TypeError: .*'org' and 'repo'\)"),
    ],
)
def test_a_url_that_means_no_file_is_refused(
    url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says that a library is missing, or that the URL is wrong."""
    store = {"class": "a_store.FileSystem", "err": "install a_store"}
    monkeypatch.setitem(known_implementations, "store", store)
    with pytest.raises(CheckpointError, match=f"checkpoint path '{url}' {says}"):
        RankZeroCheckpointIO().load_checkpoint(url)


@pytest.mark.parametrize(
    ("map_location", "location", "device"),
    [
        (None, "cuda:0", "cpu"),
        ("meta", "cpu", "meta"),
        (META, "cuda:0", "meta"),
        ("cpu", "cuda:0", "cpu"),
        ({"cuda:0": "meta"}, "cuda:0", "meta"),
        ({torch.device("cuda:0"): META}, "cuda:0", "meta"),
        ({"cuda:0": "meta"}, "cpu", "cpu"),
        (
            lambda storage, location: torch.UntypedStorage(storage.nbytes(), device="meta"),
            "cpu",
            "meta",
        ),
        (lambda storage, location: None, "cpu", "cpu"),
    ],
)
def test_memory_is_on_the_chosen_device(map_location: Any, location: str, device: str) -> None:
    """``map_location`` chooses it by the device that the storage was saved from.

    A storage that stays on the CPU is not copied.
    """
    storage = content.numbers(3).untyped_storage()
    placed = placement(map_location)(storage, location)
    assert placed.device.type == device
    assert device == "meta" or placed.data_ptr() == storage.data_ptr()


def test_a_checkpoint_io_reads_to_its_own_device_or_to_the_callers(tmp_path: Path) -> None:
    """The argument of ``load_checkpoint`` takes precedence."""
    checkpoint_io = RankZeroCheckpointIO("meta")
    checkpoint_io.save_checkpoint({"x": content.numbers(3)}, tmp_path / "it.ckpt")
    assert checkpoint_io.load_checkpoint(tmp_path / "it.ckpt")["x"].device == META
    on_cpu = checkpoint_io.load_checkpoint(tmp_path / "it.ckpt", map_location="cpu")
    assert on_cpu["x"].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
@pytest.mark.parametrize("map_location", [None, "cpu", torch.device("cpu")])
def test_tensors_of_other_classes_are_read(map_location: Any, tmp_path: Path) -> None:
    """A ``MaskedTensor`` is read, for which torch accepts only the name of a device."""
    checkpoint_io = RankZeroCheckpointIO(map_location, weights_only=False)
    masked = torch.masked.masked_tensor(content.numbers(3), torch.tensor([True, False, True]))
    checkpoint_io.save_checkpoint({"x": masked}, tmp_path / "it.ckpt")
    assert checkpoint_io.load_checkpoint(tmp_path / "it.ckpt")["x"].sum() == 2


class Raises:
    """Cannot be unpickled."""

    def __init__(self) -> None:
        self.field = 1

    def __setstate__(self, state: Any) -> None:
        raise ValueError("field is of an older version")


def refused(path: Path, **options: Any) -> str:
    """Return the text of the error for a file that may be intact."""
    with pytest.raises(CheckpointError, match="could not be read, but may be intact") as caught:
        content.restored(path, **options)
    assert caught.type is CheckpointError
    return str(caught.value)


@pytest.mark.parametrize("verify", [True, False])
def test_a_class_that_raises_does_not_make_a_file_damaged(verify: bool, tmp_path: Path) -> None:
    """The message contains the error of the class, unless the file is also damaged."""
    path = tmp_path / "it.ckpt"
    options = {"weights_only": False, "verify": verify}
    torch.save({"it": Raises()}, path)
    assert "ValueError: field is of an older version; make sure that" in refused(path, **options)
    with pytest.raises(DamagedCheckpointError, match=r"data\.pkl does not match"):
        content.restored(content.flip(path, "data.pkl"), **options)


def read_with_little_memory(rank: int, world_size: int, path: Path) -> str:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (10 << 20),) * 2)
    return refused(path, weights_only=True)


def test_too_little_memory_does_not_make_a_file_damaged(tmp_path: Path) -> None:
    """The error asks the user to check the free memory, among other things."""
    torch.save({"state_dict": {"weight": content.numbers(content.MAPPED)}}, tmp_path / "it.ckpt")
    [text] = run_ranks(read_with_little_memory, 1, tmp_path / "it.ckpt")
    assert text.endswith("; check its file system, its permissions and the free memory")


def test_an_entry_is_read_without_running_code(tmp_path: Path) -> None:
    """It is found among objects of any class; a missing entry is ``None``."""
    path = tmp_path / "it.ckpt"
    harmful = content.WouldRun(tmp_path / "ran")
    entry = {"fit": 2, "words": ["a", None], "object": harmful}
    torch.save(
        {
            **content.kinds(),
            **content.unusual(),
            "harmful": harmful,
            "entry": entry,
            "set": {1},
            "path": path,
        },
        path,
    )
    found = entry_of(locate(path), "entry")
    del found["object"]
    assert found == {"fit": 2, "words": ["a", None]}
    assert entry_of(locate(path), "other") is None
    assert not (tmp_path / "ran").exists()
    content.flip(path, "data.pkl")
    with pytest.raises(DamagedCheckpointError):
        entry_of(locate(path), "entry")
