"""Name our strategy's base class, as the modules of ``data`` call it."""

from .start.devices import RankDevicesStrategy as Host

__all__ = ["Host"]
