"""Verify checkpoint files."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.checkpoint.location import locate, on_local_disk
from lightning_ddp_ext.cli.output import print_error, print_line
from lightning_ddp_ext.errors import CheckpointError


def verify(paths: Sequence[str]) -> int:
    """Check files or URLs against their checksums, and return the exit status.

    It is 0 if all of them are intact. Nothing is unpickled.
    """
    are_intact = [_verify(path) for path in paths]
    return 0 if all(are_intact) else 1


def _verify(path: str) -> bool:
    """Print the finding about a file, and return whether it is intact."""
    try:
        archive = check(path)
    except (CheckpointError, OSError) as error:
        print_error(error)
        return False
    finding = (
        f"is intact: {len(archive.records)} records match their checksums"
        if archive.has_checksums
        else "lacks checksums for some or all records, so not all damage can be detected"
    )
    print_line(f"{path} {finding}")
    return archive.has_checksums


def check(path: str) -> Archive:
    """Check the records of a file or URL that have a checksum.

    Raises:
        CheckpointError: the file is damaged, missing or cannot be read.
    """
    with on_local_disk(locate(path)) as local, Archive.open(local, path) as archive:
        archive.check()
    return archive
