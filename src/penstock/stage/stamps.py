"""Times of a captured step: a kernel reads the GPU's clock, and writes it down.

An event that a graph records would tell the time as well. But the driver cuts the graph there, and
puts what follows onto another of its own streams: with 512 actions on eight ranks there were 515
streams instead of 12, and the step took 1.7 times as long. A kernel is a node like all others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.stage.driver import checked, driver_for
from penstock.stage.places import Gpu, Moment, Place, Stamp

_CODE = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry stamp(.param .u64 where)
{
    .reg .b64 %place, %time;
    ld.param.u64 %place, [where];
    cvta.to.global.u64 %place, %place;
    mov.u64 %time, %globaltimer;
    st.global.u64 [%place], %time;
    ret;
}
"""
_ROOM = 4096  # stamps in one piece of memory
_WHAT_FOR = "to tell when a captured step does what"


class Stamps:
    """Those of one captured step, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._taken = device, 0
        self._memory = [self._piece()]  # before the capture begins

    def take(self, stream: torch.cuda.Stream) -> Stamp:
        """This moment on the stream, which is being captured."""
        piece, at = divmod(self._taken, _ROOM)
        if piece == len(self._memory):
            self._memory.append(self._piece())
        _launch(stream, self._memory[piece][at:].data_ptr())
        self._taken += 1
        return Stamp(self._device, self._taken - 1)

    def _piece(self) -> Tensor:
        return torch.empty(_ROOM, dtype=torch.int64, device=self._device)

    def copied(self) -> list[Tensor]:
        """What the last replay has written: the next one writes other times."""
        return [piece.clone() for piece in self._memory]


class StampedGpu(Gpu):
    """A GPU, or a part of one, in a step that is captured."""

    def __init__(self, place: Gpu, stamps: Stamps) -> None:
        super().__init__(place.device, repr(place), iter((place.compute, place.copy)).__next__)
        self._stamps = stamps

    def now(self, after: Moment | None = None) -> Stamp:
        """No host is late in a replay: what follows at once begins where the other ends."""
        if isinstance(after, Stamp):
            return after
        with torch.cuda.device(self.device):
            return self._stamps.take(self.compute)


class Clocks:
    """Of all devices of one captured step."""

    def __init__(self, places: Sequence[Place]) -> None:
        gpus = [place for place in places if isinstance(place, Gpu)]
        self._of = {place.device: Stamps(place.device) for place in gpus}
        self.places = [
            StampedGpu(place, self._of[place.device]) if isinstance(place, Gpu) else place
            for place in places
        ]

    def copied(self) -> Times:
        """Those of the last replay, to be read when it has ended."""
        return Times({device: stamps.copied() for device, stamps in self._of.items()})


class Times:
    """Of one replay. Those of two devices have nothing in common."""

    def __init__(self, written: dict[torch.device, list[Tensor]]) -> None:
        self._written = written

    def read(self) -> dict[torch.device, list[int]]:
        """In nanoseconds since the first, by the number of the stamp. This waits for the replay."""
        found = {}
        for device, pieces in self._written.items():
            times = [time for piece in pieces for time in piece.tolist()]
            found[device] = [time - times[0] for time in times]
        return found


def _launch(stream: torch.cuda.Stream, address: int) -> None:
    driver = driver_for(_WHAT_FOR)
    one = 1, 1, 1
    given = (address,), (ctypes.c_void_p,)
    asked = driver.cuLaunchKernel(_kernel(), *one, *one, 0, stream.cuda_stream, given, 0)
    checked(asked, _WHAT_FOR)


@cache
def _kernel() -> Any:
    driver = driver_for(_WHAT_FOR)
    library = checked(driver.cuLibraryLoadData(_CODE, [], [], 0, [], [], 0), _WHAT_FOR)
    return driver.CUfunction(int(checked(driver.cuLibraryGetKernel(library, b"stamp"), _WHAT_FOR)))
