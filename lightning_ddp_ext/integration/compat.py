"""Every private attribute of Lightning's objects that the data path reads, and every method that is replaced.

While ``DDPExtStrategy`` works, four methods of Lightning's are replaced, each on one object and until ``teardown``:

- ``trainer._data_connector._prepare_dataloader``: Lightning chooses a sampler there, and asks nobody.
- ``trainer._checkpoint_connector._restore_modules_and_callbacks``: each rank looks up
  ``ckpt_path="last"`` on its own disk.
- ``trainer._signal_connector._sigterm_notifier_fn``: it calls a collective in a signal handler.
- ``trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor``: it calls a collective before each batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .lightning_tree import Loop, refuse_missing


class ReplacedMethods:
    """Methods that are replaced on single objects, and put back together."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str]] = []

    def replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of one object.

        Raises:
            ImportError: the installed Lightning has no such method.
        """
        refuse_missing(type(owner), name)
        setattr(owner, name, method)
        self._replaced.append((owner, name))

    def put_back(self) -> None:
        """Give all objects their own methods back."""
        while self._replaced:
            owner, name = self._replaced.pop()
            vars(owner).pop(name, None)


def combined_loader_of(loop: Any) -> Any:
    """The loaders that a loop reads, combined; ``None`` before it has them. No public name leads to their mode."""
    return None if loop is None else _read(loop, "_combined_loader")


def mode_of(combined: Any) -> str:
    """How a combined loader combines."""
    mode: str = _read(combined, "_mode")
    return mode


def combined_iterator_of(loop: Any) -> Any:
    """The iterator over combined loaders that a loop reads now; another one each epoch."""
    combined = combined_loader_of(loop)
    return None if combined is None else _read(combined, "_iterator")


def iterators_of(loop: Any) -> list[Any]:
    """The iterators that a loop itself reads now, as opposed to those of somebody who looks at a batch."""
    iterator = combined_iterator_of(loop)
    return [] if iterator is None else list(iterator.iterators)


def fetcher_of(loop: Any) -> Any:
    """What fetches batches for a loop: its attribute ``length`` says which batch is the last."""
    return _read(loop, "_data_fetcher")


def is_read_in_step(loop: Any) -> bool:
    """Whether steps of a loop take ``dataloader_iter``, and so ask for their batches themselves."""
    return type(fetcher_of(loop)).__name__ == "_DataLoaderIterDataFetcher"


def active_loop_of(trainer: Any) -> Any:
    """The loop that runs: of training, or of an evaluation; ``None`` if no loop does."""
    return _read(trainer, "_active_loop")


def results_of(trainer: Any) -> dict[str, Any]:
    """What ``self.log`` has collected in the loop that runs, by key."""
    results: dict[str, Any] = _read(trainer, "_results")
    return results


def validation_interval_of(trainer: Any) -> float | None:
    """Seconds between two validations, where the clock decides; older versions of Lightning have no such interval."""
    interval: float | None = getattr(trainer, "_val_check_time_interval", None)
    return interval


def last_validation_of(trainer: Any) -> float | None:
    """When the last validation ended, or training began; ``None`` before that."""
    moment: float | None = getattr(trainer, "_last_val_time", None)
    return moment


def set_last_validation(trainer: Any, moment: float) -> None:
    """Have Lightning believe that the last validation ended then."""
    trainer._last_val_time = moment


def end_restart(fit_loop: Any) -> None:
    """Have a fit loop go on as one that was not restarted.

    Its own property is overridden by one that says that it restarts whenever there is ``max_steps``.
    """
    refuse_missing(Loop, "restarting")
    Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]


def end_epoch_after(trainer: Any, batches: int) -> None:
    """Have Lightning take the batch with this number for the epoch's last one, as it does where it knows no length."""
    fetcher = fetcher_of(trainer.fit_loop)
    if fetcher.length is not None:
        fetcher.length = batches
    if isinstance(trainer.val_check_interval, float) and trainer.val_check_interval == 1.0:
        trainer.val_check_batch = math.inf  # validate after the last batch, whatever its number


def _read(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        refuse_missing(type(owner), name)
    return getattr(owner, name)
