"""Detect parameter changes outside of the optimiser, and undo an unfinished step.

A momentum encoder, for example, changes frozen parameters before each forward pass. If
code writes into ``parameter.data``, no version counter changes, so contents are also
compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lightning_ddp_ext.checkpoint.recorded_buffers import version_of
from lightning_ddp_ext.checksum import checksum

# A momentum encoder that equals its source at first changes in the second step.
_STEPS_COMPARED_AT_FIRST = 2
_COMPARISON_SHARE = 0.01  # of the time, after these steps


class _Schedule:
    """Chooses the steps that compare contents.

    These are the first two, and later as many as take 1 % of the time.

    Attributes:
        is_due: whether the current step still compares them.
    """

    def __init__(self) -> None:
        self.is_due = False
        self._steps_started = 0
        self._next_comparison = 0.0

    def start_step(self) -> None:
        self._steps_started += 1
        is_early = self._steps_started <= _STEPS_COMPARED_AT_FIRST
        self.is_due = is_early or time.monotonic() >= self._next_comparison

    def end_comparison(self, seconds: float) -> None:
        """Record that the step's comparisons are over, and how long they took."""
        self.is_due = False
        self._next_comparison = time.monotonic() + seconds / _COMPARISON_SHARE


class SavedParameters:
    """The parameters of a module, as they were when the current step started.

    In an epoch, :meth:`start_epoch` is called first. A step of the optimiser then calls
    :meth:`start_step`, :meth:`before_backward` for each batch, and :meth:`end_step`; a
    step without one may call :meth:`record` instead.

    Each step records the versions of trainable parameters. Contents are compared in some
    steps. A parameter whose contents change outside of the optimiser is copied at the
    start of each later step, on its own device.

    Attributes:
        has_finished_step: whether an optimiser step has finished.
        is_in_step: whether a step has started that the optimiser has not finished.
    """

    def __init__(self, module: nn.Module) -> None:
        self.has_finished_step = False
        self.is_in_step = False
        self._module = module
        self._versions: dict[str, tuple[int, int]] = {}  # of trainable parameters
        # Set by `start_epoch`.
        self._parameters: dict[str, nn.Parameter] = {}
        self._frozen: set[str] = set()  # their names
        self._schedule = _Schedule()
        # What comparisons have found.
        self._checksums: dict[str, int] = {}  # at the last comparison
        self._changing: set[str] = set()  # outside of the optimiser
        self._copies: dict[str, Tensor] = {}  # of changing parameters

    def start_epoch(self) -> None:
        """Find the parameters; hooks may have replaced, frozen or unfrozen some."""
        parameters = dict(self._module.named_parameters())
        frozen = {name for name, each in parameters.items() if not each.requires_grad}
        if frozen == self._frozen and _are_same(parameters, self._parameters):
            return
        self._parameters = parameters
        self._frozen = frozen
        self._schedule = _Schedule()
        self._checksums = {}
        self._changing = set()
        self._copies = {}
        self.record()

    def start_step(self) -> None:
        """Record the parameters, before an optimiser step fetches its first batch."""
        self.is_in_step = True
        self._schedule.start_step()
        if self._schedule.is_due:
            # Since the last comparison, the optimiser has changed the others.
            self._find_changing(self._frozen)
        for name in self._changing:
            self._copy(name)
        self.record()

    def before_backward(self) -> None:
        """Find the parameters that this step has changed before its backward pass."""
        if self._schedule.is_due:
            began = time.monotonic()
            # No step of an optimiser lies between this comparison and the last one.
            self._find_changing(self._parameters)
            seconds = time.monotonic() - began
            self._schedule.end_comparison(2 * seconds)  # with that at the start of the step

    @property
    def changes_outside_optimiser(self) -> bool:
        """Whether a parameter is known to change outside of the optimiser."""
        return bool(self._changing)

    def end_step(self) -> None:
        """Record the parameters after the optimiser has changed them."""
        self.is_in_step = False
        self.has_finished_step = True
        self.record()

    def record(self) -> None:
        """Record the versions of trainable parameters.

        :meth:`find_lost` expects these versions. Nothing written into ``data`` changes one.
        """
        self._versions = self._trainable_versions()

    def find_lost(self, *, in_step: bool) -> str | None:
        """Return a parameter that may have changed and was not copied, if any.

        Args:
            in_step: whether the changes of an unfinished step will be undone, so that its
                copied parameters may have changed.

        Returns:
            Its name or a description.
        """
        if not _are_same(dict(self._module.named_parameters()), self._parameters):
            return "a parameter that was added or replaced in this epoch"
        versions = self._trainable_versions()
        for name in self._parameters:
            if in_step and name in self._copies:
                continue
            has_new_version = versions.get(name) != self._versions.get(name)
            if has_new_version or (in_step and self._may_have_changed(name)):
                return name
        return None

    @torch.no_grad()
    def undo_step(self) -> None:
        """Restore the parameters that an unfinished step has changed."""
        for name, copied in self._copies.items():
            self._parameters[name].copy_(copied)

    def _trainable_versions(self) -> dict[str, tuple[int, int]]:
        return {
            name: (version_of(each), each.data_ptr())
            for name, each in self._parameters.items()
            if name not in self._frozen
        }

    def _find_changing(self, names: Iterable[str]) -> None:
        """Compare all parameters, and note those of ``names`` that have changed.

        Without an earlier comparison, none has.
        """
        last = self._checksums
        now = {name: int(checksum(each)) for name, each in self._parameters.items()}
        self._checksums = now
        self._changing.update(name for name in names if name in last and last[name] != now[name])

    def _may_have_changed(self, name: str) -> bool:
        """Whether a parameter may have changed in this step without a new version."""
        if name in self._changing:
            return True
        is_frozen = name in self._frozen
        return is_frozen and self._checksums.get(name) != int(checksum(self._parameters[name]))

    def _copy(self, name: str) -> None:
        if name not in self._copies:
            self._copies[name] = self._parameters[name].detach().clone()
        else:
            self._copies[name].copy_(self._parameters[name].detach())


def _are_same(first: dict[str, nn.Parameter], second: dict[str, nn.Parameter]) -> bool:
    has_same_names = first.keys() == second.keys()
    return has_same_names and all(each is second[name] for name, each in first.items())
