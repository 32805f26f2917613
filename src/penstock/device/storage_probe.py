"""Count the bytes of live tensors by watching which storages operations create.

Unlike the statistics of an allocator, this works on every device, tells ranks apart that share one,
and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from penstock.torch_compat import EagerDispatchMode, force_eager, get_storage_address, pytree

_ALLOCATOR_BLOCK = 512  # bytes: the allocators of accelerators round sizes up to multiples of it


class StorageProbe(EagerDispatchMode):
    """A dispatch mode that counts the live bytes of ranks, by default on the CPU.

    The mode sees every operation and keeps a weak reference to each storage that belongs to the
    output and not to the arguments: a storage that is shared with an argument is not new.

    Each storage has an origin: the rank, the number of the context in which it was created, and how
    many storages were created in that context before. A storage on a device of `rank_of_device`
    belongs to that rank, whichever rank created it: messages are copied by their senders.
    """

    def __init__(
        self,
        devices: Iterable[torch.device] = (torch.device("cpu"),),
        rank_of_device: Mapping[torch.device, int] | None = None,
    ) -> None:
        super().__init__()
        self._devices, self._rank_of_device = frozenset(devices), rank_of_device or {}
        self._alive: Counter[int] = Counter()  # bytes by rank
        self._most: Counter[int] = Counter()  # the most bytes by rank in the current context
        self._current: tuple[int, int] | None = None  # the rank, and the number of the context
        self._contexts, self._created = count(), 0
        self._origins: WeakKeyDictionary[torch.UntypedStorage, tuple[int, int, int]] = (
            WeakKeyDictionary()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._current is not None:
            input_addresses = {
                get_storage_address(t.untyped_storage()) for t in self._find_tensors((args, kwargs))
            }
            for tensor in self._find_tensors(output):
                storage = tensor.untyped_storage()
                is_new = get_storage_address(storage) not in input_addresses
                if is_new and storage not in self._origins:
                    rank = self._rank_of_device.get(tensor.device, self._current[0])
                    self._add(storage, rank, self._current[1])
        return output

    @contextmanager
    def track(self) -> Iterator[None]:
        """Enter the mode, with compiled modules run as written.

        A dispatch mode does not see the operations inside compiled code.
        """
        with force_eager(), self:
            yield

    @contextmanager
    def attribute_to(self, rank: int) -> Iterator[None]:
        """Attribute storages that are created in the context to a rank."""
        self._current, self._created = (rank, next(self._contexts)), 0
        self._most = self._alive.copy()
        try:
            yield
        finally:
            self._current = None

    def read_live_bytes(self) -> Mapping[int, int]:
        """Return the live bytes of the ranks that have created storages."""
        live_bytes: Counter[int] = Counter()
        for (rank, _, _), size in self.read_live_storages().items():
            live_bytes[rank] += size
        return live_bytes

    def read_live_storages(self) -> dict[tuple[int, int, int], int]:
        """Return the bytes of the live storages, by origin."""
        return {origin: _get_size(storage) for storage, origin in [*self._origins.items()]}

    def read_peak_bytes(self) -> Mapping[int, int]:
        """Return the most bytes of each rank that were alive at some time in the last context."""
        return self._most

    def read_transient_bytes(self) -> dict[int, int]:
        """Return how many bytes more than now were alive at some time in the last context."""
        return {rank: most - self._alive[rank] for rank, most in self._most.items()}

    def _add(self, storage: torch.UntypedStorage, rank: int, context: int) -> None:
        size = _get_size(storage)
        self._origins[storage] = (rank, context, self._created)
        self._created += 1
        self._alive[rank] += size
        self._most[rank] = max(self._most[rank], self._alive[rank])
        finalize(storage, self._alive.subtract, {rank: size}).atexit = False

    def _find_tensors(self, values: Any) -> Iterator[Tensor]:
        leaves = (leaf for leaf in pytree.tree_iter(values) if isinstance(leaf, Tensor))
        return (t for t in leaves if t.layout is torch.strided and t.device in self._devices)


def _get_size(storage: torch.UntypedStorage) -> int:
    size = storage.nbytes()
    return size if storage.device.type == "cpu" else -(-size // _ALLOCATOR_BLOCK) * _ALLOCATOR_BLOCK
