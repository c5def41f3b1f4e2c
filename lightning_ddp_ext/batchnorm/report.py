"""What a conversion has done, in one line and in a table."""

from __future__ import annotations

from collections import Counter

from lightning_ddp_ext.batchnorm.conversion import Conversion


def summary(conversion: Conversion) -> str:
    """One line, for people who trust it.

    >>> import torch
    >>> from lightning_ddp_ext.batchnorm.conversion import convert
    >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4))
    >>> summary(convert(model, exclude="0"))
    'SyncBatchNorm: 1 of 2 layers, statistics over 1 rank; not: 1 in exclude'
    """
    verdicts, ranks = conversion.verdicts, conversion.exchange.world_size
    if not verdicts:
        return "SyncBatchNorm: the model has no BatchNorm layers"
    over = f"statistics over {ranks} rank{'' if ranks == 1 else 's'}"
    line = f"SyncBatchNorm: {len(conversion.converted)} of {len(verdicts)} layers, {over}"
    reasons = Counter(verdict.why_not for verdict in verdicts if verdict.why_not)
    left_out = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return f"{line}; not: {left_out}" if left_out else line


def table(conversion: Conversion) -> str:
    """A line for each layer: its name, its type, and whether it has been converted or why not.

    Drawn by rich where that is installed.
    """
    rows = [(verdict.name, verdict.kind, verdict.why_not or "converted") for verdict in conversion.verdicts]
    try:
        return _drawn(rows)
    except ImportError:
        return "\n".join("  ".join(row) for row in rows)


def _drawn(rows: list[tuple[str, str, str]]) -> str:
    from rich.console import Console
    from rich.table import Table

    drawing = Table("layer", "type", "synchronised")
    for row in rows:
        drawing.add_row(*row)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(drawing)
    return capture.get().rstrip()
