"""The version of this package: its release, or the commit it was installed from."""

from importlib import metadata

try:
    __version__ = metadata.version("lightning-ddp-ext")
except metadata.PackageNotFoundError:  # a copy of the source files that was not installed
    __version__ = "0+unknown"
