"""How a step is weighed: it runs inline, and after each action the bytes alive are read.

On the host, a storage belongs to the rank that computed when it was made, until it dies. On a GPU
the allocator tells: what it has given out on a device or, where several ranks share one, what it
has given out on the streams of each. It counts a block as free as soon as nobody has it.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from penstock.run.inline import Inline
from penstock.run.memory import Reading
from penstock.run.transport import Mailboxes
from penstock.run.worker import Step
from penstock.stage.places import Gpu, Place
from penstock.stage.stage import Stage


class Gauge(Protocol):
    """Reads the bytes of some ranks."""

    def reading(self) -> AbstractContextManager[object]:
        """Within, it can tell."""

    def computing(self, rank: int) -> AbstractContextManager[object]:
        """Within, that rank computes."""

    def alive(self) -> Mapping[int, int]:
        """Bytes, by rank."""


class Storages(TorchDispatchMode):
    """Counts what ranks on the host have made, and is alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank: int | None = None
        self._owned: dict[int, WeakSet[torch.UntypedStorage]] = defaultdict(WeakSet)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to load the compiler, which takes seconds, only to keep it from tracing this."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._rank is not None:
            given = {_storage(t)._cdata for t in _on_host((args, kwargs))}
            for tensor in _on_host(made):
                storage = _storage(tensor)
                if storage._cdata not in given:
                    self._owned[self._rank].add(storage)
        return made

    @contextmanager
    def reading(self) -> Iterator[None]:
        """What is compiled runs as it was written: inside, nothing could be seen."""
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # it takes seconds to load
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self)
            yield

    @contextmanager
    def computing(self, rank: int) -> Iterator[None]:
        """What is made within is the rank's."""
        self._rank = rank
        try:
            yield
        finally:
            self._rank = None

    def alive(self) -> Mapping[int, int]:
        """Of the ranks that have made anything."""
        return {rank: sum(s.nbytes() for s in owned) for rank, owned in [*self._owned.items()]}


def _on_host(values: Any) -> Iterator[Tensor]:
    leaves = (leaf for leaf in tree_iter(values) if isinstance(leaf, Tensor))
    return (t for t in leaves if t.device.type == "cpu" and t.layout is torch.strided)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


class Allocated:
    """Asks the allocator what ranks on GPUs have."""

    def __init__(self, places: Mapping[int, Gpu]) -> None:
        count = Counter(place.device for place in places.values())
        self._alone = {rank: p.device for rank, p in places.items() if count[p.device] == 1}
        self._streams = {
            stream.cuda_stream: rank
            for rank, place in places.items()
            if rank not in self._alone
            for stream in (place.compute, place.copy)
        }

    def reading(self) -> AbstractContextManager[object]:
        """It always can."""
        return nullcontext()

    def computing(self, rank: int) -> AbstractContextManager[object]:
        """The streams say who computes."""
        return nullcontext()

    def alive(self) -> Mapping[int, int]:
        """Now, though the devices may still be busy: memory is given out and back by the host."""
        found: Counter[int] = Counter()
        for rank, device in self._alone.items():
            stats = torch.cuda.memory_stats_as_nested_dict(device)
            found[rank] = stats["allocated_bytes"]["all"]["current"]
        if self._streams:
            for segment in torch.cuda.memory_snapshot():
                owner = self._streams.get(segment["stream"])
                if owner is not None:
                    found[owner] += segment["allocated_size"]
        return found


def gauges_for(places: Mapping[int, Place]) -> list[Gauge]:
    """One for the host, one for the GPUs."""
    gpus = {rank: place for rank, place in places.items() if isinstance(place, Gpu)}
    found: list[Gauge] = [Allocated(gpus)] if gpus else []
    return found if len(gpus) == len(places) else [*found, Storages()]


def weighed(
    run: Callable[[Inline], object],
    places: Mapping[int, Place],
    placement: Sequence[int],
) -> tuple[Reading, ...]:
    """Run a step, and read the gauges after each action: what is there more than before.

    It is the second one: the first shows what layers do, and makes the gradients.
    """
    readings: list[Reading] = []
    gauges = gauges_for(places)
    begun: dict[int, int] = {}

    @contextmanager
    def around(rank: int, step: Step) -> Iterator[None]:
        with ExitStack() as stack:
            for gauge in gauges:
                stack.enter_context(gauge.computing(rank))
            yield
        now = _alive(gauges)
        alive = tuple(now.get(each, 0) - begun.get(each, 0) for each in places)
        readings.append(Reading(rank, step.at, step.action, alive))

    with ExitStack() as stack:
        for gauge in gauges:
            stack.enter_context(gauge.reading())
        where = list(places.values()), placement
        run(Inline(Mailboxes(*where)))
        begun |= _alive(gauges)
        run(Inline(Mailboxes(*where), around))
    return tuple(readings)


def held_by_ranks(stages: Iterable[Stage], placement: Sequence[int]) -> tuple[int, ...]:
    """Bytes of each rank's parameters, of the gradients of those that learn, and of its buffers."""
    owned: list[dict[Tensor, None]] = [{} for _ in range(max(placement) + 1)]
    for stage in stages:
        for module in stage.modules():
            held = (*module._parameters.values(), *module._buffers.values())
            owned[placement[stage.index]].update((t, None) for t in held if t is not None)
    return tuple(sum(t.nbytes * (1 + t.requires_grad) for t in tensors) for tensors in owned)


def _alive(gauges: Sequence[Gauge]) -> dict[int, int]:
    return {rank: size for gauge in gauges for rank, size in gauge.alive().items()}
