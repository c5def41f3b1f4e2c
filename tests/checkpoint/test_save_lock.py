"""Of the ranks that survive, the one that is furthest saves, and never two at once."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from lightning_ddp_ext.checkpoint.save_lock import has_saved, lock_of, save_if_furthest

TO_WAIT = 60.0  # seconds


def test_the_rank_that_is_further_saves(tmp_path: Path) -> None:
    """A rank with fewer batches, or with as many, leaves the file of its run as it is."""
    path = tmp_path / "it.ckpt"

    def offer(content: str, run: str, batches: int) -> tuple[bool, str]:
        save = partial(path.write_text, content)
        return save_if_furthest(str(path), run, batches, save, TO_WAIT), path.read_text()

    assert offer("first", "run", 4) == (True, "first")
    assert offer("as far", "run", 4) == (False, "first")
    assert offer("behind", "run", 3) == (False, "first")
    assert offer("ahead", "run", 5) == (True, "ahead")
    assert not has_saved(str(path), "other")
    assert offer("other run", "other", 1) == (True, "other run")
    assert has_saved(str(path), "other")


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_waits_for_the_save_of_another(fails: bool, tmp_path: Path) -> None:
    """It raises an error if that takes longer than allowed, and then saves only if the other
    one has failed. A third rank waits for it as well, so that two ranks never save at once.
    """
    path = str(tmp_path / "it.ckpt")
    waiting: list[Future[bool]] = []

    def refuse_third() -> None:
        with pytest.raises(TimeoutError, match="did not finish its save within save_deadline"):
            save_if_furthest(path, "run", 4, pytest.fail, 0.0)

    def other_saves() -> None:
        refuse_third()
        waiting.append(pool.submit(save_if_furthest, path, "run", 4, refuse_third, TO_WAIT))
        assert not wait(waiting, timeout=0.5).done
        if fails:
            raise ZeroDivisionError

    with ThreadPoolExecutor() as pool, suppress(ZeroDivisionError):
        assert save_if_furthest(path, "run", 4, other_saves, TO_WAIT)
    assert [each.result() for each in waiting] == [fails]


def test_a_failed_save_leaves_no_lock_file(tmp_path: Path) -> None:
    """Nothing else would remove it, if the checkpoint is in a store."""
    with pytest.raises(ZeroDivisionError):
        save_if_furthest(str(tmp_path / "it.ckpt"), "run", 4, lambda: 1 / 0, TO_WAIT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"run ", b"\xff {", b"run 7x"])
def test_a_lock_file_with_other_content_does_not_prevent_a_save(
    content: bytes, tmp_path: Path
) -> None:
    """A rank killed while it wrote the lock file, or a full disk, leaves such content."""
    path = str(tmp_path / "it.ckpt")
    lock_of(path).write_bytes(content)
    assert save_if_furthest(path, "run", 1, lambda: None, TO_WAIT)
