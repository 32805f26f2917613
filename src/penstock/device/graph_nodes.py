"""Replace the memory nodes of a captured step by kernels, so that the driver launches it faster.

A launch of a CUDA graph hands the driver's prepared chains of kernels to the device. A memset or a
memcpy between two kernels is not part of a chain. The sums of PyTorch need one memset each, to
clear the counter of their blocks, so a step has hundreds of them. `benchmarks/graph_launch.py`
measures what they cost.

A new node has to run on the streaming multiprocessors of its rank, like the node that it replaces.
The driver chooses them by the stream on which a node is captured. So each new kernel is captured
into the graph on the stream of the rank:

    before    kernel ── memset ── kernel            the rank is that of the last timestamp before
    after     kernel ── fill ──── kernel

Memory nodes whose rank is not certain stay, and so do copies between devices, or from the host.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from penstock.device.nvidia import check_status, find_last_node, load_driver

_EDITING = "replacing the memory nodes of a captured step"
_FIRST_VERSION = 12030  # of drivers that can capture into a graph that exists
_THREADS, _MAX_BLOCKS = 256, 512
_UNITS = (16, 4, 1)  # bytes that a thread moves at once; the largest one that fits is used

# Each thread moves a unit, and then the unit that is one grid of threads further.
_KERNEL_PTX = """
.visible .entry {name}_{unit}(.param .u64 p_to, .param .u64 p_from, .param .u64 p_units)
{{
    .reg .pred %is_done;
    .reg .b16 %half;
    .reg .b32 %value, %other, %third, %fourth, %thread, %block, %threads, %blocks;
    .reg .b64 %to, %from, %units, %index, %step, %place, %offset;
    ld.param.u64 %to, [p_to];
    ld.param.u64 %from, [p_from];
    ld.param.u64 %units, [p_units];
    cvta.to.global.u64 %to, %to;
    {before_loop}
    mov.u32 %thread, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mov.u32 %blocks, %nctaid.x;
    cvt.u64.u32 %offset, %thread;
    mul.wide.u32 %index, %block, %threads;
    add.u64 %index, %index, %offset;
    mul.wide.u32 %step, %blocks, %threads;
next_unit:
    setp.ge.u64 %is_done, %index, %units;
    @%is_done bra finished;
    mul.lo.u64 %offset, %index, {unit};
    add.u64 %place, %to, %offset;
    {in_loop}
    add.u64 %index, %index, %step;
    bra next_unit;
finished:
    ret;
}}
"""
_STORES = {
    16: "st.global.v4.b32 [%place], {%value, %other, %third, %fourth};",
    4: "st.global.b32 [%place], %value;",
    1: "st.global.b8 [%place], %half;",
}
_LOADS = {
    16: "ld.global.v4.b32 {%value, %other, %third, %fourth}, [%offset];",
    4: "ld.global.b32 %value, [%offset];",
    1: "ld.global.b8 %half, [%offset];",
}


def build_ptx() -> bytes:
    """Return the kernels `fill_N` and `copy_N` for units of N bytes, which the driver compiles.

    The second argument of `fill_N` is a pattern of four bytes, that of `copy_N` an address.
    """
    pattern = (
        "cvt.u32.u64 %value, %from;\n    mov.b32 %other, %value;\n    mov.b32 %third, %value;\n"
        "    mov.b32 %fourth, %value;\n    cvt.u16.u32 %half, %value;"
    )
    kernels = [".version 7.0\n.target sm_70\n.address_size 64\n"]
    for unit in _UNITS:
        kernels.append(
            _KERNEL_PTX.format(name="fill", unit=unit, before_loop=pattern, in_loop=_STORES[unit])
        )
        load = f"add.u64 %offset, %from, %offset;\n    {_LOADS[unit]}\n    {_STORES[unit]}"
        kernels.append(
            _KERNEL_PTX.format(
                name="copy",
                unit=unit,
                before_loop="cvta.to.global.u64 %from, %from;",
                in_loop=load,
            )
        )
    return "".join(kernels).encode()


class KernelCall(NamedTuple):
    """A kernel that does the work of a memory node: its name, its arguments and its blocks."""

    kernel: str
    to: int
    source: int
    units: int

    @property
    def blocks(self) -> int:
        """The number of thread blocks."""
        return min(-(-self.units // _THREADS), _MAX_BLOCKS)


def plan_fill(
    address: int, value: int, element_size: int, width: int, height: int = 1, pitch: int = 0
) -> KernelCall | None:
    """Return the kernel that does the work of a memset, or None if there is none.

    >>> plan_fill(address=256, value=0, element_size=1, width=8)
    KernelCall(kernel='fill_4', to=256, source=0, units=2)
    """
    size = width * element_size
    if not size or (height > 1 and pitch != size):
        return None
    size *= height
    value &= (1 << 8 * element_size) - 1
    pattern = value * {1: 0x01010101, 2: 0x00010001, 4: 1}[element_size]
    for unit in _UNITS:
        is_pattern_whole = unit >= 4 or pattern == (pattern & 0xFF) * 0x01010101
        if not (address | size) % unit and is_pattern_whole:
            return KernelCall(f"fill_{unit}", address, pattern, size // unit)
    return None


def plan_copy(target: int, source: int, size: int) -> KernelCall | None:
    """Return the kernel that copies so many bytes on one device, or None if it would overlap.

    >>> plan_copy(target=512, source=256, size=32)
    KernelCall(kernel='copy_16', to=512, source=256, units=2)
    """
    if not size or abs(target - source) < size:
        return None
    unit = next(unit for unit in _UNITS if not (target | source | size) % unit)
    return KernelCall(f"copy_{unit}", target, source, size // unit)


class NodeEdges:
    """The edges of a graph, by the numbers of its nodes."""

    def __init__(self, edges: Sequence[tuple[int, int]]) -> None:
        self.producers: dict[int, list[int]] = defaultdict(list)
        self.consumers: dict[int, list[int]] = defaultdict(list)
        for producer, consumer in edges:
            self.producers[consumer].append(producer)
            self.consumers[producer].append(consumer)

    def find_last(self, node: int, marked: Mapping[int, Any]) -> int | None:
        """Return the last marked node before this one, if the nodes between them are a chain."""
        while node not in marked:
            producers = self.producers.get(node, ())
            if len(producers) != 1:
                return None
            (node,) = producers
        return node


# ---- the driver ----------------------------------------------------------------------------------


def replace_memory_nodes(graph: int, streams: Mapping[int, torch.cuda.Stream]) -> int:
    """Replace memsets and memcpys of a captured graph by kernels. Return how many.

    Args:
        graph: The address of the graph, which was not instantiated yet.
        streams: For some nodes, the stream that they were captured on. The nodes that follow one of
            them in a chain are on the same stream.
    """
    driver = load_driver(_EDITING)
    if check_status(driver.cuDriverGetVersion(), _EDITING) < _FIRST_VERSION:
        return 0
    raw = driver.CUgraph(graph)
    _, number = check_status(driver.cuGraphGetNodes(raw, 0), _EDITING)
    nodes, _ = check_status(driver.cuGraphGetNodes(raw, number), _EDITING)
    edges = _read_edges(driver, raw)
    by_stream: dict[int, dict[int, KernelCall]] = defaultdict(dict)  # and by node
    for node in map(int, nodes):
        call = _plan_node(driver, node)
        marked = None if call is None else edges.find_last(node, streams)
        if call is not None and marked is not None:
            by_stream[streams[marked].cuda_stream][node] = call
    # A capture into a large graph takes milliseconds to begin and to end, and so does a change of
    # its edges. So there is one capture for each stream, and one change of edges for all nodes.
    new_nodes: dict[int, int] = {}  # by the node that they replace
    devices = {stream.cuda_stream: stream.device for stream in streams.values()}
    for handle, calls in by_stream.items():
        with torch.cuda.device(devices[handle]):
            new_nodes |= _add_kernels(driver, raw, handle, calls, edges)
    # The new nodes depend on those that the old ones depend on, which may be old nodes, too.
    added = [
        (new_node, new_nodes.get(consumer, consumer))
        for node, new_node in new_nodes.items()
        for consumer in edges.consumers[node]
    ]
    _add_edges(driver, raw, added)
    for node in new_nodes:
        check_status(driver.cuGraphDestroyNode(driver.CUgraphNode(node)), _EDITING)
    return len(new_nodes)


def _read_edges(driver: Any, graph: Any) -> NodeEdges:
    *_, number = check_status(driver.cuGraphGetEdges(graph, 0), _EDITING)
    sources, targets, *_ = check_status(driver.cuGraphGetEdges(graph, number), _EDITING)
    return NodeEdges(list(zip(map(int, sources), map(int, targets), strict=True)))


def _plan_node(driver: Any, number: int) -> KernelCall | None:
    """Return the kernel that does the work of a node, or None if the node stays."""
    node, types = driver.CUgraphNode(number), driver.CUgraphNodeType
    node_type = check_status(driver.cuGraphNodeGetType(node), _EDITING)
    if node_type == types.CU_GRAPH_NODE_TYPE_MEMSET:
        p = check_status(driver.cuGraphMemsetNodeGetParams(node), _EDITING)
        return plan_fill(int(p.dst), p.value, p.elementSize, p.width, p.height, p.pitch)
    if node_type == types.CU_GRAPH_NODE_TYPE_MEMCPY:
        p = check_status(driver.cuGraphMemcpyNodeGetParams(node), _EDITING)
        offsets = p.srcXInBytes, p.srcY, p.srcZ, p.dstXInBytes, p.dstY, p.dstZ
        if p.Height > 1 or p.Depth > 1 or any(offsets):
            return None
        source, target = int(p.srcDevice), int(p.dstDevice)
        source_device = _find_device(driver, source)
        if source_device is None or source_device != _find_device(driver, target):
            return None
        return plan_copy(target, source, p.WidthInBytes)
    return None


def _find_device(driver: Any, address: int) -> int | None:
    """Return the index of the device that has an address, or None if it is not on a device."""
    attributes = driver.CUpointer_attribute
    answers = [
        driver.cuPointerGetAttribute(attribute, address)
        for attribute in (
            attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        )
    ]
    if any(int(status) for status, _ in answers):
        return None
    (_, memory_type), (_, device) = answers
    is_device = int(memory_type) == int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    return int(device) if is_device else None


def _add_kernels(
    driver: Any, graph: Any, stream: int, calls: Mapping[int, KernelCall], edges: NodeEdges
) -> dict[int, int]:
    """Capture kernels into a graph, each after the producers of a node. Return them by node."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    flags = driver.CUstreamUpdateCaptureDependencies_flags
    replaced = int(flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
    # Since CUDA 13, these functions take the kinds of edges, too. None means plain ones.
    kinds = (None,) if driver.CUDA_VERSION >= 13000 else ()
    new_nodes: dict[int, int] = {}
    begun = driver.cuStreamBeginCaptureToGraph(stream, graph, [], None, 0, mode)
    check_status(begun, _EDITING)
    try:
        for node, call in calls.items():
            after = [driver.CUgraphNode(producer) for producer in edges.producers[node]]
            updated = driver.cuStreamUpdateCaptureDependencies(
                stream, after, *kinds, len(after), replaced
            )
            check_status(updated, _EDITING)
            _launch_kernel(driver, stream, call)
            new_nodes[node] = find_last_node(stream)
    finally:
        ended = driver.cuStreamEndCapture(stream)
    check_status(ended, _EDITING)
    return new_nodes


def _launch_kernel(driver: Any, stream: int, call: KernelCall) -> None:
    arguments = (call.to, call.source, call.units), (ctypes.c_uint64,) * 3
    grid, block = (call.blocks, 1, 1), (_THREADS, 1, 1)
    kernel = _load_kernel(call.kernel)
    launched = driver.cuLaunchKernel(kernel, *grid, *block, 0, stream, arguments, 0)
    check_status(launched, _EDITING)


def _add_edges(driver: Any, graph: Any, pairs: Sequence[tuple[int, int]]) -> None:
    """Let the second node of each pair wait for the first one."""
    sources = [driver.CUgraphNode(producer) for producer, _ in pairs]
    targets = [driver.CUgraphNode(consumer) for _, consumer in pairs]
    kinds = (None,) if driver.CUDA_VERSION >= 13000 else ()
    if pairs:
        added = driver.cuGraphAddDependencies(graph, sources, targets, *kinds, len(pairs))
        check_status(added, _EDITING)


@cache
def _load_library() -> Any:
    """Load the kernels once per process. The driver makes them available in every context."""
    driver = load_driver(_EDITING)
    loaded = driver.cuLibraryLoadData(build_ptx() + b"\0", [], [], 0, [], [], 0)
    return check_status(loaded, _EDITING)


@cache
def _load_kernel(name: str) -> Any:
    driver = load_driver(_EDITING)
    kernel = check_status(driver.cuLibraryGetKernel(_load_library(), name.encode()), _EDITING)
    return driver.CUfunction(int(kernel))
