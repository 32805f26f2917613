"""What records a step and replays it: a CUDA graph.

While it is captured, nothing runs: kernels become nodes of the graph, and the events that join the
ranks' streams its edges. A replay is one launch of all of it, on the stream that is current then.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

from penstock.errors import MissingExtra
from penstock.stage.driver import driver_for
from penstock.stage.randomness import shared_generator

Made = TypeVar("Made")


class Recording(Protocol):
    """One step, to be captured once and replayed often."""

    def generator(self, device: torch.device) -> torch.Generator:
        """Before the capture: one that goes on from where it stands when a replay begins."""

    def lent(self, mine: torch.Generator) -> AbstractContextManager[None]:
        """Within, the generator that all threads share gives the numbers of such a one."""

    def capture(self, body: Callable[[], Made]) -> Made:
        """Record all that the body asks devices for; its tensors stay where they are."""

    def replay(self) -> None:
        """Do all of it again: after what was asked for before, and before what is asked next."""


class Pools:
    """The memory that the recordings of one pipe have in common: only one is replayed at a time."""

    def __init__(self) -> None:
        self._first: Any = None
        self._others: dict[torch.device, Any] = {}
        self._users: WeakSet[CudaRecording] = WeakSet()

    def handle(self) -> Any:
        """On the first device, for `capture_begin`. PyTorch takes none again that has no users."""
        if not self._users:
            self._first = torch.cuda.graph_pool_handle()
        return self._first

    def used_by(self, recording: CudaRecording) -> None:
        """As long as that is there."""
        self._users.add(recording)

    def on(self, device: torch.device) -> Any:
        """On another device, for `use_mem_pool`."""
        if device not in self._others:
            with torch.cuda.device(device):
                self._others[device] = torch.cuda.MemPool()
        return self._others[device]


class CudaRecording:
    """A CUDA graph over devices; the first one's stream is where it begins and ends."""

    def __init__(self, devices: Sequence[torch.device], pools: Pools) -> None:
        self._first, *self._others = dict.fromkeys(devices)
        self._pools = pools
        self._graph = torch.cuda.CUDAGraph()

    def generator(self, device: torch.device) -> torch.Generator:
        """Known to the graph: each replay hands its seed over."""
        made = torch.Generator(device)
        self._graph.register_generator_state(made)
        return made

    @contextmanager
    def lent(self, mine: torch.Generator) -> Iterator[None]:
        """By handing over the state itself: under capture it cannot be copied."""
        shared = shared_generator(mine.device)
        before = shared.graphsafe_get_state()
        shared.graphsafe_set_state(mine)
        try:
            yield
        finally:
            shared.graphsafe_set_state(before)

    def capture(self, body: Callable[[], Made]) -> Made:
        """On streams of its own, one a device."""
        for device in (self._first, *self._others):
            torch.cuda.synchronize(device)
        gc.collect()  # what is freed during a capture is not reused in it
        torch.cuda.empty_cache()
        origin = torch.cuda.Stream(self._first)
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self._first), torch.cuda.stream(origin):
                return self._captured(body, origin)
        finally:
            if collecting:
                gc.enable()

    def _captured(self, body: Callable[[], Made], origin: torch.cuda.Stream) -> Made:
        pool = self._pools.handle()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with ExitStack() as stack:
                for device in self._others:
                    stack.enter_context(self._joined(device, origin))
                made = body()
            self._graph.capture_end()
        except BaseException:
            self._give_up(origin)
            raise
        self._pools.used_by(self)
        return made

    @contextmanager
    def _joined(self, device: torch.device, origin: torch.cuda.Stream) -> Iterator[None]:
        """Within, another device is captured, too."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(origin)
        with torch.cuda.use_mem_pool(self._pools.on(device), device=device):
            before = torch.cuda.current_stream(device)
            torch.cuda.set_stream(stream)
            torch.cuda.set_device(self._first)
            try:
                yield
            finally:
                origin.wait_stream(stream)
                torch.cuda.set_stream(before)
                torch.cuda.set_device(self._first)

    def _give_up(self, origin: torch.cuda.Stream) -> None:
        """End the capture, whatever has become of it, so that PyTorch knows.

        If the driver has given it up, PyTorch goes no further: its allocators and its generators
        would think for ever that it goes on. So one of nothing is ended in its place.
        """
        try:
            self._graph.capture_end()
        except RuntimeError:
            with suppress(MissingExtra, RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says that the graph is empty
                _begin(origin)
                self._graph.capture_end()
        self._graph.reset()

    def replay(self) -> None:
        """On the caller's streams."""
        here = torch.cuda.current_stream(self._first)
        others = [torch.cuda.current_stream(device) for device in self._others]
        for stream in others:
            here.wait_stream(stream)
        with torch.cuda.device(self._first):
            self._graph.replay()
        for stream in others:
            stream.wait_stream(here)


def _begin(stream: torch.cuda.Stream) -> None:
    """A capture that PyTorch knows nothing of."""
    driver = driver_for("to end a capture that failed")
    driver.cuStreamBeginCapture(
        stream.cuda_stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    )
