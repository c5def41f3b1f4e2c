"""Damage to a checkpoint file is detected, wherever it is."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext.checkpoint.load import LoadOptions, load
from lightning_ddp_ext.checkpoint.save import write
from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError
from tests.checkpoint.content import numbers, opened, restored, same

pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


def small() -> dict[str, Any]:
    return {
        "state_dict": {"a": numbers(20), "b": torch.ones(3, dtype=torch.int8)},
        "empty": torch.empty(0),
        "rest": [1, "two", None],
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a small checkpoint that tests do not change."""
    path = tmp_path_factory.mktemp("archive") / "it.ckpt"
    torch.save(small(), path)
    return path


def read_or_error(path: Path) -> Any:
    """Return the content, or an error of ours; other errors propagate."""
    try:
        return restored(path, weights_only=True)
    except CheckpointError as error:
        return error


# Every other byte, for speed: the numbers of records have 2 or 4 bytes.
def test_no_changed_byte_gives_other_content(path: Path) -> None:
    """If a byte of the file changes, the content is still as written, or our error is
    raised.
    """
    copy = path.with_name("changed.ckpt")
    content = path.read_bytes()
    positions = range(0, len(content), 2)
    random_bits = random.Random(1)
    refused = 0
    for position in positions:
        all_bits_or_one = random_bits.choice([0xFF, 1 << random_bits.randrange(8)])
        changed = bytearray(content)
        changed[position] ^= all_bits_or_one
        copy.write_bytes(changed)
        result = read_or_error(copy)
        if isinstance(result, CheckpointError):
            refused += 1
        else:
            assert same(result, small()), f"byte {position}"
    assert refused > len(positions) / 2, "less than half of the file is padding"


def test_a_truncated_file_is_refused_at_any_length(path: Path) -> None:
    """The file counts as damaged, no matter how much of its end is missing."""
    copy = path.with_name("short.ckpt")
    shutil.copy(path, copy)
    for size in reversed(range(path.stat().st_size)):
        os.truncate(copy, size)
        with pytest.raises(DamagedCheckpointError, match=r"short\.ckpt"), opened(copy):
            pass


def test_a_file_that_is_replaced_while_it_is_read_gives_its_old_content(path: Path) -> None:
    """It is not called damaged: a run may save the file that another process reads."""
    copy = path.with_name("replaced.ckpt")
    shutil.copy(path, copy)
    with opened(copy) as archive:
        write({"another": numbers(30)}, copy)
        archive.check()
        assert same(load(archive, LoadOptions(), torch.device("cpu")), small())
