"""Send a checkpoint that rank 0 can read to all other ranks: a skeleton without tensors, then their memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_ddp_ext.checkpoint.collectives import Ranks
from lightning_ddp_ext.checkpoint.load import LoadOptions, errors_explained, load, refuse_damage
from lightning_ddp_ext.checkpoint.map_location import placement
from lightning_ddp_ext.checkpoint.skeleton import bytes_of, identity_of, join, split
from lightning_ddp_ext.checkpoint.zip_crc import Archive
from lightning_ddp_ext.errors import CheckpointError

# Bytes: small tensors travel together up to this size.
_TOGETHER = 4 << 20


def broadcast(archive: Archive | None, ranks: Ranks, options: LoadOptions, *, name: str) -> Any:
    """Read the checkpoint on rank 0 and give it to every rank. Collective: every rank must call it.

    Rank 0 checks what it sends while it sends it.

    Args:
        archive: the file, on rank 0 alone.
        ranks: who reads.
        options: how.
        name: what the user calls the file.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """

    def take_apart() -> tuple[Any, list[UntypedStorage]]:
        return (None, []) if archive is None else _take_apart(archive, options)

    manifest, storages = ranks.on_every_rank(take_apart, f"reading {name}")
    skeleton, pieces = ranks.from_rank_zero(manifest)
    if archive is None:
        storages = [UntypedStorage(size) for size, _ in pieces]
    check = None
    with ThreadPoolExecutor(1, thread_name_prefix="ddpx-verify") as pool:
        if archive is not None and options.verify:
            check = pool.submit(refuse_damage, archive, archive.tensor_data)
        send([bytes_of(storage) for storage in storages], ranks)

    def put_together() -> Any:
        if check is not None:
            check.result()
        place = placement(options.map_location)
        own = storages if archive is None else [storage.clone() for storage in storages]  # they are in the file
        with errors_explained(name):
            return join(skeleton, [place(storage, device) for storage, (_, device) in zip(own, pieces, strict=True)])

    return ranks.on_every_rank(put_together, f"reading {name}")


def _take_apart(archive: Archive, options: LoadOptions) -> tuple[Any, list[UntypedStorage]]:
    """What other ranks have to know before the first tensor arrives, and the memory of tensors, in the file.

    They know the skeleton, and for each piece of memory its size in bytes and the device that it was saved from.
    """
    if options.verify:
        refuse_damage(archive, ())  # tensors are checked while they are sent
    devices: dict[tuple[str, int, int], str] = {}

    def noted(storage: UntypedStorage, location: str) -> UntypedStorage:
        devices[identity_of(storage)] = location
        return storage

    content = load(archive, noted, options.weights_only, mmap=True)
    try:
        skeleton, storages = split(content)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {archive.name} cannot be sent to other ranks: {type(error).__name__}: {error}; put it where "
            "every rank sees it"
        ) from error
    pieces = [(storage.nbytes(), devices.get(identity_of(storage), "cpu")) for storage in storages]
    return (skeleton, pieces), storages


def send(pieces: list[Tensor], ranks: Ranks) -> None:
    """Broadcast rank 0's bytes into those of the other ranks. Collective."""
    for group in _groups([piece for piece in pieces if piece.numel()]):
        joined = torch.cat(group) if len(group) > 1 else group[0]
        ranks.broadcast(joined)
        if len(group) > 1 and ranks.rank != 0:
            for piece, arrived in zip(group, joined.split([piece.numel() for piece in group]), strict=True):
                piece.copy_(arrived)


def _groups(pieces: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that travel together, because they are small."""
    group: list[Tensor] = []
    for piece in pieces:
        if group and sum(each.numel() for each in (*group, piece)) > _TOGETHER:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
