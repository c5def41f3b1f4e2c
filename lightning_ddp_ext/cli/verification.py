"""Is this checkpoint file what was written?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_ddp_ext.checkpoint.load import damage_error
from lightning_ddp_ext.checkpoint.structure import names_by_record
from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record, find_damage
from lightning_ddp_ext.cli.output import Report, add_row, count_text, report_on_file, size_text, table


def verify(path: str) -> Report:
    """Check each record that has a checksum; nothing is unpickled.

    Args:
        path: of a local file, or a URL.
    """
    return report_on_file(path, _checked, {"path": path, "whole": False})


def _checked(archive: Archive) -> Report:
    damaged = find_damage(archive, archive.records)
    if damaged:
        return _damage_report(archive, damaged)
    if not archive.has_checksums:
        format_ = "" if archive.records else " (torch wrote it before version 1.6, or in the format of that time)"
        sentence = f"{archive.name} has no checksums{format_}, so altered numbers cannot be told from right ones"
        return Report(_facts(archive, whole=None), parts=[sentence], is_undecided=True)
    number = count_text(len(archive.records), "record")
    sentence = f"{archive.name} is whole: {number}, {size_text(archive.size)}, with the checksums that were written"
    return Report(_facts(archive, whole=True), parts=[sentence])


def _damage_report(archive: Archive, damaged: Sequence[Record]) -> Report:
    names = names_by_record(archive, damaged)
    rows: list[dict[str, Any]] = []
    listed = table("damaged record", "at byte", "size", "tensors", numbers=["at byte", "size"])
    for record in damaged:
        tensors = names[record.name]
        rows.append({"record": record.name, "offset": record.offset, "size": record.size, "tensors": tensors})
        add_row(listed, record.name, str(record.offset), size_text(record.size), ", ".join(tensors) or "?")
    facts = {**_facts(archive, whole=False), "damaged": rows}
    return Report(facts, str(damage_error(archive, damaged)), [listed])


def _facts(archive: Archive, *, whole: bool | None) -> dict[str, Any]:
    return {
        "path": archive.name,
        "file_bytes": archive.size,
        "whole": whole,
        "records": len(archive.records),
        "damaged": [],
        "without_checksum": [record.name for record in archive.records if not record.has_crc],
    }
