"""Measure how much devices that share an accelerator slow each other down.

Virtual GPUs have multiprocessors of their own, and share the memory, the power and the clock of one
GPU. So work is timed twice: alone, and while each neighbour does the same work. All kernels are
launched before any of them may begin, so that the host slows nothing down:

    the device     [ sleep ]--gate-[ start ][ work ][ end ]
                                |
    a neighbour                 '--[ work ]
    a larger one                '--[ work ][ work ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter

import torch

from penstock.device.accelerator import synchronize
from penstock.device.device import Device, Gpu
from penstock.torch_compat import sleep_on_device

_RUNS = 3
_LONGEST_SLEEP = 0.5  # seconds that the device may be kept waiting for the host
_CYCLES_PER_SECOND = 2e9  # a slower clock only makes the sleep longer


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
            1.0 or more. None if it cannot be measured: all devices together have no memory for it,
            or the work waits for the device, or the device has no way to wait for the host.
        """
        try:
            for gpu in (*self.neighbours, self.device):
                with gpu.activate():
                    work()  # the first run on a stream allocates memory
            host_seconds = self._time_host(work)
            alone = [self._time(work, (), host_seconds) for _ in range(_RUNS)]
            together = [self._time(work, self.neighbours, host_seconds) for _ in range(_RUNS)]
        except torch.OutOfMemoryError:
            return None
        finally:
            synchronize(self.device.device)
        if None in alone or None in together:
            return None
        return max(1.0, median(filter(None, together)) / median(filter(None, alone)))

    def _time_host(self, work: Callable[[], object]) -> float:
        """Return the seconds that the host takes to launch the work."""
        synchronize(self.device.device)
        begin = perf_counter()
        with self.device.activate():
            work()
        return perf_counter() - begin

    def _time(
        self, work: Callable[[], object], neighbours: Sequence[Gpu], host_seconds: float
    ) -> float | None:
        """Return the seconds of the work while these neighbours are busy.

        Returns None if the device did not wait until all of it was launched.
        """
        # A neighbour with more multiprocessors works faster, and must not end first.
        repeats = [ceil(_get_size(neighbour) / _get_size(self.device)) for neighbour in neighbours]
        sleep_seconds = min(2 * host_seconds * (1 + sum(repeats)), _LONGEST_SLEEP)
        start, end = (self.device.module.Event(enable_timing=True) for _ in range(2))
        synchronize(self.device.device)
        with self.device.activate():
            sleep_on_device(int(sleep_seconds * _CYCLES_PER_SECOND))
            gate = self.device.record_event()
        with self.device.activate():
            start.record(self.device.compute_stream)
            work()
            end.record(self.device.compute_stream)
        for neighbour, count in zip(neighbours, repeats, strict=True):
            neighbour.compute_stream.wait_event(gate)
            with neighbour.activate():
                for _ in range(count):
                    work()
        is_device_time = not gate.query()
        synchronize(self.device.device)
        return start.elapsed_time(end) / 1e3 if is_device_time else None


def _get_size(gpu: Gpu) -> int:
    """Return the multiprocessors of a virtual GPU. Ranks on a whole GPU are equal: 1."""
    return int(getattr(gpu, "sms", 1))
