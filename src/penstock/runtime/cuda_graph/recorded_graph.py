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

from penstock.device.cuda_driver import load_driver
from penstock.errors import MissingExtra
from penstock.stage.rng import get_shared_generator

BodyResult = TypeVar("BodyResult")


class RecordedGraph(Protocol):
    """One step, to be captured once and replayed often."""

    def create_generator(self, device: torch.device) -> torch.Generator:
        """Before the capture: one that goes on from where it stands when a replay begins."""

    def replace_shared_generator(self, generator: torch.Generator) -> AbstractContextManager[None]:
        """Within, the generator that all threads share gives the numbers of such a one."""

    def capture(self, body: Callable[[], BodyResult]) -> BodyResult:
        """Record all that the body asks devices for; its tensors stay where they are."""

    def replay(self) -> None:
        """Do all of it again: after what was asked for before, and before what is asked next."""


class GraphMemoryPools:
    """The memory that the recordings of one pipe have in common: only one is replayed at a time."""

    def __init__(self) -> None:
        self._first_device_pool: Any = None
        self._other_device_pools: dict[torch.device, Any] = {}
        self._graphs: WeakSet[RecordedCudaGraph] = WeakSet()

    def get_first_device_pool(self) -> Any:
        """On the first device, for `capture_begin`. PyTorch takes none again that has no users."""
        if not self._graphs:
            self._first_device_pool = torch.cuda.graph_pool_handle()
        return self._first_device_pool

    def add_graph(self, graph: RecordedCudaGraph) -> None:
        """As long as that is there."""
        self._graphs.add(graph)

    def get_pool(self, device: torch.device) -> Any:
        """On another device, for `use_mem_pool`."""
        if device not in self._other_device_pools:
            with torch.cuda.device(device):
                self._other_device_pools[device] = torch.cuda.MemPool()
        return self._other_device_pools[device]


class RecordedCudaGraph:
    """A CUDA graph over devices; the first one's stream is where it begins and ends."""

    def __init__(self, devices: Sequence[torch.device], pools: GraphMemoryPools) -> None:
        self._first_device, *self._other_devices = dict.fromkeys(devices)
        self._pools = pools
        self._graph = torch.cuda.CUDAGraph()

    def create_generator(self, device: torch.device) -> torch.Generator:
        """Known to the graph: each replay hands its seed over."""
        made = torch.Generator(device)
        self._graph.register_generator_state(made)
        return made

    @contextmanager
    def replace_shared_generator(self, generator: torch.Generator) -> Iterator[None]:
        """By handing over the state itself: under capture it cannot be copied."""
        shared = get_shared_generator(generator.device)
        before = shared.graphsafe_get_state()
        shared.graphsafe_set_state(generator)
        try:
            yield
        finally:
            shared.graphsafe_set_state(before)

    def capture(self, body: Callable[[], BodyResult]) -> BodyResult:
        """On streams of its own, one a device."""
        for device in (self._first_device, *self._other_devices):
            torch.cuda.synchronize(device)
        gc.collect()  # what is freed during a capture is not reused in it
        torch.cuda.empty_cache()
        origin = torch.cuda.Stream(self._first_device)
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self._first_device), torch.cuda.stream(origin):
                return self._capture_from(body, origin)
        finally:
            if collecting:
                gc.enable()

    def _capture_from(
        self, body: Callable[[], BodyResult], origin: torch.cuda.Stream
    ) -> BodyResult:
        pool = self._pools.get_first_device_pool()
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with ExitStack() as stack:
                for device in self._other_devices:
                    stack.enter_context(self._capture_device(device, origin))
                made = body()
            self._graph.capture_end()
        except BaseException:
            self._abort_capture(origin)
            raise
        self._pools.add_graph(self)
        return made

    @contextmanager
    def _capture_device(self, device: torch.device, origin: torch.cuda.Stream) -> Iterator[None]:
        """Within, another device is captured, too."""
        stream = torch.cuda.Stream(device)
        stream.wait_stream(origin)
        with torch.cuda.use_mem_pool(self._pools.get_pool(device), device=device):
            before = torch.cuda.current_stream(device)
            torch.cuda.set_stream(stream)
            torch.cuda.set_device(self._first_device)
            try:
                yield
            finally:
                origin.wait_stream(stream)
                torch.cuda.set_stream(before)
                torch.cuda.set_device(self._first_device)

    def _abort_capture(self, origin: torch.cuda.Stream) -> None:
        """End the capture, whatever has become of it, so that PyTorch knows.

        If the driver has given it up, PyTorch goes no further: its allocators and its generators
        would think for ever that it goes on. So one of nothing is ended in its place.
        """
        try:
            self._graph.capture_end()
        except RuntimeError:
            with suppress(MissingExtra, RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it says that the graph is empty
                _begin_driver_capture(origin)
                self._graph.capture_end()
        self._graph.reset()

    def replay(self) -> None:
        """On the caller's streams."""
        here = torch.cuda.current_stream(self._first_device)
        others = [torch.cuda.current_stream(device) for device in self._other_devices]
        for stream in others:
            here.wait_stream(stream)
        with torch.cuda.device(self._first_device):
            self._graph.replay()
        for stream in others:
            stream.wait_stream(here)


def _begin_driver_capture(stream: torch.cuda.Stream) -> None:
    """A capture that PyTorch knows nothing of."""
    driver = load_driver("to end a capture that failed")
    driver.cuStreamBeginCapture(
        stream.cuda_stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    )
