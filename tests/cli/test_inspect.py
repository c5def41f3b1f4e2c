"""`checkpoint inspect` lists what is in a file, loads none of it, and runs none of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.cli.command import checkpoint, save
from tests.harness.damage import WouldRun


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "it.ckpt"


def test_every_tensor_is_listed_below_what_the_file_is(path: Path) -> None:
    """A row for each tensor, weights and the optimiser's state; above them size, and how far the training was.

    Code in the file is not run.
    """
    ended = checkpoint("inspect", save(path, it=WouldRun(path.parent / "ran")))
    assert (ended.status, ended.stderr) == (0, "")
    assert ended.row("state_dict.out.weight")[1:] == ["60 × 100", "float32", "23.4 KiB"]
    assert ended.row("optimizer_states.0.state.0.step")[1:] == ["scalar", "float32", "4 B"]
    lines = [line.split(maxsplit=1) for line in ended.stdout.splitlines()]
    facts = {words[0]: words[1].strip() for words in lines if len(words) == 2}
    assert (facts["file"], facts["tensors"]) == (str(path), "4, 47.1 KiB in all")
    assert (facts["Lightning"], facts["epoch"], facts["global"]) == ("2.6.6", "3", "step     120")
    assert facts["top-level"].endswith("epoch, global_step, state_dict, optimizer_states, it")
    assert not (path.parent / "ran").exists()


def test_json_has_the_same_facts(path: Path) -> None:
    """One document that programs can read, with sizes in bytes; memory that tensors share counts once."""
    weight = torch.ones(30, 10)
    save(path, state_dict={"first": weight, "second": weight, "part": weight[:2]})
    document = checkpoint("inspect", "--json", path).document
    assert (document["error"], document["file_bytes"]) == (None, path.stat().st_size)
    assert (document["lightning_version"], document["epoch"], document["global_step"]) == ("2.6.6", 3, 120)
    assert [tensor["size"] for tensor in document["tensors"]] == [1200, 1200, 80, 24000, 4]
    assert document["tensor_bytes"] == 1200 + 24000 + 4
    assert document["tensors"][0] == {"key": "state_dict.first", "shape": [30, 10], "dtype": "float32", "size": 1200}


def test_unusual_content_is_listed(path: Path) -> None:
    """Empty, complex, 8 bits, without memory, sparse, bare memory, within objects and circles: each has its row."""
    content: dict[str, Any] = {
        "empty": torch.empty(0, 3),
        "truth": torch.tensor(True),
        "complex": torch.ones(2, dtype=torch.complex64),
        "short": torch.ones(4).to(torch.float8_e4m3fn),
        "conjugate": torch.ones(5, dtype=torch.bfloat16).conj(),
        "raw": torch.ones(500).untyped_storage(),
    }
    whole = content | {"sparse": torch.eye(3).to_sparse(), "model": nn.Linear(2, 2), 3: [nn.Parameter(torch.ones(1))]}
    whole["circle"] = [whole]
    torch.save(whole, path)
    ended = checkpoint("inspect", path)
    assert {name: ended.row(name)[1:] for name in content} == {
        "empty": ["0 × 3", "float32", "0 B"],
        "truth": ["scalar", "bool", "1 B"],
        "complex": ["2", "complex64", "16 B"],
        "short": ["4", "float8_e4m3fn", "4 B"],
        "conjugate": ["5", "bfloat16", "10 B"],
        "raw": ["2000", "uint8", "2.0 KiB"],
    }
    tensors = checkpoint("inspect", "--json", path).document["tensors"]
    parts = [each for each in tensors if each["key"] == "sparse"]
    assert [(part["shape"], part["dtype"]) for part in parts] == [([2, 3], "int64"), ([3], "float32")]
    keys = {each["key"] for each in tensors}
    assert keys == {*content, "sparse", "model._parameters.weight", "model._parameters.bias", "3.0"}


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
