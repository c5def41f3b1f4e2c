"""Send a checkpoint that rank 0 can read to all other ranks: a skeleton without tensors, then their memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_ddp_ext.checkpoint.collectives import Ranks
from lightning_ddp_ext.checkpoint.load import damage_error, errors_explained, load, refuse_damage
from lightning_ddp_ext.checkpoint.map_location import Placement
from lightning_ddp_ext.checkpoint.skeleton import bytes_of, identity_of, join, split
from lightning_ddp_ext.checkpoint.zip_crc import Archive, find_damage, threads_for
from lightning_ddp_ext.errors import CheckpointError

# Small tensors travel together, large ones in pieces: both keep a broadcast near the size at which it is fastest.
_TOGETHER = 4 << 20
_PIECE = 64 << 20


@dataclass(frozen=True)
class Manifest:
    """What a rank has to know of the checkpoint before the first tensor arrives.

    Attributes:
        skeleton: the pickled checkpoint without the memory of tensors.
        sizes: bytes of each piece of memory.
        devices: the device that each piece was saved from.
    """

    skeleton: bytes
    sizes: list[int]
    devices: list[str]


def broadcast(
    archive: Archive | None, ranks: Ranks, place: Placement, *, name: str, weights_only: bool | None, verify: bool
) -> Any:
    """Read the checkpoint on rank 0 and give it to every rank. Collective: every rank must call it.

    Rank 0 checks what it sends while it sends it.

    Args:
        archive: the file, on rank 0 alone.
        ranks: who reads.
        place: puts each tensor's memory on its device.
        name: what the user calls the file.
        weights_only: as for ``torch.load``.
        verify: whether to check.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """

    def read() -> tuple[Manifest | None, list[UntypedStorage]]:
        return (None, []) if archive is None else _taken_apart(archive, weights_only, verify)

    manifest, storages = ranks.on_every_rank(read, f"reading {name}")
    manifest = ranks.from_rank_zero(manifest)
    if archive is None:
        storages = [UntypedStorage(size) for size in manifest.sizes]
    damaged = None
    with ThreadPoolExecutor(1, thread_name_prefix="ddpx-verify") as pool:
        if archive is not None and verify:
            damaged = pool.submit(find_damage, archive, archive.tensor_data, threads=threads_for(2))
        send([bytes_of(storage) for storage in storages], ranks)

    def put_together() -> Any:
        if archive is not None and damaged is not None and damaged.result():
            raise damage_error(archive, damaged.result())
        own = storages if archive is None else [storage.clone() for storage in storages]  # they are in the file
        placed = [place(storage, device) for storage, device in zip(own, manifest.devices, strict=True)]
        with errors_explained(name):
            return join(manifest.skeleton, placed)

    return ranks.on_every_rank(put_together, f"reading {name}")


def _taken_apart(archive: Archive, weights_only: bool | None, verify: bool) -> tuple[Manifest, list[UntypedStorage]]:
    if verify:
        refuse_damage(archive, ())  # tensors are checked while they are sent
    devices: dict[tuple[str, int, int], str] = {}

    def noted(storage: UntypedStorage, location: str) -> UntypedStorage:
        devices[identity_of(storage)] = location
        return storage

    value = load(archive, noted, weights_only, mmap=True)
    try:
        skeleton, storages = split(value)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {archive.name} cannot be sent to other ranks: {type(error).__name__}: {error}; put it where "
            "every rank sees it"
        ) from error
    sizes = [storage.nbytes() for storage in storages]
    return Manifest(skeleton, sizes, [devices.get(identity_of(storage), "cpu") for storage in storages]), storages


def send(pieces: list[Tensor], ranks: Ranks) -> None:
    """Broadcast rank 0's bytes into those of the other ranks. Collective."""
    for group in _groups([piece for piece in pieces if piece.numel()]):
        joined = torch.cat(group) if len(group) > 1 else group[0]
        for part in joined.split(_PIECE):
            ranks.broadcast(part)
        if len(group) > 1 and ranks.rank != 0:
            for piece, arrived in zip(group, joined.split([piece.numel() for piece in group]), strict=True):
                piece.copy_(arrived)


def _groups(pieces: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that travel together, because they are small."""
    group: list[Tensor] = []
    size = 0
    for piece in pieces:
        if group and size + piece.numel() > _TOGETHER:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.numel()
    if group:
        yield group
