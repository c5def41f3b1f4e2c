"""One of the surviving ranks saves: the one that is furthest."""

from pathlib import Path

from lightning_ddp_ext.checkpoint.save_lock import lock_of, save_if_furthest


def test_the_rank_that_is_further_saves(tmp_path: Path) -> None:
    """A rank with fewer batches, or with as many, leaves the file of its run as it is."""
    path = str(tmp_path / "it.ckpt")
    saves = []
    for run, batches, rank in (("a", 4, 1), ("a", 4, 2), ("a", 3, 3), ("a", 5, 4), ("b", 1, 5)):
        save_if_furthest(path, run, batches, lambda rank=rank: saves.append(rank), 1)
    assert saves == [1, 4, 5]


def test_a_lock_file_with_other_content_does_not_prevent_a_save(tmp_path: Path) -> None:
    """A rank was killed while it wrote the file, or the disk was full."""
    path = str(tmp_path / "it.ckpt")
    for content in (b"", b"a", b"a ", b"\xff {", b"a 7x"):
        Path(lock_of(path)).write_bytes(content)
        assert save_if_furthest(path, "a", 1, lambda: None, 1)
