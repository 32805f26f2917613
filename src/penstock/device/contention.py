"""Measure how much devices that share an accelerator slow each other down.

Virtual GPUs have multiprocessors of their own, and share the memory, the power and the clock of one
GPU. So work is timed twice: alone, and while each neighbour does the same work, over and over. A
GPU lowers its clock only after it has drawn too much power for a while, so the work is timed after
all devices have been busy for as long as some steps of training take:

    alone             [ work ]
    the device        [ work ][ work ] ... [ work ]start[ work ][ work ]end
    a neighbour       [ work ][ work ] ... [ work ]     [ work ][ work ]   [ work ]
    a larger one      [work][work][work]...[work][work][work][work][work][work][work]

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

from penstock.device.accelerator import synchronize
from penstock.device.device import Device, Gpu
from penstock.device.recorded_graph import GraphMemoryPools, RecordedCudaGraph

_RUNS = 3
# On an H200, the clock falls for 90 ms and rises again for 100 ms.
_BUSY_SECONDS = 0.12
_TIMED_SECONDS = 0.03
_REST_SECONDS = 0.1
_MOST_REPLAYS = 400  # tiny work does not get a GPU to lower its clock
_MARGIN = 1.2  # neighbours work so many times longer than is timed


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
            counts = [
                min(_MOST_REPLAYS, max(_RUNS, ceil(seconds / max(alone, 1e-9))))
                for seconds in (_BUSY_SECONDS, _TIMED_SECONDS)
            ]
            together = self._time(graphs, *counts)
            sleep(_REST_SECONDS)
        except RuntimeError:  # of a capture that failed, or for lack of memory
            return None
        finally:
            synchronize(self.device.device)
        return max(1.0, together / alone) if alone else None

    def _time(
        self, graphs: Sequence[RecordedCudaGraph], busy_replays: int, timed_replays: int
    ) -> float:
        """Return the seconds of a replay on the device, after some that are not timed.

        Args:
            graphs: The graph of the device, and those of the neighbours that are busy meanwhile.
            busy_replays: How often the device replays its graph before it is timed.
            timed_replays: How often it does while it is timed.
        """
        start, end = (self.device.module.Event(enable_timing=True) for _ in range(2))
        events = {busy_replays: start, busy_replays + timed_replays: end}
        size = _get_size(self.device)
        # A neighbour with more multiprocessors works faster, and must not end first.
        ratios = [_get_size(gpu) / size for gpu in self.neighbours[: len(graphs) - 1]]
        launched = [0] * len(ratios)
        synchronize(self.device.device)
        for turn in range(ceil((busy_replays + timed_replays) * (_MARGIN if ratios else 1)) + 1):
            if turn in events:
                events[turn].record(self.device.compute_stream)
            if turn < busy_replays + timed_replays:
                _replay(self.device, graphs[0])
            for index, ratio in enumerate(ratios):
                while launched[index] < (turn + 1) * ratio:
                    _replay(self.neighbours[index], graphs[1 + index])
                    launched[index] += 1
        synchronize(self.device.device)
        return float(start.elapsed_time(end)) / 1e3 / timed_replays


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


def _replay(gpu: Gpu, graph: RecordedCudaGraph) -> None:
    with gpu.activate():
        graph.replay()


def _get_size(gpu: Gpu) -> int:
    """Return the multiprocessors of a virtual GPU. Ranks on a whole GPU are equal: 1."""
    return int(getattr(gpu, "sms", 1))
