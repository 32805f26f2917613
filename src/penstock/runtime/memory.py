"""`Memory`: the bytes alive on each rank over the actions of a step, beside the forecast's."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import draw
from penstock.device.device import Device, Gpu
from penstock.model_summary import format_bytes
from penstock.runtime.inline import InlineExecutor
from penstock.runtime.transport import Mailboxes
from penstock.runtime.worker import BoundAction
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Action, Compute, Op, Program, Schedule, Send
from penstock.schedules.timeline import Timeline, simulate
from penstock.stage.stage import Stage
from penstock.torch_compat import pytree


class MemoryReading(NamedTuple):
    """An action, the place it has in its rank's lane, and what was alive after it."""

    rank: int
    lane_index: int
    action: Action
    alive: tuple[int, ...]  # bytes, of every rank


@dataclass(frozen=True, repr=False)
class Memory:
    """What `Pipe.memory` gives back: of one step, the bytes that came on top of what was there.

    What was there before is `held`: parameters, their gradients, buffers. The `readings` stand in
    the order in which the actions ran, one after another.
    """

    program: Program
    readings: tuple[MemoryReading, ...]
    held: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.program.schedule.ranks

    def curve(self, rank: int) -> list[tuple[Compute, int]]:
        """Each of the rank's computations, and the most that was alive from then to the next."""
        found: list[tuple[Compute, int]] = []
        for reading in self.readings:
            if reading.rank == rank and isinstance(reading.action, Compute):
                found.append((reading.action, reading.alive[rank]))
            elif found:
                action, most = found[-1]
                found[-1] = action, max(most, reading.alive[rank])
        return found

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """The most that was alive after any action, on each rank."""
        most = [0] * self.ranks
        for reading in self.readings:
            most = list(map(max, most, reading.alive))
        return tuple(most)

    @cached_property
    def forecast(self) -> Timeline:
        """On paper: its `memory(rank)` and its `peak` are bytes, and all seconds the same."""
        even = Cost.even(self.program.schedule.placement)
        return simulate(self.program, replace(even, activation=self.activation))

    @cached_property
    def activation(self) -> tuple[int, ...]:
        """What one micro-batch keeps on each stage: what its F, or its R, has added at most."""
        most = [0] * self.program.schedule.stages
        for (stage, _), size in self._added_bytes_by_cell().items():
            most[stage] = max(most[stage], size)
        return tuple(most)

    def _added_bytes_by_cell(self) -> dict[tuple[int, int], int]:
        """By cell. What arrives counts with it, and what is sent away does not, if it is moved."""
        schedule = self.program.schedule
        gains: Counter[tuple[int, int]] = Counter()
        before = (0,) * self.ranks
        for reading in self.readings:
            for stage, microbatch in _find_allocating_cells(reading.action, schedule):
                rank = schedule.placement[stage]
                gains[stage, microbatch] += reading.alive[rank] - before[rank]
            before = reading.alive
        return gains

    def __str__(self) -> str:
        columns = zip(self.held, self.peak, self.forecast.peak, strict=True)
        rows = [(str(rank), *map(format_bytes, found)) for rank, found in enumerate(columns)]
        rows = [("rank", "held", "peak of a step", "forecast"), *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            for row in rows
        )

    def __repr__(self) -> str:
        return f"Memory(peak={self.peak}, forecast={self.forecast.peak})"

    def draw(self, path: str | PathLike[str], *, title: str | None = None) -> None:
        """The curves of all ranks, measured over forecast, into an SVG or PNG file."""
        ends = {(span.rank, span.action): span.end for span in self.forecast.spans}
        measured = [
            [(ends[rank, action], size) for action, size in self.curve(rank)]
            for rank in range(self.ranks)
        ]
        draw.memory(self.forecast, measured, path, title=title)


def _find_allocating_cells(action: Action, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """The cells of whose birth the action is a part: that of an F has messages."""
    if isinstance(action, Compute):
        cell = action.stage, action.microbatch
        if action.op is (Op.R if cell in schedule.recomputed else Op.F):
            yield cell
    elif isinstance(action, Send) and action.message.src < action.message.dst:
        src, dst, microbatch = action.message
        yield from {(src, microbatch), (dst, microbatch)} - schedule.recomputed


# -------------------------------------------------------------------------------------------------
# How a step is weighed: it runs inline, and after each action the bytes alive are read.
#
# On the host, a storage belongs to the rank that computed when it was made, until it dies. On a GPU
# the allocator tells: what it has given out on a device or, where several ranks share one, what it
# has given out on the streams of each. It counts a block as free as soon as nobody has it.
# -------------------------------------------------------------------------------------------------


class MemoryProbe(Protocol):
    """Reads the bytes of some ranks."""

    def track(self) -> AbstractContextManager[object]:
        """Within, it can tell."""

    def attribute_to(self, rank: int) -> AbstractContextManager[object]:
        """Within, that rank computes."""

    def read_live_bytes(self) -> Mapping[int, int]:
        """Bytes, by rank."""


class HostStorageProbe(TorchDispatchMode):
    """Counts what ranks on the host have made, and is alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._current_rank: int | None = None
        self._storages_by_rank: dict[int, WeakSet[torch.UntypedStorage]] = defaultdict(WeakSet)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether to load the compiler, which takes seconds, only to keep it from tracing this."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._current_rank is not None:
            given = {_storage(t)._cdata for t in _host_tensors((args, kwargs))}
            for tensor in _host_tensors(made):
                storage = _storage(tensor)
                if storage._cdata not in given:
                    self._storages_by_rank[self._current_rank].add(storage)
        return made

    @contextmanager
    def track(self) -> Iterator[None]:
        """What is compiled runs as it was written: inside, nothing could be seen."""
        with ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # it takes seconds to load
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(self)
            yield

    @contextmanager
    def attribute_to(self, rank: int) -> Iterator[None]:
        """What is made within is the rank's."""
        self._current_rank = rank
        try:
            yield
        finally:
            self._current_rank = None

    def read_live_bytes(self) -> Mapping[int, int]:
        """Of the ranks that have made anything."""
        return {
            rank: sum(s.nbytes() for s in owned)
            for rank, owned in [*self._storages_by_rank.items()]
        }


def _host_tensors(values: Any) -> Iterator[Tensor]:
    leaves = (leaf for leaf in pytree.tree_iter(values) if isinstance(leaf, Tensor))
    return (t for t in leaves if t.device.type == "cpu" and t.layout is torch.strided)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


class CudaAllocatorProbe:
    """Asks the allocator what ranks on GPUs have."""

    def __init__(self, devices: Mapping[int, Gpu]) -> None:
        count = Counter(place.device for place in devices.values())
        self._exclusive_devices = {
            rank: p.device for rank, p in devices.items() if count[p.device] == 1
        }
        self._rank_by_stream = {
            stream.cuda_stream: rank
            for rank, place in devices.items()
            if rank not in self._exclusive_devices
            for stream in (place.compute_stream, place.copy_stream)
        }

    def track(self) -> AbstractContextManager[object]:
        """It always can."""
        return nullcontext()

    def attribute_to(self, rank: int) -> AbstractContextManager[object]:
        """The streams say who computes."""
        return nullcontext()

    def read_live_bytes(self) -> Mapping[int, int]:
        """Now, though the devices may still be busy: memory is given out and back by the host."""
        found: Counter[int] = Counter()
        for rank, device in self._exclusive_devices.items():
            stats = torch.cuda.memory_stats_as_nested_dict(device)
            found[rank] = stats["allocated_bytes"]["all"]["current"]
        if self._rank_by_stream:
            for segment in torch.cuda.memory_snapshot():
                owner = self._rank_by_stream.get(segment["stream"])
                if owner is not None:
                    found[owner] += segment["allocated_size"]
        return found


def build_memory_probes(devices: Mapping[int, Device]) -> list[MemoryProbe]:
    """One for the host, one for the GPUs."""
    gpus = {rank: place for rank, place in devices.items() if isinstance(place, Gpu)}
    found: list[MemoryProbe] = [CudaAllocatorProbe(gpus)] if gpus else []
    return found if len(gpus) == len(devices) else [*found, HostStorageProbe()]


def profile_step_memory(
    run_step: Callable[[InlineExecutor], object],
    devices: Mapping[int, Device],
    placement: Sequence[int],
) -> tuple[MemoryReading, ...]:
    """Run a step, and read the gauges after each action: what is there more than before.

    It is the second one: the first shows what layers do, and makes the gradients.
    """
    readings: list[MemoryReading] = []
    gauges = build_memory_probes(devices)
    begun: dict[int, int] = {}

    @contextmanager
    def read_after_action(rank: int, bound_action: BoundAction) -> Iterator[None]:
        with ExitStack() as stack:
            for gauge in gauges:
                stack.enter_context(gauge.attribute_to(rank))
            yield
        now = _read_all_probes(gauges)
        alive = tuple(now.get(each, 0) - begun.get(each, 0) for each in devices)
        readings.append(MemoryReading(rank, bound_action.lane_index, bound_action.action, alive))

    with ExitStack() as stack:
        for gauge in gauges:
            stack.enter_context(gauge.track())
        where = list(devices.values()), placement
        run_step(InlineExecutor(Mailboxes(*where)))
        begun |= _read_all_probes(gauges)
        run_step(InlineExecutor(Mailboxes(*where), read_after_action))
    return tuple(readings)


def count_resident_bytes(stages: Iterable[Stage], placement: Sequence[int]) -> tuple[int, ...]:
    """Bytes of each rank's parameters, of the gradients of those that learn, and of its buffers."""
    owned: list[dict[Tensor, None]] = [{} for _ in range(max(placement) + 1)]
    for stage in stages:
        for module in stage.modules():
            held = (*module._parameters.values(), *module._buffers.values())
            owned[placement[stage.index]].update((t, None) for t in held if t is not None)
    return tuple(sum(t.nbytes * (1 + t.requires_grad) for t in tensors) for tensors in owned)


def _read_all_probes(probes: Sequence[MemoryProbe]) -> dict[int, int]:
    return {rank: size for gauge in probes for rank, size in gauge.read_live_bytes().items()}
