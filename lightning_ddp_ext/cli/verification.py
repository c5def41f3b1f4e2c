"""Is this checkpoint file what was written?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from lightning_ddp_ext.checkpoint.collectives import Show
from lightning_ddp_ext.checkpoint.load import damage_error, names_by_record
from lightning_ddp_ext.checkpoint.location import locate, on_local_disk
from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record, find_damage, usable_cores
from lightning_ddp_ext.cli.files import open_file, read_file
from lightning_ddp_ext.cli.output import Report, add_row, count_text, size_text, table
from lightning_ddp_ext.errors import CheckpointError, UnsafeCheckpointError


def verify(path: str, *, progress: Show) -> Report:
    """Check each record that has a checksum, on all cores; what has none is unpickled, as far as that is safe.

    Args:
        path: of a local file, or a URL.
        progress: shows how far it is.
    """
    try:
        with on_local_disk(locate(path)) as local:
            return _checked(open_file(local, path), progress)
    except CheckpointError as error:
        return Report({"path": path, "whole": False}, str(error))
    except OSError as error:
        return Report({"path": path, "whole": None}, f"checkpoint {path} cannot be read: {error.strerror or error}")


def _checked(archive: Archive, progress: Show) -> Report:
    damaged = _damaged(archive, progress)
    unchecked = [record for record in archive.records or () if not record.has_crc]
    if damaged:
        return _damage_report(archive, damaged, unchecked)
    return _whole_report(archive) if archive.has_checksums else _without_checksums(archive, unchecked)


def _damaged(archive: Archive, progress: Show) -> list[Record]:
    records = archive.records or ()
    with progress("checking", sum(record.size for record in records if record.has_crc)) as on_progress:
        return find_damage(archive, records, threads=usable_cores(), on_progress=on_progress)


def _whole_report(archive: Archive) -> Report:
    number = count_text(len(archive.records or ()), "record")
    sentence = f"{archive.name} is whole: {number}, {size_text(archive.size)}, with the checksums that were written"
    return Report(_facts(archive, True, [], []), parts=[sentence])


def _without_checksums(archive: Archive, unchecked: Sequence[Record]) -> Report:
    """Not known to be whole; damage to the skeleton, or a missing end, shows when it is unpickled."""
    try:
        read_file(archive)
        done = "it could be unpickled"
    except UnsafeCheckpointError:
        done = "it was not unpickled, because that could run code"
    what = "has no checksums"
    if archive.records is None:
        what += " (torch wrote it before version 1.6, or in the format of that time)"
    elif len(unchecked) < len(archive.records):
        what = f"has no checksums for {len(unchecked)} of {count_text(len(archive.records), 'record')}"
    sentence = f"{archive.name} {what}, so altered numbers cannot be told from right ones; {done}"
    return Report(_facts(archive, None, [], unchecked), parts=[sentence], is_undecided=True)


def _damage_report(archive: Archive, damaged: Sequence[Record], unchecked: Sequence[Record]) -> Report:
    names = names_by_record(archive, list(damaged))
    rows: list[dict[str, Any]] = [
        {"record": record.name, "offset": record.offset, "size": record.size, "tensors": names[record.name]}
        for record in damaged
    ]
    return Report(_facts(archive, False, rows, unchecked), str(damage_error(archive, damaged)), [_damage_table(rows)])


def _damage_table(rows: Sequence[dict[str, Any]]) -> Table:
    result = table("damaged record", "at byte", "size", "tensors", numbers=["at byte", "size"])
    for row in rows:
        add_row(result, row["record"], str(row["offset"]), size_text(row["size"]), ", ".join(row["tensors"]) or "?")
    return result


def _facts(
    archive: Archive, whole: bool | None, damaged: Sequence[dict[str, Any]], unchecked: Sequence[Record]
) -> dict[str, Any]:
    return {
        "path": archive.name,
        "file_bytes": archive.size,
        "whole": whole,
        "records": None if archive.records is None else len(archive.records),
        "damaged": list(damaged),
        "without_checksum": None if archive.records is None else [record.name for record in unchecked],
    }
