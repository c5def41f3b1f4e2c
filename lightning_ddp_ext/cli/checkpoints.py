"""Verify checkpoint files, and remove temporary files that killed saves left behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.checkpoint.atomic_file import find_leftovers, remove_leftovers
from lightning_ddp_ext.checkpoint.location import locate, on_local_disk
from lightning_ddp_ext.cli.output import fail, print_line, size_text
from lightning_ddp_ext.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)


def verify(paths: Sequence[str], *, as_json: bool) -> int:
    """Check files or URLs against their checksums, and return the exit status.

    Records without a checksum are not checked, and nothing is unpickled.
    """
    found = [check(path) for path in paths]
    if as_json:
        print(json.dumps(found[0] if len(found) == 1 else {"files": found}))
    else:
        for facts in found:
            _show(facts)
    if any(facts["whole"] is False for facts in found):
        return 1
    if any(facts["error"] for facts in found):
        return 4
    return 0 if all(facts["whole"] for facts in found) else 3


def check(path: str) -> dict[str, Any]:
    """Return facts about a file.

    ``whole`` is ``None`` if unknown; ``error`` is a message or ``None``.
    """
    facts: dict[str, Any] = {"path": path, "whole": None, "damaged": [], "error": None}
    try:
        with on_local_disk(locate(path)) as local:
            archive = Archive.open(local, path)
            archive.check()
    except (DamagedCheckpointError, CheckpointNotFoundError) as error:
        return {
            **facts,
            "whole": False,
            "damaged": list(getattr(error, "damaged", ())),
            "error": str(error),
        }
    except (CheckpointError, OSError) as error:
        return {**facts, "error": str(error)}
    facts["whole"] = archive.has_checksums or None
    return {**facts, "file_bytes": archive.size, "records": len(archive.records)}


def _show(facts: dict[str, Any]) -> None:
    if facts["error"] is not None:
        fail(facts["error"])
    elif facts["whole"]:
        print_line(f"{facts['path']} is intact: {facts['records']} records match their checksums")
    else:
        print_line(
            f"{facts['path']} lacks checksums for some or all records, so not all damage can be"
            " detected"
        )


def clean(directory: str, *, remove: bool) -> int:
    """List this user's temporary files, and return the exit status.

    With ``remove``, first delete those over an hour old.
    """
    try:
        removed = remove_leftovers(Path(directory)) if remove else []
        left = find_leftovers(Path(directory))
    except OSError as error:
        reason = error.strerror or error
        return fail(
            f"cannot clean {directory}: {reason}; pass the local directory that contains the"
            " checkpoints"
        )
    for each in removed:
        print_line(f"{each.path} ({size_text(each.size)}) was removed")
    for each in left:
        why = "was written less than an hour ago, so it is kept"
        if each.is_left_behind:
            why = "was left behind by a killed save; pass --yes to remove it"
        print_line(f"{each.path} ({size_text(each.size)}) {why}")
    if not removed and not left:
        print_line(f"nothing to clean in {directory}: it has no files left by killed saves")
    return 0
