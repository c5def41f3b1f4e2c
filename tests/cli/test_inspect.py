"""`checkpoint inspect` lists what is in a file, loads none of it, and runs none of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import WouldRun, checkpoint, save
from tests.harness.damage import flip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "it.ckpt"


def test_every_tensor_is_listed_with_its_shape_dtype_and_size(path: Path) -> None:
    """A row for each tensor, wherever it is: weights and the optimiser's state."""
    ended = checkpoint("inspect", save(path))
    assert (ended.status, ended.stderr) == (0, "")
    assert ended.row("state_dict.out.weight") == ["state_dict.out.weight", "60 × 100", "float32", "23.4 KiB"]
    assert ended.row("optimizer_states.0.state.0.exp_avg")[1:] == ["60 × 100", "float32", "23.4 KiB"]
    assert ended.row("optimizer_states.0.state.0.step")[1:] == ["scalar", "float32", "4 B"]


def test_a_header_tells_what_the_file_is(path: Path) -> None:
    """Size, number of tensors, and how far the training was when Lightning wrote it."""
    lines = [line.split(maxsplit=1) for line in checkpoint("inspect", save(path)).stdout.splitlines()]
    facts = {words[0]: words[1].strip() for words in lines if len(words) == 2}
    assert facts["file"] == str(path)
    assert facts["tensors"] == "4, 47.1 KiB in all"
    assert (facts["Lightning"], facts["epoch"], facts["global"]) == ("2.6.6", "3", "step     120")
    assert facts["top-level"].endswith("pytorch-lightning_version, epoch, global_step, state_dict, optimizer_states")


def test_json_has_the_same_facts(path: Path) -> None:
    """One document that programs can read, with sizes in bytes."""
    document = checkpoint("inspect", "--json", save(path)).document
    assert document["error"] is None
    assert document["file_bytes"] == path.stat().st_size
    assert (document["lightning_version"], document["epoch"], document["global_step"]) == ("2.6.6", 3, 120)
    assert document["tensor_bytes"] == 24000 + 240 + 24000 + 4
    assert document["tensors"][0] == {
        "key": "state_dict.out.weight",
        "shape": [60, 100],
        "dtype": "float32",
        "size": 24000,
    }


def test_memory_that_tensors_share_counts_once(path: Path) -> None:
    """Tied weights and views have a row each."""
    weight = torch.ones(30, 10)
    save(path, state_dict={"first": weight, "second": weight, "part": weight[:2]})
    document = checkpoint("inspect", "--json", path).document
    assert [tensor["size"] for tensor in document["tensors"]] == [1200, 1200, 80, 24000, 4]
    assert document["tensor_bytes"] == 1200 + 24000 + 4


@pytest.mark.parametrize(
    ("tensor", "cells"),
    [
        (torch.empty(0, 3), ["0 × 3", "float32", "0 B"]),
        (torch.tensor(True), ["scalar", "bool", "1 B"]),
        (torch.ones(2, dtype=torch.complex64), ["2", "complex64", "16 B"]),
        (torch.ones(4).to(torch.float8_e4m3fn), ["4", "float8_e4m3fn", "4 B"]),
        (torch.ones(5, dtype=torch.bfloat16).conj(), ["5", "bfloat16", "10 B"]),
    ],
)
def test_unusual_tensors_are_listed(tensor: torch.Tensor, cells: list[str], path: Path) -> None:
    """Empty, without dimensions, complex, 8 bits, without memory: each has its row."""
    assert checkpoint("inspect", save(path, state_dict={"it": tensor})).row("state_dict.it")[1:] == cells


def test_a_sparse_tensor_is_listed_by_its_parts(path: Path) -> None:
    """Indices and values have a row each."""
    save(path, state_dict={"it": torch.eye(3).to_sparse()})
    parts = [part for part in checkpoint("inspect", "--json", path).document["tensors"] if part["key"].endswith("it")]
    assert [(part["shape"], part["dtype"]) for part in parts] == [([2, 3], "int64"), ([3], "float32")]


def test_a_name_cannot_steer_the_terminal(path: Path) -> None:
    """Escape sequences and markup in a file's names are shown, not obeyed."""
    save(path, state_dict={"[red]\x1b[2J:smile:": torch.ones(3)})
    assert checkpoint("inspect", path).row(r"state_dict.[red]\x1b[2J:smile:")[1] == "3"


@pytest.mark.parametrize("content", [{"a": {"b": 1}}, torch.ones(3), [torch.ones(3)], 5])
def test_a_file_of_anything_is_inspected(content: Any, path: Path) -> None:
    """A state dict, a tensor, a list, no tensors at all."""
    torch.save(content, path)
    assert checkpoint("inspect", path).status == 0
    tensors = checkpoint("inspect", "--json", path).document["tensors"]
    assert [tensor["shape"] for tensor in tensors] == ([] if isinstance(content, (dict, int)) else [[3]])


def test_memory_that_is_no_tensors_is_listed_as_bytes(path: Path) -> None:
    """Nothing is passed over in silence."""
    torch.save({"it": torch.ones(3), "raw": torch.ones(500).untyped_storage()}, path)
    assert checkpoint("inspect", path).row("raw")[1:] == ["2000", "uint8", "2.0 KiB"]


def test_code_in_a_file_is_not_run(path: Path) -> None:
    """What is beside it is listed."""
    ended = checkpoint("inspect", save(path, it=WouldRun(path.parent / "ran")))
    assert ended.status == 0
    assert ended.row("state_dict.out.bias")[1] == "60"
    assert not (path.parent / "ran").exists()


def test_a_file_from_before_torch_1_6_is_refused_in_a_sentence(path: Path) -> None:
    """It would have to be loaded to be listed."""
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    ended = checkpoint("inspect", path)
    assert ended.status == 1
    assert "is in the format from before torch 1.6" in ended.stderr
    assert ended.stderr.endswith("load it with torch.load, and save it again\n")


def test_a_damaged_skeleton_is_not_unpickled(path: Path) -> None:
    """The damage is named."""
    ended = checkpoint("inspect", flip(save(path), "data.pkl"))
    assert ended.status == 1
    assert "is damaged: data.pkl differs from what was written" in ended.stderr


def test_content_nested_too_deeply_is_refused_in_a_sentence(path: Path) -> None:
    """A file that would exhaust the stack does not."""
    content: list[Any] = []
    for _ in range(1200):
        content = [content]
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10 * limit)
    try:
        torch.save(content, path)
    finally:
        sys.setrecursionlimit(limit)
    ended = checkpoint("inspect", path)
    assert ended.status == 1
    assert ended.stderr.startswith(f"checkpoint {path} cannot be listed: maximum recursion depth exceeded")


@pytest.mark.parametrize(
    ("spelling", "says"),
    [
        ("missing.ckpt", "missing.ckpt does not exist"),
        (".", ". is a directory"),
        ("memory://bucket/no.ckpt", "memory://bucket/no.ckpt does not exist"),
    ],
)
def test_what_is_no_file_is_refused_in_one_sentence(
    spelling: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing there, a directory, a URL."""
    monkeypatch.chdir(tmp_path)
    ended = checkpoint("inspect", spelling)
    assert (ended.status, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert says in ended.stderr
    assert says in checkpoint("inspect", "--json", spelling).document["error"]
