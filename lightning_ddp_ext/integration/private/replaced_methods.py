"""Replace methods of single Lightning objects during a run.

===========================  ========================================================
Replaced                     Reason
===========================  ========================================================
adding samplers to loaders   Lightning has no hook for the choice of the sampler
restoring a checkpoint       all ranks must restore from the file that rank 0 found
registering signal handlers  Lightning's handlers make collective calls
broadcasting SIGTERM         it is a collective call before each batch
===========================  ========================================================

Classes and modules are not changed. A warning of Lightning's that is not true of a run
can also be hidden. The strategy's ``teardown`` undoes both.

A loader worker may get a pickled copy of a running Trainer, for example with the
``collate_fn`` of a data module that refers to it. The copy has Lightning's own methods:
a :class:`Replacement` is copied as the original, and :class:`ReplacedMethods` as one
that has nothing to undo.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from .compat import private
from .lightning_tree import RunningStage, refuse_missing

# Lightning's method that adds a sampler to a loader if it needs one. It takes the loader,
# whether to shuffle, and the stage, and returns the loader that the Trainer reads.
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


class ReplacedMethods:
    """Methods that are replaced on single objects, and restored together."""

    def __init__(self) -> None:
        self._undo = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, in which no method is replaced."""
        return {"_undo": ExitStack()}

    def undo_all(self) -> None:
        """Restore the methods of all objects, and show hidden warnings again."""
        self._undo.close()

    def replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of one object.

        Raises:
            ImportError: the installed Lightning does not have the method.
        """
        refuse_missing(type(owner), name)
        setattr(owner, name, Replacement(owner, name, method))
        self._undo.callback(vars(owner).pop, name, None)

    def _wrap(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Replace a method by one that gets the original, followed by its arguments."""
        self.replace(owner, name, partial(method, _original(owner, name)))

    def prepare_loaders(self, trainer: Any, prepare: Callable[..., object]) -> None:
        """Make Lightning call ``prepare`` for each loader, to add a sampler to it.

        ``prepare`` gets Lightning's own method, see ``Prepare``, and its arguments.
        """
        self._wrap(private(trainer, "_data_connector"), "_prepare_dataloader", prepare)

    def restore_checkpoint_by(self, trainer: Any, restore: Callable[..., None]) -> None:
        """Make Lightning call ``restore`` for model and callbacks.

        ``restore`` gets Lightning's own method and its arguments.
        """
        connector = private(trainer, "_checkpoint_connector")
        self._wrap(connector, "_restore_modules_and_callbacks", restore)

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

    def hide_warning(self, message: str) -> None:
        """Hide the warnings that match a regular expression.

        Unlike ``catch_warnings``, this does not undo other changes of the filters.
        """
        warnings.filterwarnings("ignore", message)
        self._undo.callback(_show_warning, warnings.filters[0])


def _show_warning(hiding_filter: Any) -> None:
    with suppress(ValueError):  # the user has reset all filters
        warnings.filters.remove(hiding_filter)  # type: ignore[attr-defined]
