"""Define the command ``lightning-ddp-ext``.

Its subcommands describe this machine and test its ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lightning_ddp_ext import __version__
from lightning_ddp_ext.cli.environment import env
from lightning_ddp_ext.cli.self_test import run_self_test


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments``, by default those of this process, and exit.

    Raises:
        SystemExit: status 0: success; 1: invalid variables, or failed ranks; 2: wrong
            usage.
    """
    options = vars(_parser().parse_args(arguments))
    run = options.pop("run")
    sys.exit(run(**options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lightning-ddp-ext", description="Tools for runs with lightning-ddp-ext."
    )
    parser.add_argument("--version", action="version", version=f"lightning-ddp-ext {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add(
        commands,
        "env",
        env,
        "show versions, devices, interfaces, and the rank from the launcher's variables",
    )

    test_parser = _add(
        commands,
        "test",
        run_self_test,
        "test that ranks can connect, reduce, save, verify and restore",
    )
    test_parser.add_argument(
        "--devices", type=int, default=2, help="ranks to start, unless a launcher does (default: 2)"
    )
    test_parser.add_argument("--accelerator", default="cpu", help="auto, cpu or gpu (default: cpu)")
    test_parser.add_argument("--init-method", help="init_method of the strategy")
    return parser


def _add(commands: Any, name: str, run: Any, description: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=description, description=description
    )
    parser.set_defaults(run=run)
    return parser
