"""One of the surviving ranks saves: the one that is furthest."""

from pathlib import Path

import pytest

from lightning_ddp_ext.checkpoint.save_lock import lock_of, save_if_furthest


def test_the_rank_that_is_further_saves(tmp_path: Path) -> None:
    """A rank with fewer batches, or with as many, leaves the file of its run as it is."""

    def saves(run: str, batches: int) -> bool:
        path = str(tmp_path / "it.ckpt")
        return save_if_furthest(path, run, batches, lambda: None, seconds=1)

    assert saves("run", 4)
    assert not saves("run", 4)
    assert not saves("run", 3)
    assert saves("run", 5)
    assert saves("other", 1)


@pytest.mark.parametrize("content", [b"", b"run", b"run ", b"\xff {", b"run 7x"])
def test_a_lock_file_with_other_content_does_not_prevent_a_save(
    content: bytes, tmp_path: Path
) -> None:
    """A rank was killed while it wrote the file, or the disk was full."""
    path = str(tmp_path / "it.ckpt")
    Path(lock_of(path)).write_bytes(content)
    assert save_if_furthest(path, "run", 1, lambda: None, seconds=1)
