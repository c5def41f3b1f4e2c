"""Replace methods of single Lightning objects during a run.

===========================  ========================================================
Replaced                     Reason
===========================  ========================================================
adding samplers to loaders   Lightning has no hook for the choice of the sampler
restoring a checkpoint       all ranks must restore from the file that rank 0 found
registering signal handlers  Lightning's handlers make collective calls
broadcasting SIGTERM         it is a collective call before each batch
===========================  ========================================================

The strategy's ``teardown`` restores them. Classes and modules are not changed. A
warning that is not true of a run can also be hidden during it.

A loader worker may get a pickled copy of a running Trainer, for example with the
``collate_fn`` of a data module that refers to it. So everything here can be pickled, and
the copy has Lightning's own methods.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from .compat import private
from .lightning_tree import RunningStage, refuse_missing

# Adds a sampler to a loader; takes the loader, whether to shuffle, and the stage.
Prepare = Callable[[Any, bool, RunningStage], Any]


class Replacement:
    """A method that replaces another one on one object.

    A copy of the object, also a pickled one, has the original method.
    """

    def __init__(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacing method."""
        return self._method(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _original, (self._owner, self._name)


def _original(owner: object, name: str) -> Any:
    """Return the method of an object's class, bound to it, even while it is replaced."""
    refuse_missing(type(owner), name)
    return partial(getattr(type(owner), name), owner)


def _restore_method(owner: object, name: str) -> None:
    vars(owner).pop(name, None)


def _show_warning(hiding_filter: Any) -> None:
    with suppress(ValueError):  # the user has reset all filters
        warnings.filters.remove(hiding_filter)  # type: ignore[attr-defined]


class ReplacedMethods:
    """Methods that are replaced on single objects, and restored together."""

    def __init__(self) -> None:
        # What undoes each change of the current run. Partials, since closures cannot be pickled.
        self._undo: list[partial[None]] = []

    def replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of one object.

        Raises:
            ImportError: the installed Lightning does not have the method.
        """
        refuse_missing(type(owner), name)
        setattr(owner, name, Replacement(owner, name, method))
        self._undo.append(partial(_restore_method, owner, name))

    def undo_all(self) -> None:
        """Restore the methods of all objects, and show hidden warnings again."""
        while self._undo:
            self._undo.pop()()

    def hide_warning(self, message: str) -> None:
        """Hide the warnings that match a regular expression, until the run ends.

        Unlike ``catch_warnings``, this does not undo other changes of the filters.
        """
        warnings.filterwarnings("ignore", message)
        self._undo.append(partial(_show_warning, warnings.filters[0]))

    def prepare_loaders(
        self, trainer: Any, by: Callable[[Prepare, Any, bool, RunningStage], Any]
    ) -> None:
        """Make Lightning call ``by`` to add samplers to loaders.

        ``by`` gets Lightning's own method. Lightning chooses the sampler in a private
        method, without a hook.
        """
        connector = private(trainer, "_data_connector")
        original = _original(connector, "_prepare_dataloader")

        def as_lightning(loader: Any, shuffle: bool, stage: RunningStage) -> Any:
            return original(loader, shuffle=shuffle, mode=stage)

        def prepare(dataloader: Any, shuffle: bool, mode: RunningStage) -> Any:
            return by(as_lightning, dataloader, shuffle, mode)

        self.replace(connector, "_prepare_dataloader", prepare)

    def restore_checkpoint_by(self, trainer: Any, restore: Callable[..., None]) -> None:
        """Make Lightning call ``restore`` for model and callbacks.

        ``restore`` gets Lightning's own method and its arguments.
        """
        connector = private(trainer, "_checkpoint_connector")
        original = _original(connector, "_restore_modules_and_callbacks")
        self.replace(connector, "_restore_modules_and_callbacks", partial(restore, original))

    def leave_signals_to_us(self, trainer: Any) -> None:
        """Leave signals to our own handlers.

        Lightning then makes no collective calls on a signal or before each batch, and
        has no handlers to restore after the run, among which would be ``faulthandler``'s.
        """
        connector = private(trainer, "_signal_connector")

        def register() -> None:
            connector.received_sigterm = False

        self.replace(connector, "register_signal_handlers", register)
        if hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
            # Not in Lightning 2.5.0.
            self.replace(
                trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda *args: None
            )
