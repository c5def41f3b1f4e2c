"""Send a checkpoint that rank 0 alone can see to all other ranks.

First a parcel: everything in the file but the memory of tensors. Then that, record after record, while rank 0 checks
what it sends; for a weight it goes straight into the model's own, unless somebody wants to look at the file's content
first. In the end each rank unpickles the same objects, on the memory that has arrived.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_ddp_ext.checkpoint.archive import Archive, Record, find_damage, skeleton_bytes
from lightning_ddp_ext.checkpoint.device_map import Placement
from lightning_ddp_ext.checkpoint.foreign import weights_of
from lightning_ddp_ext.checkpoint.memory_file import memory_file
from lightning_ddp_ext.checkpoint.ranks import Ranks, Show
from lightning_ddp_ext.checkpoint.reader import Content, Memory, damage_error, load, read
from lightning_ddp_ext.checkpoint.tensors import fills_its_storage, has_storage, named_tensors
from lightning_ddp_ext.supervision.rank_zero import rank_zero_for_all, side_by_side

# Gives a rank's own tensors for names of the file's ``state_dict``.
ReceiveInto = Callable[[list[str]], Mapping[str, Tensor]]

# Small tensors travel together, large ones in pieces: both keep a broadcast near the size at which it is fastest.
_TOGETHER = 4 << 20
_PIECE = 64 << 20


def nowhere(names: list[str]) -> Mapping[str, Tensor]:
    """Nothing of this rank's own is written into."""
    return {}


@dataclass(frozen=True)
class Weight:
    """A weight of the ``state_dict`` that has a record for itself."""

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
class Parcel:
    """What a rank has to know of the file before the first tensor arrives."""

    archive: Archive
    skeleton: list[tuple[int, bytes]]
    order: list[str | None]
    """The record of each piece of memory, in the order in which unpickling asks for them; ``None``: it is empty."""
    weights: dict[str, Weight]
    """By the names of their records."""

    @property
    def records(self) -> list[Record]:
        """The records that travel, in the file's order; all of an old file is one."""
        if self.archive.records is None:
            return [Record("", 0, self.archive.size, 0)]
        wanted = set(self.order)
        return [record for record in self.archive.tensor_data if record.name in wanted and record.size]


def transfer(
    archive: Archive | None,
    ranks: Ranks,
    *,
    name: str,
    place: Placement,
    weights_only: bool | None,
    verify: bool,
    threads: int,
    receive_into: ReceiveInto,
    show: Show,
) -> Content:
    """Read the checkpoint on rank 0 and give it to every rank. Collective: every rank must call it.

    Args:
        archive: the file, on rank 0.
        ranks: who reads.
        name: what the user calls the file.
        place: what becomes of each tensor's memory.
        weights_only: as ``torch.load`` has it.
        verify: whether to check what is sent.
        threads: how many may check.
        receive_into: called on ranks that receive, at most once.
        show: shows the progress.

    Raises:
        CheckpointError: one of its kinds, the same on every rank.
    """
    own: Content | None = None
    memory: Mapping[str, Tensor] = {}

    def pack() -> Parcel:
        nonlocal own
        assert archive is not None
        own = read(archive, place, weights_only=weights_only, verify=verify)
        return packed(own)

    def prepare() -> None:
        nonlocal memory
        memory = _prepared(parcel, receive_into) if own is None else _sent_from(parcel)

    def together(work: Callable[[], Any]) -> Any:
        return side_by_side(work, rank=ranks.rank, gather=ranks.gather, what=f"reading {name}")

    parcel = rank_zero_for_all(
        pack, is_rank_zero=ranks.rank == 0, broadcast=ranks.from_rank_zero, what=f"reading {name}"
    )
    together(prepare)
    with ThreadPoolExecutor(1, thread_name_prefix="ddpx-verify") as pool:
        checked: Future[list[Record]] | None = None
        if own is not None and verify and parcel.archive.records is not None:
            checked = pool.submit(find_damage, parcel.archive, parcel.records, threads=threads)
        with show("restoring", sum(record.size for record in parcel.records)) as on_progress:
            stream(parcel.records, memory, ranks, on_progress)

        def finish() -> Content:
            if own is None:
                return _unpacked(parcel, memory, place, weights_only)
            if checked is not None and (damaged := checked.result()):
                raise damage_error(parcel.archive, own.names_of(damaged))
            return own

        content: Content = together(finish)
    return content


# The parcel.


def packed(content: Content) -> Parcel:
    """What the other ranks need of it before its tensors."""
    if content.archive.records is None:
        return Parcel(content.archive, [], [], {})
    order = [None if memory is None else memory.record.name for memory in content.memory]
    return Parcel(content.archive, skeleton_bytes(content.archive), order, dict(_weights_by_record(content)))


def _weights_by_record(content: Content) -> Iterator[tuple[str, Weight]]:
    """Weights whose memory nothing else in the checkpoint uses; tied ones go by the name of the first."""
    uses: dict[int, int] = {}
    for _, tensor in named_tensors(content.value):
        if has_storage(tensor):
            pointer = tensor.untyped_storage().data_ptr()
            uses[pointer] = uses.get(pointer, 0) + 1
    weights: dict[int, list[Weight]] = {}
    for name, tensor in weights_of(content.value).items():
        if tensor.layout == torch.strided and has_storage(tensor) and fills_its_storage(tensor):
            pointer = tensor.untyped_storage().data_ptr()
            weights.setdefault(pointer, []).append(Weight(name, tensor.dtype, tensor.shape))
    for memory in content.memory:
        storage = None if memory is None else memory.alive()
        if memory is None or storage is None:
            continue
        users = weights.get(storage.data_ptr(), [])
        if len(users) == uses.get(storage.data_ptr()) and len({(user.dtype, user.shape) for user in users}) == 1:
            yield memory.record.name, users[0]


# Its arrival.


def _prepared(parcel: Parcel, receive_into: ReceiveInto) -> dict[str, Tensor]:
    """Memory for each record, as bytes, by the records' names: this rank's own weight where it fits, else some new."""
    own = receive_into([weight.name for weight in parcel.weights.values()]) if parcel.weights else {}
    memory = {}
    for record in parcel.records:
        weight = parcel.weights.get(record.name)
        target = own.get(weight.name) if weight is not None else None
        if weight is not None and target is not None and weight.fits(target) and target.nbytes == record.size:
            memory[record.name] = _bytes_of(target)
        else:
            memory[record.name] = torch.empty(record.size, dtype=torch.uint8)
    return memory


def _bytes_of(tensor: Tensor) -> Tensor:
    start, size = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()[start : start + size])


def _unpacked(parcel: Parcel, memory: Mapping[str, Tensor], place: Placement, weights_only: bool | None) -> Content:
    """The checkpoint, unpickled on memory that has its content: from a file of the same size with holes for tensors.

    Not before it has arrived, because there are objects that look at their tensors when they are unpickled.
    """
    archive = parcel.archive
    with memory_file() as (file, path):
        if archive.records is None:
            for piece in memory[""].split(_PIECE):  # Linux takes no more than 2 GiB at once
                file.write(piece.numpy().data)
            return Content(load(archive, place, weights_only, path=path), archive)
        file.truncate(archive.size)
        for offset, content in parcel.skeleton:
            file.seek(offset)
            file.write(content)
        places = _Places(parcel, memory, place)
        return Content(load(archive, places, weights_only, path=path), archive, places.memory)


class _Places:
    """Gives ``torch.load`` the memory that has arrived, piece by piece, in the order in which rank 0 had it."""

    def __init__(self, parcel: Parcel, arrived: Mapping[str, Tensor], place: Placement) -> None:
        self._arrived = arrived
        self._place = place
        self._records = {record.name: record for record in parcel.records}
        self._order = iter(parcel.order)
        self.memory: list[Memory | None] = []

    def __call__(self, storage: UntypedStorage, location: str) -> UntypedStorage:
        name = next(self._order)
        if name is None:
            self.memory.append(None)
            return UntypedStorage(0)  # the one in the file would keep it mapped
        placed = self._place(self._arrived[name].untyped_storage(), location)
        self.memory.append(Memory(self._records[name], location, None, weakref.ref(placed)))
        return placed


# Its way.


def _sent_from(parcel: Parcel) -> dict[str, Tensor]:
    """On rank 0: the bytes of each record, mapped from the file."""
    with open(parcel.archive.path, "rb") as file:
        # Copy on write, though nobody writes: torch would warn of memory that it may only read.
        content = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    return {record.name: content[record.offset : record.offset + record.size] for record in parcel.records}


def stream(
    records: list[Record], memory: Mapping[str, Tensor], ranks: Ranks, on_progress: Callable[[int], None]
) -> None:
    """Broadcast the records' bytes from rank 0's ``memory`` into that of the others. Collective."""
    done = 0
    for run in _runs(records):
        if len(run) > 1:
            joined = torch.cat([memory[record.name] for record in run])
            ranks.broadcast(joined)
            if ranks.rank != 0:
                parts = joined.split([record.size for record in run])
                for record, part in zip(run, parts, strict=True):
                    memory[record.name].copy_(part)
            done += joined.numel()
            on_progress(done)
        else:
            for piece in memory[run[0].name].split(_PIECE):
                ranks.broadcast(piece)
                done += piece.numel()
                on_progress(done)


def _runs(records: list[Record]) -> Iterator[list[Record]]:
    """Neighbours that travel together, because they are small."""
    run: list[Record] = []
    for record in records:
        if run and sum(member.size for member in run) + record.size > _TOGETHER:
            yield run
            run = []
        run.append(record)
    if run:
        yield run
