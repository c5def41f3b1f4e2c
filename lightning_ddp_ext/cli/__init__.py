"""The command ``lightning-ddp-ext`` (extra ``cli``): is this machine ready, and is a checkpoint whole?"""

from __future__ import annotations

import sys

_LIBRARIES = ("rich", "typer")


def main() -> None:
    """Run the command with the process's own arguments, and end the process.

    Raises:
        SystemExit: status 0: all is well; 1: a file or directory is not what it should be; 2: the command was not
            understood, or the libraries of the extra ``cli`` are not installed.
    """
    try:
        from lightning_ddp_ext.cli.app import app
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _LIBRARIES:
            raise
        sys.stderr.write(
            f"lightning-ddp-ext needs {library}, which is not installed; run pip install 'lightning-ddp-ext[cli]'\n"
        )
        sys.exit(2)
    app(prog_name="lightning-ddp-ext")
