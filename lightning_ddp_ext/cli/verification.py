"""Is this checkpoint file what was written?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from lightning_ddp_ext.checkpoint.load import damage_error, read
from lightning_ddp_ext.checkpoint.location import locate, on_local_disk
from lightning_ddp_ext.checkpoint.map_location import placement
from lightning_ddp_ext.checkpoint.structure import names_by_record
from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record, find_damage, open_archive, threads_for
from lightning_ddp_ext.cli.output import Report, add_row, count_text, size_text, table
from lightning_ddp_ext.errors import CheckpointError, UnsafeCheckpointError


def verify(path: str) -> Report:
    """Check each record that has a checksum, on all cores; a file without is unpickled, as far as that is safe.

    Args:
        path: of a local file, or a URL.
    """
    try:
        with on_local_disk(locate(path)) as local:
            return _checked(open_archive(local, path))
    except CheckpointError as error:
        return Report({"path": path, "whole": False}, str(error))
    except OSError as error:
        return Report({"path": path, "whole": None}, f"checkpoint {path} cannot be read: {error.strerror or error}")


def _checked(archive: Archive) -> Report:
    damaged = find_damage(archive, archive.records or (), threads=threads_for(1))
    if damaged:
        return _damage_report(archive, damaged)
    if not archive.has_checksums:
        return _without_checksums(archive)
    number = count_text(len(archive.records or ()), "record")
    sentence = f"{archive.name} is whole: {number}, {size_text(archive.size)}, with the checksums that were written"
    return Report(_facts(archive, whole=True), parts=[sentence])


def _without_checksums(archive: Archive) -> Report:
    """Not known to be whole; damage to the skeleton, or a missing end, shows when it is unpickled."""
    try:
        read(archive, placement(None), weights_only=True)
        done = "it could be unpickled"
    except UnsafeCheckpointError:
        done = "it was not unpickled, because that could run code"
    what = "has no checksums"
    if archive.records is None:
        what += " (torch wrote it before version 1.6, or in the format of that time)"
    sentence = f"{archive.name} {what}, so altered numbers cannot be told from right ones; {done}"
    return Report(_facts(archive, whole=None), parts=[sentence], is_undecided=True)


def _damage_report(archive: Archive, damaged: Sequence[Record]) -> Report:
    names = names_by_record(archive, damaged)
    rows: list[dict[str, Any]] = [
        {"record": record.name, "offset": record.offset, "size": record.size, "tensors": names[record.name]}
        for record in damaged
    ]
    facts = {**_facts(archive, whole=False), "damaged": rows}
    return Report(facts, str(damage_error(archive, damaged)), [_damage_table(rows)])


def _damage_table(rows: Sequence[dict[str, Any]]) -> Table:
    result = table("damaged record", "at byte", "size", "tensors", numbers=["at byte", "size"])
    for row in rows:
        add_row(result, row["record"], str(row["offset"]), size_text(row["size"]), ", ".join(row["tensors"]) or "?")
    return result


def _facts(archive: Archive, *, whole: bool | None) -> dict[str, Any]:
    records = archive.records
    return {
        "path": archive.name,
        "file_bytes": archive.size,
        "whole": whole,
        "records": None if records is None else len(records),
        "damaged": [],
        "without_checksum": None if records is None else [record.name for record in records if not record.has_crc],
    }
