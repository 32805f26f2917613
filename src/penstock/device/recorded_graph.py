"""A CUDA graph: what records a step, or other work, and replays it.

During a capture nothing runs. Kernels become nodes of the graph, and the events that order the
streams of the ranks become its edges. A replay launches all of it at once, on the stream that is
current then.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

from penstock.device.accelerator import get_default_generator
from penstock.device.nvidia import load_driver
from penstock.errors import MissingExtra

BodyResult = TypeVar("BodyResult")


class RecordedGraph(Protocol):
    """A graph of one step: captured once, then replayed. The tests have one for the CPU."""

    def create_generator(self, device: torch.device) -> torch.Generator:
        """Create a generator before the capture. A replay draws from the state it has by then."""

    def replace_shared_generator(self, generator: torch.Generator) -> AbstractContextManager[None]:
        """Let PyTorch's default generator draw from a created one, within a context."""

    def capture(self, body: Callable[[], BodyResult]) -> BodyResult:
        """Record all device work of the body. The tensors it made keep their addresses."""

    def replay(self) -> None:
        """Run the recorded work again, in order with the work before and after this call."""


class GraphMemoryPools:
    """The memory that all graphs of one pipe share. Only one of them is replayed at a time."""

    def __init__(self) -> None:
        self._first_device_pool: Any = None
        self._other_device_pools: dict[torch.device, Any] = {}
        self._graphs: WeakSet[RecordedCudaGraph] = WeakSet()

    def get_first_device_pool(self) -> Any:
        """Return the pool of the first device, for `CUDAGraph.capture_begin`."""
        # PyTorch forgets a pool when the last graph that uses it is freed, and then refuses its
        # handle. So a new handle is taken whenever no graph is left.
        if not self._graphs:
            self._first_device_pool = torch.cuda.graph_pool_handle()
        return self._first_device_pool

    def add_graph(self, graph: RecordedCudaGraph) -> None:
        """Count a graph as a user of the pools for as long as it lives."""
        self._graphs.add(graph)

    def get_pool(self, device: torch.device) -> Any:
        """Return the pool of another device, for `torch.cuda.use_mem_pool`."""
        if device not in self._other_device_pools:
            with torch.cuda.device(device):
                self._other_device_pools[device] = torch.cuda.MemPool()
        return self._other_device_pools[device]


class RecordedCudaGraph:
    """A CUDA graph over one or more devices. It begins and ends on a stream of the first one."""

    def __init__(self, devices: Sequence[torch.device], pools: GraphMemoryPools) -> None:
        self._first_device, *self._other_devices = dict.fromkeys(devices)
        self._pools = pools
        self._graph = torch.cuda.CUDAGraph()

    def create_generator(self, device: torch.device) -> torch.Generator:
        """Create a generator that is registered with the graph: each replay reads its seed."""
        generator = torch.Generator(device)
        self._graph.register_generator_state(generator)
        return generator

    @contextmanager
    def replace_shared_generator(self, generator: torch.Generator) -> Iterator[None]:
        """Let the default generator share the state of `generator` inside the context.

        Both refer to one state object, because PyTorch refuses to copy a state during a capture.
        """
        shared = get_default_generator(generator.device)
        before = shared.graphsafe_get_state()
        shared.graphsafe_set_state(generator)
        try:
            yield
        finally:
            shared.graphsafe_set_state(before)

    def capture(self, body: Callable[[], BodyResult], *, frees_memory: bool = True) -> BodyResult:
        """Record the device work of the body, on a new stream for each device.

        Args:
            body: The function that does the work.
            frees_memory: Whether to free unused memory first, which takes a tenth of a second.
        """
        for device in (self._first_device, *self._other_devices):
            torch.cuda.synchronize(device)
        # Memory that is freed during the capture cannot be reused in it: free it now. Automatic
        # collections are off meanwhile, because freeing CUDA objects in the middle of a capture may
        # be a call that CUDA forbids there.
        if frees_memory:
            gc.collect()
            torch.cuda.empty_cache()
        origin = torch.cuda.Stream(self._first_device)
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.device(self._first_device), torch.cuda.stream(origin):
                return self._capture_from(body, origin)
        finally:
            if was_collecting:
                gc.enable()

    def _capture_from(
        self, body: Callable[[], BodyResult], origin: torch.cuda.Stream
    ) -> BodyResult:
        pool = self._pools.get_first_device_pool()
        # "thread_local": other threads of the caller, a data loader say, may go on using CUDA.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with ExitStack() as stack:
                for device in self._other_devices:
                    stack.enter_context(self._capture_device(device, origin))
                result = body()
            self._graph.capture_end()
        except BaseException:
            self._abort_capture(origin)
            raise
        self._pools.add_graph(self)
        return result

    @contextmanager
    def _capture_device(self, device: torch.device, origin: torch.cuda.Stream) -> Iterator[None]:
        """Capture another device, too, for the duration of the context.

        A stream joins the capture by waiting for `origin`, and must be joined to `origin` again
        before the capture ends.
        """
        stream = torch.cuda.Stream(device)
        stream.wait_stream(origin)
        with torch.cuda.use_mem_pool(self._pools.get_pool(device), device=device):
            before = torch.cuda.current_stream(device)
            # `set_stream` also makes the stream's device current.
            torch.cuda.set_stream(stream)
            torch.cuda.set_device(self._first_device)
            try:
                yield
            finally:
                origin.wait_stream(stream)
                torch.cuda.set_stream(before)
                torch.cuda.set_device(self._first_device)

    def _abort_capture(self, origin: torch.cuda.Stream) -> None:
        """End a failed capture, so that PyTorch knows that it has ended.

        If the driver has invalidated the capture, `capture_end` raises before it has notified
        PyTorch's allocators and generators. They would treat the capture as running forever: they
        would free no memory and draw no random numbers. So this method begins an empty capture on
        the same stream through the driver, and `capture_end` ends that one.
        """
        try:
            self._graph.capture_end()
        except RuntimeError:
            with suppress(MissingExtra, RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch warns that the graph is empty
                _begin_driver_capture(origin)
                self._graph.capture_end()
        self._graph.reset()

    def replay(self) -> None:
        """Launch the graph on the current stream of the first device.

        It waits for the current streams of the other devices, and they wait for it.
        """
        first_stream = torch.cuda.current_stream(self._first_device)
        other_streams = [torch.cuda.current_stream(device) for device in self._other_devices]
        for stream in other_streams:
            first_stream.wait_stream(stream)
        with torch.cuda.device(self._first_device):
            self._graph.replay()
        for stream in other_streams:
            stream.wait_stream(first_stream)


def _begin_driver_capture(stream: torch.cuda.Stream) -> None:
    """Begin a capture through the driver's own API. PyTorch does not see it."""
    driver = load_driver("ending a capture that failed")
    driver.cuStreamBeginCapture(
        stream.cuda_stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    )
