"""The epoch, and random streams that belong to it, inside of a DataLoader's workers."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_ddp_ext.data.disguise import disguise
from lightning_ddp_ext.data.epochs import data_loaders, epoch_takers, set_epoch
from lightning_ddp_ext.errors import SamplerError

__all__ = ["Seeds", "WorkerEpochs", "seed_generators", "seeds_for"]

_NOT_YET = -1
_WIDTH = 32  # bits in a word of NumPy's seeds
_WORDS = (4, 4, 2)  # of Python's, NumPy's and torch's seed


class Seeds(NamedTuple):
    """Seeds of the three generators: of ``random.seed``, ``numpy.random.seed`` and ``torch.manual_seed``."""

    python: int
    numpy: tuple[int, ...]
    torch: int


def seeds_for(seed: int, *, epoch: int, rank: int, worker: int | None = None) -> Seeds:
    """Return seeds that are independent of each other, and of those of any other epoch, rank or worker.

    They are words of NumPy's ``SeedSequence`` over (seed, epoch, rank, worker + 1), the last one 0 where there is no
    worker, each number as two words of 32 bits. So nothing is added up: (seed 0, epoch 1) is not (seed 1, epoch 0).

    Args:
        seed: the seed of the run, like the others from 0 to below 2^63.
        epoch: from 0.
        rank: from 0.
        worker: the worker's id, or None for the rank's main process.

    Raises:
        SamplerError: for a number outside of these limits.

    Example:
        >>> seeds_for(42, epoch=3, rank=0) == seeds_for(42, epoch=3, rank=0)
        True
        >>> seeds_for(42, epoch=3, rank=0) == seeds_for(42, epoch=3, rank=0, worker=0)
        False
    """
    numbers = {"seed": seed, "epoch": epoch, "rank": rank, "worker": 0 if worker is None else worker}
    for name, number in numbers.items():
        _check(name, number)
    numbers["worker"] = 0 if worker is None else worker + 1
    entropy = [word for number in numbers.values() for word in (number % 2**_WIDTH, number >> _WIDTH)]
    words = [int(word) for word in np.random.SeedSequence(entropy).generate_state(sum(_WORDS))]
    python, numpy, torchs = (tuple(words.pop() for _ in range(count)) for count in _WORDS)
    return Seeds(_joined(python), numpy, _joined(torchs))


def seed_generators(seed: int, *, epoch: int, rank: int, worker: int | None = None) -> None:
    """Seed the global generators of Python's ``random``, NumPy and torch (on all devices) with ``seeds_for``'s seeds.

    Not collective. Arguments and errors are those of ``seeds_for``.

    Example:
        >>> seed_generators(42, epoch=0, rank=1)
        >>> first = random.random(), float(torch.rand(()))
        >>> seed_generators(42, epoch=0, rank=1)
        >>> first == (random.random(), float(torch.rand(())))
        True
    """
    seeds = seeds_for(seed, epoch=epoch, rank=rank, worker=worker)
    random.seed(seeds.python)
    np.random.seed(seeds.numpy)
    torch.manual_seed(seeds.torch)


class WorkerEpochs:
    """The epoch of this rank, in memory that its loaders' workers see, however they are started.

    ``epochs.set_epoch`` in the main process reaches workers that are started afterwards, but never persistent ones
    that run already. In the workers of a loader given to ``install``, all that ``epochs.epoch_takers`` finds below the
    dataset is given the epoch when the worker starts; in persistent ones again before the first sample of each new
    epoch. Samplers are not in workers: they need ``epochs.set_epoch`` as well.

    With a seed each worker's generators are seeded by ``seed_generators`` at the same moments. For a map-style dataset
    in persistent workers these numbers are repeatable only if epochs are read to their end: what had been fetched
    ahead is dropped, but may have drawn from the new epoch's stream.

    Nothing is given, and nothing seeded, before the first ``set``.

    Args:
        rank: this process's rank, which becomes part of the seeds.
        seed: the run's seed, the same on all ranks; None leaves all generators alone.

    Raises:
        SamplerError: a rank or seed is negative, too big or no integer.

    Example:
        >>> class Epochs(IterableDataset[int]):
        ...     def set_epoch(self, epoch):
        ...         self.epoch = epoch
        ...     def __iter__(self):
        ...         yield self.epoch
        >>> loader = DataLoader(Epochs(), batch_size=None, num_workers=1, persistent_workers=True)
        >>> epochs = WorkerEpochs(rank=0)
        >>> epochs.install(loader)
        >>> for epoch in range(3):
        ...     epochs.set(epoch)
        ...     print(list(loader))
        [0]
        [1]
        [2]
    """

    def __init__(self, *, rank: int, seed: int | None = None) -> None:
        _check("rank", rank)
        _check("seed", 0 if seed is None else seed)
        self.rank = rank
        self.seed = seed
        self._shared = torch.full((1,), _NOT_YET, dtype=torch.int64).share_memory_()

    def set(self, epoch: int) -> None:
        """Say which epoch the loaders are going to read; before their iterators are made.

        Raises:
            SamplerError: the epoch is negative or no integer.
        """
        _check("epoch", epoch)
        self._shared[0] = epoch

    def install(self, loader: object) -> None:
        """Let the loader's workers follow the epoch, those that are started from now on.

        Whatever the loader's ``worker_init_fn`` is runs first. One that is set later takes our place; call this again
        then: it does nothing where we are in place. Of what is no torch ``DataLoader``, those below it are meant.

        The workers warn if they have a persistent dataset that cannot be watched, a plain list for example, and
        the epoch would make a difference.
        """
        for each in data_loaders(loader):
            if self._start_of(each) is None and each.num_workers and (each.persistent_workers or self.seed is not None):
                each.worker_init_fn = _WorkerStart(self, each.worker_init_fn, persistent=each.persistent_workers)

    def uninstall(self, loader: object) -> None:
        """Give the loader its former ``worker_init_fn`` back, if ours is the one that it has.

        Workers that run already go on following the epoch.
        """
        for each in data_loaders(loader):
            if (ours := self._start_of(each)) is not None:
                each.worker_init_fn = ours.former

    def _start_of(self, loader: DataLoader[Any]) -> _WorkerStart | None:
        start = loader.worker_init_fn
        return start if isinstance(start, _WorkerStart) and start.epochs is self else None

    def _reader(self) -> memoryview:
        """Return a view whose element 0 is the epoch: a plain integer, read in some 30 ns."""
        return memoryview(self._shared.numpy())


class _WorkerStart:
    """A ``worker_init_fn``: the former one, and then the epoch."""

    def __init__(self, epochs: WorkerEpochs, former: Callable[[int], None] | None, *, persistent: bool) -> None:
        self.epochs = epochs
        self.former = former
        self.persistent = persistent

    def __call__(self, worker: int) -> None:
        if self.former is not None:
            self.former(worker)
        info = get_worker_info()
        if info is None:
            return
        watch = _Watch(self.epochs, info.dataset, worker)
        watch.look()
        if self.persistent:
            _look_before_reading(info.dataset, watch)


class _Watch:
    """Tells one worker's dataset of new epochs."""

    def __init__(self, epochs: WorkerEpochs, dataset: object, worker: int) -> None:
        self.epochs = epochs
        self.dataset = dataset
        self.worker = worker
        self._shared = epochs._reader()
        self._seen = _NOT_YET

    def look(self) -> None:
        if self._shared[0] != self._seen:
            self._begin(self._shared[0])

    def _begin(self, epoch: int) -> None:
        self._seen = epoch
        if self.epochs.seed is not None:
            seed_generators(self.epochs.seed, epoch=epoch, rank=self.epochs.rank, worker=self.worker)
        set_epoch(self.dataset, epoch)

    def has_something_to_do(self) -> bool:
        return self.epochs.seed is not None or bool(epoch_takers(self.dataset))


def _look_before_reading(dataset: object, watch: _Watch) -> None:
    """Have the dataset, in this process, look before it reads."""
    names = ("__iter__",) if isinstance(dataset, IterableDataset) else ("__getitem__", "__getitems__")
    methods = {name: getattr(type(dataset), name, None) for name in names}
    try:
        disguise(dataset, {name: _looking_first(each, watch) for name, each in methods.items() if callable(each)})
    except Exception as error:
        if watch.worker == 0 and watch.has_something_to_do():
            warnings.warn(
                f"dataset must be of a class that can be extended, to be told of new epochs in persistent workers "
                f"(got a {type(dataset).__name__}: {error}); hold it in a Dataset of your own, or take "
                f"persistent_workers=False",
                stacklevel=2,
            )


def _looking_first(method: Callable[..., object], watch: _Watch) -> Callable[..., object]:
    def look_and_read(dataset: object, *args: object) -> object:
        watch.look()
        return method(dataset, *args)

    return look_and_read


def _check(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
        raise SamplerError(f"{name} must be an integer from 0 to below 2^63 (got {number!r})")


def _joined(words: tuple[int, ...]) -> int:
    return sum(word << (_WIDTH * place) for place, word in enumerate(words))
