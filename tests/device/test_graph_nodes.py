"""Memory nodes of a captured graph become kernels, shown with a fake of the driver's graphs."""

# ruff: noqa: N802, N815 (the functions of the driver)

from __future__ import annotations

from contextlib import nullcontext
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.device import graph_nodes, nvidia
from penstock.device.graph_nodes import KernelCall, build_ptx, plan_copy, plan_fill

STREAMS: Any = [
    SimpleNamespace(cuda_stream=rank, device=torch.device("cuda", 0)) for rank in (1, 2)
]


class NodeType(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2


class FakeDriver:
    """A graph with the calls of the driver that edit it. Nodes are numbers."""

    CUDA_VERSION = 13000
    CUgraph = CUgraphNode = staticmethod(lambda number: number)
    CUgraphNodeType = NodeType
    CUstreamUpdateCaptureDependencies_flags = SimpleNamespace(CU_STREAM_SET_CAPTURE_DEPENDENCIES=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE="type", CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL="device"
    )
    CUmemorytype = SimpleNamespace(CU_MEMORYTYPE_DEVICE=2)

    def __init__(self, version: int = 13000) -> None:
        self.version = version
        self.nodes: dict[int, tuple[NodeType, Any]] = {}
        self.edges: set[tuple[int, int]] = set()
        self.capturing: dict[int, list[int]] = {}  # by stream, the last nodes
        self.stream_of: dict[int, int] = {}
        self.calls: list[str] = []

    def add(self, node_type: NodeType, params: Any, *after: int) -> int:
        node = 1 + max(self.nodes, default=100)
        self.nodes[node] = node_type, params
        self.edges |= {(producer, node) for producer in after}
        return node

    def cuDriverGetVersion(self) -> Any:
        return 0, self.version

    def cuGraphGetNodes(self, graph: int, number: int) -> Any:
        return 0, list(self.nodes), len(self.nodes)

    def cuGraphGetEdges(self, graph: int, number: int) -> Any:
        pairs = sorted(self.edges)
        kinds: list[list[Any]] = [[]] if self.CUDA_VERSION >= 13000 else []
        return 0, [a for a, _ in pairs], [b for _, b in pairs], *kinds, len(pairs)

    def cuGraphNodeGetType(self, node: int) -> Any:
        return 0, self.nodes[node][0]

    def cuGraphMemsetNodeGetParams(self, node: int) -> Any:
        return 0, self.nodes[node][1]

    cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams

    def cuPointerGetAttribute(self, attribute: str, address: int) -> Any:
        on_device = address < 1 << 20  # other addresses are on the host
        return 0, (2 if on_device else 1) if attribute == "type" else 0

    def cuStreamBeginCaptureToGraph(
        self, stream: int, graph: int, after: list[int], kinds: None, number: int, mode: int
    ) -> Any:
        self.calls.append("cuStreamBeginCaptureToGraph")
        assert stream not in self.capturing
        assert number == len(after)
        self.capturing[stream] = after
        return (0,)

    def cuStreamUpdateCaptureDependencies(self, stream: int, after: list[int], *rest: Any) -> Any:
        kinds = (None,) if self.CUDA_VERSION >= 13000 else ()
        assert rest == (*kinds, len(after), 1)
        assert all(producer in self.nodes for producer in after)
        self.capturing[stream] = after
        return (0,)

    def cuLaunchKernel(self, kernel: str, *arguments: Any) -> Any:
        *_, stream, (values, _types), _extra = arguments
        node = self.add(NodeType.CU_GRAPH_NODE_TYPE_KERNEL, (kernel, *values))
        self.edges |= {(producer, node) for producer in self.capturing[stream]}
        self.capturing[stream] = [node]
        self.stream_of[node] = stream
        return (0,)

    def cuStreamGetCaptureInfo(self, stream: int) -> Any:
        last = self.capturing[stream]
        return 0, 1, 7, 9, last, [], len(last)

    def cuStreamEndCapture(self, stream: int) -> Any:
        del self.capturing[stream]
        return 0, 9

    def cuGraphAddDependencies(self, graph: int, sources: Any, targets: Any, *rest: Any) -> Any:
        assert rest == ((None, len(sources)) if self.CUDA_VERSION >= 13000 else (len(sources),))
        new_edges = set(zip(sources, targets, strict=True))
        assert len(new_edges) == len(sources)
        assert not new_edges & self.edges  # the driver refuses an edge that exists
        self.edges |= new_edges
        return (0,)

    def cuGraphDestroyNode(self, node: int) -> Any:
        del self.nodes[node]
        self.edges = {edge for edge in self.edges if node not in edge}
        return (0,)


def memset(address: int, size: int) -> Any:
    return SimpleNamespace(dst=address, value=0, elementSize=1, width=size, height=1, pitch=0)


def memcpy(target: int, source: int, size: int, offset: int = 0) -> Any:
    zeros = dict.fromkeys(("srcY", "srcZ", "dstXInBytes", "dstY", "dstZ"), 0)
    places = {"srcDevice": source, "dstDevice": target, "WidthInBytes": size}
    return SimpleNamespace(**zeros, **places, srcXInBytes=offset, Height=1, Depth=1)


KERNEL, MEMCPY, MEMSET = NodeType


@pytest.fixture(params=[13000, 12080])
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(FakeDriver, "CUDA_VERSION", request.param)
    for module in (graph_nodes, nvidia):
        monkeypatch.setattr(module, "load_driver", lambda purpose: fake)
    monkeypatch.setattr(graph_nodes, "_load_kernel", lambda name: name)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return fake


def test_memset_and_copy_of_a_rank_become_kernels_on_its_stream(driver: FakeDriver) -> None:
    stamps = [driver.add(KERNEL, "stamp") for _ in STREAMS]
    before = driver.add(KERNEL, "sum", stamps[1])
    cleared = driver.add(MEMSET, memset(256, 64), before)
    copied = driver.add(MEMCPY, memcpy(512, 1024, 8), cleared)
    after = driver.add(KERNEL, "add", copied)
    other = driver.add(KERNEL, "on the other rank", stamps[0], copied)
    streams = dict(zip(stamps, STREAMS, strict=True))

    assert graph_nodes.replace_memory_nodes(9, streams) == 2

    fill, copy = sorted(driver.stream_of)
    assert driver.calls.count("cuStreamBeginCaptureToGraph") == 1
    assert driver.nodes[fill] == (KERNEL, ("fill_16", 256, 0, 4))
    assert driver.nodes[copy] == (KERNEL, ("copy_4", 512, 1024, 2))
    assert set(driver.stream_of.values()) == {2}
    assert driver.edges == {
        (stamps[1], before), (before, fill), (fill, copy), (copy, after), (copy, other),
        (stamps[0], other),
    }  # fmt: skip
    assert not driver.capturing


def test_memory_nodes_of_two_ranks_that_follow_each_other(driver: FakeDriver) -> None:
    stamps = [driver.add(KERNEL, "stamp") for _ in STREAMS]
    first = driver.add(MEMSET, memset(256, 64), stamps[0])
    second = driver.add(MEMSET, memset(512, 64), first)
    sent = driver.add(KERNEL, "stamp", stamps[1], second)
    third = driver.add(MEMSET, memset(768, 64), sent)
    streams = {stamps[0]: STREAMS[0], stamps[1]: STREAMS[1], sent: STREAMS[1]}

    assert graph_nodes.replace_memory_nodes(9, streams) == 3

    one, two, three = sorted(driver.stream_of)
    assert [driver.stream_of[node] for node in (one, two, three)] == [1, 1, 2]
    assert not {first, second, third} & driver.nodes.keys()
    assert driver.edges == {
        (stamps[0], one), (one, two), (two, sent), (stamps[1], sent), (sent, three),
    }  # fmt: skip


def test_memory_nodes_whose_rank_is_not_certain_stay(driver: FakeDriver) -> None:
    stamps = [driver.add(KERNEL, "stamp") for _ in STREAMS]
    driver.add(MEMSET, memset(256, 64))  # before all ranks
    driver.add(MEMSET, memset(256, 64), *stamps)  # after both
    nodes, edges = dict(driver.nodes), set(driver.edges)
    streams = dict(zip(stamps, STREAMS, strict=True))
    assert graph_nodes.replace_memory_nodes(9, streams) == 0
    assert (driver.nodes, driver.edges) == (nodes, edges)


def test_copies_from_the_host_and_of_parts_stay(driver: FakeDriver) -> None:
    stamp = driver.add(KERNEL, "stamp")
    driver.add(MEMCPY, memcpy(256, 1 << 30, 64), stamp)
    driver.add(MEMCPY, memcpy(256, 1024, 64, offset=4), stamp)
    driver.add(MEMCPY, memcpy(256, 272, 64), stamp)  # it overlaps
    assert graph_nodes.replace_memory_nodes(9, {stamp: STREAMS[0]}) == 0
    assert len(driver.nodes) == 4


def test_old_driver_leaves_the_graph(driver: FakeDriver) -> None:
    driver.version = 12020
    stamp = driver.add(KERNEL, "stamp")
    driver.add(MEMSET, memset(256, 64), stamp)
    assert graph_nodes.replace_memory_nodes(9, {stamp: STREAMS[0]}) == 0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ((256, 0, 1, 8), KernelCall("fill_4", 256, 0, 2)),
        ((256, 0xAB, 1, 32), KernelCall("fill_16", 256, 0xABABABAB, 2)),
        ((256, 0x1234, 2, 2), KernelCall("fill_4", 256, 0x12341234, 1)),
        ((258, 0x1234, 2, 2), None),  # a pattern of two bytes, at no multiple of four
        ((258, 0x1212, 2, 1), KernelCall("fill_1", 258, 0x12121212, 2)),
        ((256, -1, 4, 1), KernelCall("fill_4", 256, 0xFFFFFFFF, 1)),
        ((256, 0, 1, 8, 2, 512), None),  # rows with gaps between them
        ((256, 0, 1, 8, 2, 8), KernelCall("fill_16", 256, 0, 1)),
        ((256, 0, 1, 0), None),
    ],
)
def test_kernel_of_a_memset(params: tuple[int, ...], expected: KernelCall | None) -> None:
    assert plan_fill(*params) == expected


def test_kernel_of_a_copy() -> None:
    assert plan_copy(512, 256, 32) == KernelCall("copy_16", 512, 256, 2)
    assert plan_copy(513, 256, 32) == KernelCall("copy_1", 513, 256, 32)
    assert plan_copy(256, 272, 32) is None
    assert KernelCall("copy_16", 0, 0, 1).blocks == 1
    assert KernelCall("copy_16", 0, 0, 10**9).blocks == 512


def test_kernels_have_a_name_for_each_unit() -> None:
    text = build_ptx().decode()
    assert [
        text.count(f".entry {name}_{unit}(") for name in ("fill", "copy") for unit in (16, 4, 1)
    ] == [1] * 6
    assert text.count("{") == text.count("}")
