"""Send a checkpoint that rank 0 can read to all other ranks: a skeleton without tensors, then their memory.

Rank 0 checks what it sends while it sends it. Weights are received straight into the model's own memory, where the
caller says which memory that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from lightning_ddp_ext.checkpoint.collectives import Ranks, Show
from lightning_ddp_ext.checkpoint.key_prefixes import weights_of, without_weights
from lightning_ddp_ext.checkpoint.load import damage_error, errors_explained, load, refuse_damage
from lightning_ddp_ext.checkpoint.map_location import Placement
from lightning_ddp_ext.checkpoint.skeleton import identity_of, join, split
from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record, find_damage, usable_cores
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.supervision.rank_zero import rank_zero_for_all, side_by_side

# Gives a rank's own tensors for names of the file's ``state_dict``.
ReceiveInto = Callable[[list[str]], Mapping[str, Tensor]]

# Small tensors travel together, large ones in pieces: both keep a broadcast near the size at which it is fastest.
_TOGETHER = 4 << 20
_PIECE = 64 << 20


@dataclass(frozen=True)
class Weight:
    """A weight of the ``state_dict`` that has a piece of memory for itself."""

    name: str
    dtype: torch.dtype
    shape: torch.Size

    def fits(self, own: Tensor | None) -> bool:
        """Whether its memory can be written straight into that of ``own``."""
        return (
            own is not None
            and own.device.type == "cpu"
            and (own.dtype, own.shape) == (self.dtype, self.shape)
            and own.is_contiguous()
            and not own.is_conj()
            and not own.is_neg()
        )


@dataclass(frozen=True)
class Manifest:
    """What a rank has to know of the checkpoint before the first tensor arrives.

    Attributes:
        skeleton: the pickled checkpoint without the memory of tensors.
        sizes: bytes of each piece of memory.
        devices: the device that each piece was saved from.
        weights: those that may be received in place, by the number of their piece.
    """

    skeleton: bytes
    sizes: list[int]
    devices: list[str]
    weights: dict[int, Weight]


def broadcast(
    archive: Archive | None,
    ranks: Ranks,
    place: Placement,
    *,
    name: str,
    weights_only: bool | None,
    verify: bool,
    receive_into: ReceiveInto | None,
    show: Show,
) -> Any:
    """Read the checkpoint on rank 0 and give it to every rank. Collective: every rank must call it.

    Args:
        archive: the file, on rank 0.
        ranks: who reads.
        place: puts each tensor's memory on its device.
        name: what the user calls the file.
        weights_only: as for ``torch.load``.
        verify: whether to check what is sent.
        receive_into: called on ranks that receive, at most once; ``None`` where weights are more than copied into a
            model, so that they need memory of their own.
        show: shows the progress.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """
    storages: list[UntypedStorage] = []

    def read_manifest() -> Manifest:
        nonlocal storages
        assert archive is not None
        manifest, storages = _read(archive, weights_only, verify)
        return manifest

    def prepare() -> None:
        nonlocal storages
        if ranks.rank != 0:
            storages = _prepared(manifest, receive_into)

    def together(work: Callable[[], Any]) -> Any:
        return side_by_side(work, rank=ranks.rank, gather=ranks.gather, what=f"reading {name}")

    manifest = rank_zero_for_all(
        read_manifest, is_rank_zero=ranks.rank == 0, broadcast=ranks.from_rank_zero, what=f"reading {name}"
    )
    together(prepare)
    with ThreadPoolExecutor(1, thread_name_prefix="ddpx-verify") as pool:
        damaged: Future[list[Record]] | None = None
        if archive is not None and verify:
            damaged = pool.submit(find_damage, archive, archive.tensor_data, threads=max(1, usable_cores() // 2))
        with show("restoring", sum(manifest.sizes)) as on_progress:
            send([_bytes_of(storage) for storage in storages], ranks, on_progress)

        def finish() -> Any:
            if archive is not None and damaged is not None and damaged.result():
                raise damage_error(archive, damaged.result())
            own = _copied(storages, set(manifest.weights) if receive_into else set()) if ranks.rank == 0 else storages
            placed = [place(storage, device) for storage, device in zip(own, manifest.devices, strict=True)]
            with errors_explained(name):
                return join(manifest.skeleton, placed)

        return together(finish)


def _read(archive: Archive, weights_only: bool | None, verify: bool) -> tuple[Manifest, list[UntypedStorage]]:
    if verify:
        refuse_damage(archive, ())  # tensors are checked while they are sent
    devices: dict[tuple[str, int, int], str] = {}

    def noted(storage: UntypedStorage, location: str) -> UntypedStorage:
        devices[identity_of(storage)] = location
        return storage

    value = load(archive, noted, weights_only)
    try:
        skeleton = split(value)
    except Exception as error:
        raise CheckpointError(
            f"checkpoint {archive.name} cannot be sent to other ranks: {type(error).__name__}: {error}; put it where "
            "every rank sees it"
        ) from error
    storages = skeleton.storages
    manifest = Manifest(
        skeleton.pickled,
        [storage.nbytes() for storage in storages],
        [devices.get(identity_of(storage), "cpu") for storage in storages],
        dict(_weights_alone(value, storages)),
    )
    return manifest, storages


def _weights_alone(content: Any, storages: list[UntypedStorage]) -> Iterator[tuple[int, Weight]]:
    """Weights whose memory nothing else in the checkpoint uses; tied ones go by the name of the first."""
    weights = {name: tensor for name, tensor in weights_of(content).items() if _fills_its_storage(tensor)}
    rest = split(without_weights(content, weights.keys())) if weights else None
    elsewhere = {identity_of(storage) for storage in rest.storages} if rest is not None else set()
    by_identity: dict[tuple[str, int, int], list[Weight]] = {}
    for name, tensor in weights.items():
        users = by_identity.setdefault(identity_of(tensor.untyped_storage()), [])
        users.append(Weight(name, tensor.dtype, tensor.shape))
    for number, identity in enumerate(map(identity_of, storages)):
        users = by_identity.get(identity, [])
        if identity not in elsewhere and len({(each.dtype, each.shape) for each in users}) == 1:
            yield number, users[0]


def _fills_its_storage(tensor: Tensor) -> bool:
    """Whether a tensor is its memory from beginning to end, in order, and as it is."""
    return (
        tensor.layout == torch.strided
        and type(tensor) in (Tensor, nn.Parameter)
        and tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _prepared(manifest: Manifest, receive_into: ReceiveInto | None) -> list[UntypedStorage]:
    """Memory for each piece: this rank's own weight where it fits, else some new."""
    weights = manifest.weights
    own = receive_into([weight.name for weight in weights.values()]) if weights and receive_into else {}
    targets = {number: own.get(weight.name) for number, weight in weights.items()}
    return [
        _part_of(target) if (target := targets.get(number)) is not None and weights[number].fits(target)
        else UntypedStorage(size)
        for number, size in enumerate(manifest.sizes)
    ]  # fmt: skip


def _part_of(tensor: Tensor) -> UntypedStorage:
    start = tensor.storage_offset() * tensor.element_size()
    return tensor.untyped_storage()[start : start + tensor.nbytes]  # type: ignore[no-any-return]


def _copied(storages: list[UntypedStorage], but: set[int]) -> list[UntypedStorage]:
    """Memory of this process's own in place of what is mapped from the file."""
    return [storage if number in but else storage.clone() for number, storage in enumerate(storages)]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def send(pieces: list[Tensor], ranks: Ranks, on_progress: Callable[[int], None]) -> None:
    """Broadcast rank 0's bytes into those of the other ranks. Collective."""
    done = 0
    for run in _runs([piece for piece in pieces if piece.numel()]):
        if len(run) > 1:
            joined = torch.cat(run)
            ranks.broadcast(joined)
            for part, arrived in zip(run, joined.split([part.numel() for part in run]), strict=True):
                if ranks.rank != 0:
                    part.copy_(arrived)
            done += joined.numel()
            on_progress(done)
        else:
            for part in run[0].split(_PIECE):
                ranks.broadcast(part)
                done += part.numel()
                on_progress(done)


def _runs(pieces: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that travel together, because they are small."""
    run: list[Tensor] = []
    size = 0
    for piece in pieces:
        if run and size + piece.numel() > _TOGETHER:
            yield run
            run, size = [], 0
        run.append(piece)
        size += piece.numel()
    if run:
        yield run
