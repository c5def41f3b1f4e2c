"""Which commands are there, and with which status do they end?"""

from __future__ import annotations

from typing import Annotated

import typer

from lightning_ddp_ext.cli import cleaning, inspection, verification
from lightning_ddp_ext.cli.output import finish

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
checkpoint = typer.Typer(no_args_is_help=True)
app.add_typer(checkpoint, name="checkpoint", help="Look at checkpoint files, and clear up after killed saves.")

_Path = Annotated[str, typer.Argument(metavar="PATH", help="A file, or URL.", show_default=False)]
_Directory = Annotated[str, typer.Argument(metavar="DIR", help="Where checkpoints are saved.", show_default=False)]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else; sizes are bytes.")]
_Paths = Annotated[list[str], typer.Argument(metavar="PATH...", help="Files, or URLs.", show_default=False)]
_Yes = Annotated[bool, typer.Option("--yes", help="Remove them.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        from lightning_ddp_ext import __version__

        typer.echo(f"lightning-ddp-ext {__version__}")
        raise typer.Exit


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Tools of lightning-ddp-ext, for use without a training script."""


@app.command()
def env(json: _Json = False) -> None:
    """Show versions, devices, interfaces, and what the launcher's variables mean: what a bug report needs.

    Ends with status 1 if variables contradict one another.
    """
    from lightning_ddp_ext.cli import environment  # imports torch

    finish(environment.describe(), as_json=json)


@app.command("test")
def check_ranks(
    devices: Annotated[int, typer.Option(help="Ranks to start here, where no launcher starts them.")] = 2,
    accelerator: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "cpu",
    init_method: Annotated[str | None, typer.Option(help="Where the ranks meet, as in code.")] = None,
    json: _Json = False,
) -> None:
    """Let the ranks of this launcher meet, reduce, save, verify and restore; run it as you would run a script.

    Rank 0 prints a table. Ends with status 0 if all is well, on every rank.
    """
    from lightning_ddp_ext.cli import self_test  # imports Lightning

    report = self_test.run(devices=devices, accelerator=accelerator, init_method=init_method)
    if report is not None:
        finish(report, as_json=json)


@checkpoint.command()
def inspect(path: _Path, json: _Json = False) -> None:
    """List every tensor of a checkpoint without loading it: key, shape, dtype, size.

    Nothing that the file holds is run. Ends with status 1 if its tensors cannot be listed.
    """
    finish(inspection.inspect(path), as_json=json)


@checkpoint.command()
def verify(paths: _Paths, json: _Json = False) -> None:
    """Check every byte of checkpoints that has a checksum, and name the tensors that are damaged.

    Ends with status 0 if all files are whole, 1 if one is damaged, cut off, missing or no checkpoint, and else 3 if one
    has no checksums.
    """
    finish(*(verification.verify(path) for path in paths), as_json=json)


@checkpoint.command()
def clean(directory: _Directory, yes: _Yes = False, json: _Json = False) -> None:
    """List what killed saves have left in a directory; with --yes, remove it.

    What is being written right now is left alone, and so is what is younger than an hour.
    """
    finish(cleaning.clean(directory, remove=yes), as_json=json)
