"""Measure how much devices that share an accelerator slow each other down.

Virtual GPUs have multiprocessors of their own, and share the memory, the power and the clock of one
GPU. So work is timed twice: alone, and while each neighbour does the same work, over and over. A
GPU lowers its clock only after it has drawn too much power for a while, so the work is timed after
all devices have been busy for as long as some steps of training take. Between two turns a device
waits for a little, as ranks of a pipeline do, or the clock would fall too far:

    alone             [ work ][ work ][ work ]
    the device        [ work ] [ work ] ... [ work ] start[ work ]end start[ work ]end
    a neighbour       [ work ] [ work ] ... [ work ]      [ work ]         [ work ]    [ work ]
    a larger one      [work] [work] [work] ... [work] [work] [work] [work] [work] [work] [work]

The clock takes as long to rise again, so the device rests before anything else is measured.

The work is captured as a CUDA graph for each device. Launching a graph takes the host microseconds,
so that it slows nothing down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import sleep

import torch

from penstock.device.accelerator import synchronize
from penstock.device.device import Device, Gpu
from penstock.device.recorded_graph import GraphMemoryPools, RecordedCudaGraph
from penstock.torch_compat import sleep_on_device

_RUNS = 3
# On an H200, the clock falls for 90 ms and rises again for 100 ms.
_BUSY_SECONDS = 0.12
_TIMED_SECONDS = 0.03
_REST_SECONDS = 0.1
_IDLE_SHARE = 0.1  # of the time of a device. Pipelines of 4 and 8 ranks idle for 5% to 15%
_MOST_REPLAYS = 400  # tiny work does not get a GPU to lower its clock
_MARGIN = 1.2  # neighbours work so many times longer than is timed
_CYCLES_PER_SECOND = 2e9


@dataclass(frozen=True)
class SharedDevice:
    """A device of a rank, and those of other ranks on the same accelerator."""

    device: Gpu
    neighbours: tuple[Gpu, ...]

    @staticmethod
    def find(device: Device, devices: Sequence[Device]) -> SharedDevice | None:
        """Return the device with its neighbours among `devices`, or None if it has none."""
        neighbours = {
            id(other): other
            for other in devices
            if other is not device and other.device == device.device and isinstance(other, Gpu)
        }
        if not isinstance(device, Gpu) or not neighbours:
            return None
        return SharedDevice(device, tuple(neighbours.values()))

    def measure_slowdown(self, work: Callable[[], object]) -> float | None:
        """Return how many times longer work takes while all neighbours do the same.

        Args:
            work: A function that launches kernels on the current stream. It may run on several
                streams at the same time.

        Returns:
            1.0 or more. None if it cannot be measured: the work cannot be captured, for example
            because it waits for the device, or all devices together have no memory for it.
        """
        if not self.device.has_graphs:
            return None
        try:
            graphs = [_capture(gpu, work) for gpu in (self.device, *self.neighbours)]
            alone = median(self._time(graphs[:1], 1, _RUNS) for _ in range(_RUNS))
            busy, timed = (
                min(_MOST_REPLAYS, max(_RUNS, ceil(seconds / max(alone, 1e-9))))
                for seconds in (_BUSY_SECONDS, _TIMED_SECONDS)
            )
            idle_seconds = alone * _IDLE_SHARE / (1 - _IDLE_SHARE)
            together = self._time(graphs, busy, timed, idle_seconds)
            sleep(_REST_SECONDS)
        except RuntimeError:  # of a capture that failed, or for lack of memory
            return None
        finally:
            synchronize(self.device.device)
        return max(1.0, together / alone) if alone else None

    def _time(
        self,
        graphs: Sequence[RecordedCudaGraph],
        busy_replays: int,
        timed_replays: int,
        idle_seconds: float = 0.0,
    ) -> float:
        """Return the seconds of a replay on the device, after some that are not timed.

        Args:
            graphs: The graph of the device, and those of the neighbours that are busy meanwhile.
            busy_replays: How often the device replays its graph before it is timed.
            timed_replays: How often it does while it is timed.
            idle_seconds: How long it waits after each replay.
        """
        gpu, replays = self.device, busy_replays + timed_replays
        events = [
            [gpu.module.Event(enable_timing=True) for _ in range(2)] for _ in range(timed_replays)
        ]
        # A neighbour with more multiprocessors works faster, and must not end first.
        neighbours = self.neighbours[: len(graphs) - 1]
        ratios = [_get_size(neighbour) / _get_size(gpu) for neighbour in neighbours]
        launched = [0] * len(ratios)
        synchronize(gpu.device)
        for turn in range(ceil(replays * _MARGIN)):
            if turn < replays:
                start_and_end = events[turn - busy_replays] if turn >= busy_replays else None
                _replay(gpu, graphs[0], idle_seconds, start_and_end)
            for index, ratio in enumerate(ratios):
                while launched[index] < (turn + 1) * ratio:
                    _replay(neighbours[index], graphs[1 + index], idle_seconds / ratio)
                    launched[index] += 1
        synchronize(gpu.device)
        return median(float(start.elapsed_time(end)) for start, end in events) / 1e3


def _capture(gpu: Gpu, work: Callable[[], object]) -> RecordedCudaGraph:
    """Return the work as a graph that runs on a device."""
    with gpu.activate():
        work()  # the first run on a stream allocates what libraries keep for it
    graph = RecordedCudaGraph([gpu.device], GraphMemoryPools())

    def run_on_device() -> None:
        origin = gpu.module.current_stream(gpu.device)
        gpu.compute_stream.wait_stream(origin)
        with gpu.activate():
            work()
        origin.wait_stream(gpu.compute_stream)

    graph.capture(run_on_device, frees_memory=False)
    return graph


def _replay(
    gpu: Gpu,
    graph: RecordedCudaGraph,
    idle_seconds: float,
    start_and_end: Sequence[torch.Event] | None = None,
) -> None:
    """Launch a graph on a device, between two events if there are any, and let it wait then."""
    with gpu.activate():
        if start_and_end:
            start_and_end[0].record(gpu.compute_stream)
        graph.replay()
        if start_and_end:
            start_and_end[1].record(gpu.compute_stream)
        if idle_seconds:
            sleep_on_device(int(idle_seconds * _CYCLES_PER_SECOND))


def _get_size(gpu: Gpu) -> int:
    """Return the multiprocessors of a virtual GPU. Ranks on a whole GPU are equal: 1."""
    return int(getattr(gpu, "sms", 1))
