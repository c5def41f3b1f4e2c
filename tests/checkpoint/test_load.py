"""One rank reads a file as ``torch.load`` does, onto the chosen devices."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.registry import known_implementations

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.checkpoint.load import LoadOptions
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.restore import restore
from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError
from lightning_ddp_ext.ranks import Ranks
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


def test_weights_stay_in_the_file_until_they_are_dropped(tmp_path: Path) -> None:
    """The file is mapped until the state dict is dropped; all other tensors are copies."""
    path = tmp_path / "it.ckpt"
    weight = content.numbers(content.MAPPED)
    weights = {"a": weight, "part": weight[100:], "small": content.numbers(3)}
    checkpoint = {"state_dict": weights, "same": weight, "kept": weight[5:]}
    torch.save(checkpoint, path)
    value = content.restored(path, map_weights=True)
    assert is_mapped(path)
    assert content.same(value, checkpoint)
    del value["state_dict"], checkpoint["state_dict"]
    assert not is_mapped(path)
    os.truncate(path, 0)
    assert content.same(value, checkpoint)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("store://it.ckpt", r"\(ImportError: install a_store\)"),
        ("s4://bucket/it.ckpt", r"\(ValueError: Protocol not known: s4\)"),
        ("github://it.ckpt", r"\(TypeError: .*'org' and 'repo'\)"),
    ],
)
def test_a_url_that_means_no_file_is_refused(
    url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says that a library is missing, or that the URL is wrong."""
    store = {"class": "a_store.FileSystem", "err": "install a_store"}
    monkeypatch.setitem(known_implementations, "store", store)
    with pytest.raises(CheckpointError, match=f"checkpoint path '{url}' cannot be used {says}"):
        RankZeroCheckpointIO().load_checkpoint(url)


def to_meta(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes(), device="meta")


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
        ("cpu", "cpu"),
        ("meta", "meta"),
        (META, "meta"),
        ({"cuda:0": "meta"}, "meta"),
        ({"cuda:0": "cpu", "cuda:1": "meta"}, "cpu"),
        (lambda storage, location: storage if location == "cuda:0" else None, "cpu"),
        (to_meta, "meta"),
        ("rank", "meta"),
    ],
)
def test_tensors_are_on_the_chosen_device(
    map_location: Any, device: str, path_of_gpu_file: Path
) -> None:
    """``map_location`` chooses it for the weights and for the optimiser, as in ``torch.load``.

    With ``"rank"`` it is the rank's own device.
    """
    options = LoadOptions(map_location)
    read = restore(locate(path_of_gpu_file), Ranks(device=META), options, map_weights=True).content
    [state] = read["optimizer_states"]
    assert read["state_dict"]["weight"].device.type == device
    assert state["state"][0]["exp_avg"].device.type == device


def test_the_rank_is_on_the_cpu_without_a_strategy_and_a_gpu(path_of_gpu_file: Path) -> None:
    """The checkpoint IO alone puts the tensors there, which come from a GPU."""
    read = RankZeroCheckpointIO("rank").load_checkpoint(path_of_gpu_file)
    assert read["state_dict"]["weight"].device.type == "cpu"


def test_a_device_that_does_not_exist_is_torchs_error(path_of_gpu_file: Path) -> None:
    """The error names the file, and has torch's text."""
    with pytest.raises(CheckpointError, match=r"gpu\.ckpt could not be read: .*tagged with gpu"):
        content.restored(path_of_gpu_file, map_location="gpu")


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
    """Return the text of the error for a file that is not damaged."""
    with pytest.raises(CheckpointError, match="could not be read") as caught:
        content.restored(path, **options)
    assert caught.type is CheckpointError
    return str(caught.value)


def test_a_class_that_raises_does_not_make_a_file_damaged(tmp_path: Path) -> None:
    """The message contains the error of the class, unless the file is also damaged."""
    path = tmp_path / "it.ckpt"
    torch.save({"it": Raises()}, path)
    assert refused(path, weights_only=False).endswith("ValueError: field is of an older version")
    with pytest.raises(DamagedCheckpointError, match=r"data\.pkl does not match"):
        content.restored(content.flip(path, "data.pkl"), weights_only=False)


def read_with_little_memory(rank: int, world_size: int, path: Path) -> str:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (10 << 20),) * 2)
    return refused(path, weights_only=True)


def test_too_little_memory_does_not_make_a_file_damaged(tmp_path: Path) -> None:
    """The error has the system's reason."""
    torch.save({"state_dict": {"weight": content.numbers(content.MAPPED)}}, tmp_path / "it.ckpt")
    [text] = run_ranks(read_with_little_memory, 1, tmp_path / "it.ckpt")
    assert "annot allocate memory" in text
