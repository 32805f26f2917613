"""`Memory`: the bytes alive on each rank during a step, measured and compared with the forecast.

`profile_step_memory` runs a step inline, one action after another, and reads the live bytes of all
ranks after each action. `Memory` holds the readings and turns them into curves and peaks.

How bytes are attributed to ranks:

    device                     live bytes
    CPU                        storages created while the rank ran an action (by a dispatch mode)
    accelerator of one rank    the allocator's statistics of the device
    GPU with several ranks     the allocator's segments, by the stream they were allocated on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from penstock import draw
from penstock.device.accelerator import (
    get_allocated_bytes,
    get_allocated_bytes_by_stream,
    is_accelerator,
)
from penstock.device.device import Device
from penstock.device.storage_probe import StorageProbe
from penstock.draw.notebook import memory_html
from penstock.draw.style import PictureFile
from penstock.errors import RunError
from penstock.runtime.execution import InlineExecutor
from penstock.runtime.transport import Mailboxes
from penstock.runtime.worker import BoundAction
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Action, Compute, Op, Program, Schedule, Send
from penstock.schedules.timeline import Timeline, simulate
from penstock.stage.stage import Stage
from penstock.text_format import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class MemoryReading(NamedTuple):
    """The live bytes of every rank after one action."""

    rank: int  # the rank that ran the action
    lane_index: int
    action: Action
    alive: tuple[int, ...]  # bytes, by rank


@dataclass(frozen=True, repr=False)
class Memory:
    """The result of `Pipe.memory`: the bytes that a step adds to what each rank holds anyway.

    Printing it shows a table with one row per rank.

    Attributes:
        program: The program of the step.
        readings: The live bytes after each action, in the order in which the actions ran.
        held: The bytes of each rank's parameters, gradients and buffers, which are there before
            and after the step.

    >>> import torch
    >>> from torch import nn
    >>> from penstock import Pipe
    >>> layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> pipe = Pipe(layers, chunks=2, stages=2, devices=["cpu", "cpu"], loss_fn=nn.MSELoss())
    >>> memory = pipe.memory(torch.zeros(6, 4), target=torch.zeros(6, 2))
    >>> memory.ranks, memory.held
    (2, (160, 80))
    """

    program: Program
    readings: tuple[MemoryReading, ...]
    held: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.program.schedule.ranks

    def curve(self, rank: int) -> list[tuple[Compute, int]]:
        """Return the computations of a rank, each with the most bytes alive until the next one.

        Args:
            rank: The rank.

        Returns:
            Pairs of an action and a number of bytes, in the order of the rank's lane.
        """
        curve: list[tuple[Compute, int]] = []
        for reading in self.readings:
            if reading.rank == rank and isinstance(reading.action, Compute):
                curve.append((reading.action, reading.alive[rank]))
            # Actions of other ranks can add to this rank's bytes: a payload arrives.
            elif curve:
                action, most = curve[-1]
                curve[-1] = action, max(most, reading.alive[rank])
        return curve

    @cached_property
    def peak(self) -> tuple[int, ...]:
        """The most bytes alive after any action, by rank."""
        most = [0] * self.ranks
        for reading in self.readings:
            most = list(map(max, most, reading.alive))
        return tuple(most)

    @cached_property
    def forecast(self) -> Timeline:
        """The simulated step, all actions of equal time. `memory(rank)` and `peak` are in bytes."""
        # The bytes of one micro-batch are measured. The forecast predicts how many micro-batches
        # are alive at once.
        even = Cost.even(self.program.schedule.placement)
        return simulate(self.program, replace(even, activation=self.activation))

    @cached_property
    def activation(self) -> tuple[int, ...]:
        """The bytes that one micro-batch keeps for its backward, by stage.

        It is the most that the forward of any micro-batch has added; where cells are recomputed,
        the most that a recomputation has added.
        """
        most = [0] * self.program.schedule.stages
        for (stage, _), size in self._added_bytes_by_cell().items():
            most[stage] = max(most[stage], size)
        return tuple(most)

    def _added_bytes_by_cell(self) -> dict[tuple[int, int], int]:
        """Return the bytes that each cell has added to its rank.

        A payload that arrives counts for the receiving cell. A payload that moves to another device
        no longer counts for the cell that sent it.
        """
        schedule = self.program.schedule
        added_bytes: Counter[tuple[int, int]] = Counter()
        before = (0,) * self.ranks
        for reading in self.readings:
            for stage, microbatch in _find_allocating_cells(reading.action, schedule):
                rank = schedule.placement[stage]
                added_bytes[stage, microbatch] += reading.alive[rank] - before[rank]
            before = reading.alive
        return added_bytes

    def __str__(self) -> str:
        columns = zip(self.held, self.peak, self.forecast.peak, strict=True)
        rows = [(str(rank), *map(format_bytes, sizes)) for rank, sizes in enumerate(columns)]
        rows = [("rank", "held", "peak of a step", "forecast"), *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
            for row in rows
        )

    def _repr_html_(self) -> str:
        return memory_html(self.forecast, self._forecast_times_curves(), self.held, self.peak)

    def __repr__(self) -> str:
        return f"Memory(peak={self.peak}, forecast={self.forecast.peak})"

    def draw(
        self, path: PictureFile = None, *, title: str | None = None, format: str | None = None
    ) -> Figure:
        """Draw the curves of all ranks, measured and forecast.

        Args:
            path: The file to write: a path that ends in .svg or .png, or a file that is open for
                writing. None only returns the figure.
            title: A title above the picture.
            format: "svg" or "png", if the path does not say it.

        Returns:
            The figure of matplotlib.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        return draw.memory(
            self.forecast, self._forecast_times_curves(), path, title=title, format=format
        )

    def _forecast_times_curves(self) -> list[list[tuple[float, float]]]:
        """Return the measured curve of each rank, by the times of the forecast."""
        ends = {(span.rank, span.action): span.end for span in self.forecast.spans}
        return [
            [(ends[rank, action], size) for action, size in self.curve(rank)]
            for rank in range(self.ranks)
        ]


def _find_allocating_cells(action: Action, schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield the cells to which the bytes that an action adds belong.

    A forward belongs to its cell, and so do the messages of activations before and after it. For a
    recomputed cell it is the recomputation, which has no messages.
    """
    if isinstance(action, Compute):
        cell = action.stage, action.microbatch
        if action.op is (Op.R if cell in schedule.recomputed else Op.F):
            yield cell
    elif isinstance(action, Send) and action.message.src < action.message.dst:
        src, dst, microbatch = action.message
        yield from {(src, microbatch), (dst, microbatch)} - schedule.recomputed


# ---- probes: reading the live bytes --------------------------------------------------------------


class MemoryProbe(Protocol):
    """The interface of a reader of the live bytes of some ranks."""

    def track(self) -> AbstractContextManager[object]:
        """Return a context in which the probe notices allocations."""

    def attribute_to(self, rank: int) -> AbstractContextManager[object]:
        """Return a context in which allocations belong to a rank."""

    def read_live_bytes(self) -> Mapping[int, int]:
        """Return the live bytes, by rank."""


class AllocatorProbe:
    """A reader of the statistics of PyTorch's allocator, for ranks on accelerators.

    A block counts as free as soon as the last tensor that uses it is gone.
    """

    def __init__(self, devices: Mapping[int, Device]) -> None:
        rank_counts = Counter(device.device for device in devices.values())
        self._exclusive_devices = {
            rank: device.device
            for rank, device in devices.items()
            if rank_counts[device.device] == 1
        }
        # Ranks that share a GPU, such as virtual GPUs, are distinguished by their streams.
        self._rank_by_stream: dict[int, int] = {}
        for rank, device in devices.items():
            self._device_type = device.device.type  # a process uses one type
            if rank not in self._exclusive_devices:
                handles = device.list_stream_handles()
                if not handles:
                    raise RunError(
                        f"pipe.memory cannot tell apart the ranks that share {device!r}, which has "
                        "no streams. Give each rank a device of its own."
                    )
                self._rank_by_stream |= dict.fromkeys(handles, rank)

    def track(self) -> AbstractContextManager[object]:
        """Return an empty context: the allocator always counts."""
        return nullcontext()

    def attribute_to(self, rank: int) -> AbstractContextManager[object]:
        """Return an empty context: the stream of an allocation names its rank."""
        return nullcontext()

    def read_live_bytes(self) -> Mapping[int, int]:
        """Return the live bytes now. It does not wait for the devices.

        The host allocates and frees memory in its own order, so the numbers are right although
        kernels may still be running.
        """
        live_bytes: Counter[int] = Counter()
        for rank, device in self._exclusive_devices.items():
            live_bytes[rank] = get_allocated_bytes(device)
        if self._rank_by_stream:
            by_stream = get_allocated_bytes_by_stream(self._device_type)
            for handle, rank in self._rank_by_stream.items():
                live_bytes[rank] += by_stream.get(handle, 0)
        return live_bytes


def build_memory_probes(devices: Mapping[int, Device]) -> list[MemoryProbe]:
    """Return a probe for the ranks on accelerators and one for those on the CPU, as needed."""
    accelerated = {r: device for r, device in devices.items() if is_accelerator(device.device)}
    probes: list[MemoryProbe] = [AllocatorProbe(accelerated)] if accelerated else []
    return probes if len(accelerated) == len(devices) else [*probes, StorageProbe()]


# ---- measuring a step ----------------------------------------------------------------------------


def profile_step_memory(
    run_step: Callable[[InlineExecutor], object],
    devices: Mapping[int, Device],
    placement: Sequence[int],
) -> tuple[MemoryReading, ...]:
    """Run a step twice and return the bytes that the second one adds, after each action.

    The first run makes the gradients exist and lets every stage learn whether its layers draw
    random numbers or work in place, which changes what it allocates.
    """
    readings: list[MemoryReading] = []
    probes = build_memory_probes(devices)
    baseline: dict[int, int] = {}

    # The executor enters this context around every action.
    @contextmanager
    def read_after_action(rank: int, bound_action: BoundAction) -> Iterator[None]:
        with ExitStack() as stack:
            for probe in probes:
                stack.enter_context(probe.attribute_to(rank))
            yield
        live_bytes = _read_all_probes(probes)
        alive = tuple(live_bytes.get(r, 0) - baseline.get(r, 0) for r in devices)
        readings.append(MemoryReading(rank, bound_action.lane_index, bound_action.action, alive))

    with ExitStack() as stack:
        for probe in probes:
            stack.enter_context(probe.track())
        mailbox_args = list(devices.values()), placement
        run_step(InlineExecutor(Mailboxes(*mailbox_args)))
        baseline |= _read_all_probes(probes)
        run_step(InlineExecutor(Mailboxes(*mailbox_args), read_after_action))
    return tuple(readings)


def count_resident_bytes(
    stages: Iterable[Stage], placement: Sequence[int], gradient_factor: float = 1.0
) -> tuple[int, ...]:
    """Return the bytes of the parameters, their gradients and the buffers of each rank.

    Gradients count `gradient_factor` times: more than once with the state of an optimizer.
    """
    # A dict per rank, because a tied tensor counts once on each rank that has it.
    tensors_by_rank: list[dict[Tensor, None]] = [{} for _ in range(max(placement) + 1)]
    for stage in stages:
        for module in stage.modules():
            tensors = (*module._parameters.values(), *module._buffers.values())
            tensors_by_rank[placement[stage.index]].update(
                (t, None) for t in tensors if t is not None
            )
    return tuple(
        round(sum(t.nbytes * (1 + gradient_factor * t.requires_grad) for t in tensors))
        for tensors in tensors_by_rank
    )


def _read_all_probes(probes: Sequence[MemoryProbe]) -> dict[int, int]:
    return {rank: size for probe in probes for rank, size in probe.read_live_bytes().items()}
