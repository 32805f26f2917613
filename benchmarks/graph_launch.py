"""Measure what the driver takes to launch a CUDA graph, by its nodes, branches and flags.

    python benchmarks/graph_launch.py                    a captured step, and tiny kernels
    python benchmarks/graph_launch.py --nodes 1000 8000

First the captured step of `benchmarks/graph.py` with eight devices and 128 rows: how many nodes it
has, of which kernels, and its launch. Then graphs of tiny kernels: one chain; eight branches that
wait for each other, as the ranks of a captured step do; and eight chains that do not, as one graph
and as eight. These are on streams of the whole GPU, and of eight groups of multiprocessors.

Each graph is instantiated with several flags. A launch is timed on an idle device, as the median
milliseconds until the call of cuGraphLaunch returns, on a stream of its own; then on the default
stream; then as the body of a conditional node, which the driver keeps on the device.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import penstock
from penstock.device.nvidia import check_status, load_driver

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bench import GRAPH, Bench
from benchmarks.virtual import GpuLock, blocks_of, head, line, needs_cuda

BRANCHES = 8
KERNELS_BETWEEN_EVENTS = 15  # about as many as in one action of a captured step

HEADS = [
    "graph",
    "nodes",
    "edges",
    "flags",
    "instantiate, ms",
    "launch, ms",
    "us a node",
    "run, ms",
]


def flags_by_name(driver: Any) -> dict[str, int]:
    flags = driver.CUgraphInstantiate_flags
    return {
        "none": 0,
        "auto free": int(flags.CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH),
        "node priority": int(flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY),
        "device launch": int(flags.CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH),
    }


def capture(body: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        body()
    return graph


def build_kernels(streams: Sequence[torch.cuda.Stream], nodes: int, joined: bool) -> Any:
    """Return a function that launches tiny kernels on all streams, in turns.

    If `joined`, each stream waits for the one before it after every few kernels.
    """
    numbers = [torch.zeros(1, device="cuda:0") for _ in streams]

    def launch_kernels() -> None:
        origin = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(origin)
        for _ in range(max(1, nodes // (len(streams) * KERNELS_BETWEEN_EVENTS))):
            events = []
            for stream, number in zip(streams, numbers, strict=True):
                with torch.cuda.stream(stream):
                    for _ in range(KERNELS_BETWEEN_EVENTS):
                        number.add_(1)
                    events.append(stream.record_event())
            if joined:
                for index, stream in enumerate(streams):
                    stream.wait_event(events[index - 1])
        for stream in streams:
            origin.wait_stream(stream)

    return launch_kernels


def count_nodes(driver: Any, raw: Any) -> tuple[int, int, list[Any]]:
    number = check_status(driver.cuGraphGetNodes(raw, 0), "counting nodes")[1]
    nodes = check_status(driver.cuGraphGetNodes(raw, number), "listing nodes")[0]
    edges = driver.cuGraphGetEdges(raw, 0)
    return number, int(edges[-1]), list(nodes)


def time_launch(
    driver: Any, raw: Any, flags: int, stream: Any, times: int
) -> tuple[float, float, float]:
    """Return the milliseconds to instantiate a graph, to launch it, and until it has run."""
    start = perf_counter()
    executable = check_status(driver.cuGraphInstantiate(raw, flags), "instantiating a graph")
    instantiated = 1e3 * (perf_counter() - start)
    check_status(driver.cuGraphUpload(executable, stream), "uploading a graph")
    launches, runs = [], []
    for index in range(times + 2):
        torch.cuda.synchronize()
        start = perf_counter()
        result = driver.cuGraphLaunch(executable, stream)
        launched = perf_counter()
        torch.cuda.synchronize()
        end = perf_counter()
        check_status(result, "launching a graph")
        if index > 1:
            launches.append(1e3 * (launched - start))
            runs.append(1e3 * (end - start))
    driver.cuGraphExecDestroy(executable)
    return instantiated, median(launches), median(runs)


def print_rows(name: str, graphs: Sequence[torch.cuda.CUDAGraph], times: int) -> None:
    """Print the launch of one graph in several ways, or of several graphs in turn."""
    driver = load_driver("timing the launch of a graph")
    default_stream = torch.cuda.current_stream().cuda_stream
    own_stream = torch.cuda.Stream().cuda_stream
    raws = [driver.CUgraph(graph.raw_cuda_graph()) for graph in graphs]
    counts = [count_nodes(driver, raw)[:2] for raw in raws]
    nodes, edges = (sum(column) for column in zip(*counts, strict=True))
    ways: dict[str, Callable[[], tuple[float, float, float]]] = {
        name: partial(time_launch, driver, raws[0], flags, own_stream, times)
        for name, flags in flags_by_name(driver).items()
    }
    ways["default stream"] = partial(time_launch, driver, raws[0], 0, default_stream, times)
    ways["inside an if"] = lambda: time_launch(
        driver, put_into_condition(driver, raws[0]), 0, own_stream, times
    )
    if len(raws) > 1:
        ways = {"none": partial(launch_in_turn, driver, raws, times)}
    for flag_name, measure in ways.items():
        try:
            cells = measure()
        except Exception as error:  # the other rows are still worth their time
            print(line([name, nodes, edges, flag_name, f"{error}"[:160]]), flush=True)
            torch.cuda.synchronize()
            continue
        instantiated, launch, run = cells
        numbers = (
            f"{instantiated:.1f}",
            f"{launch:.3f}",
            f"{1e3 * launch / nodes:.3f}",
            f"{run:.2f}",
        )
        print(line([name, nodes, edges, flag_name, *numbers]), flush=True)


def put_into_condition(driver: Any, raw: Any) -> Any:
    """Return a graph with one node: a condition that always holds, whose body is the given graph.

    The driver keeps the body of a condition on the device, which launches it without the host.
    """
    doing = "building a conditional node"
    graph = check_status(driver.cuGraphCreate(0), doing)
    context = check_status(driver.cuCtxGetCurrent(), doing)
    assign_default = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT
    made = driver.cuGraphConditionalHandleCreate(graph, context, 1, assign_default)
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = check_status(made, doing)
    params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
    params.conditional.size = 1
    params.conditional.ctx = context
    try:
        added = driver.cuGraphAddNode(graph, None, None, 0, params)  # CUDA 13
    except TypeError:
        added = driver.cuGraphAddNode(graph, None, 0, params)
    check_status(added, doing)
    body = params.conditional.phGraph_out[0]
    check_status(driver.cuGraphAddChildGraphNode(body, None, 0, raw), doing)
    return graph


def launch_in_turn(driver: Any, raws: Sequence[Any], times: int) -> tuple[float, float, float]:
    """Return the same for several graphs, each on a stream of its own."""
    places = penstock.virtual_devices("cuda:0", len(raws))
    executables = [check_status(driver.cuGraphInstantiate(raw, 0), "instantiating") for raw in raws]
    streams = [place.compute_stream.cuda_stream for place in places]
    launches, runs = [], []
    for _ in range(times + 2):
        torch.cuda.synchronize()
        start = perf_counter()
        for executable, stream in zip(executables, streams, strict=True):
            driver.cuGraphLaunch(executable, stream)
        launched = perf_counter()
        torch.cuda.synchronize()
        launches.append(1e3 * (launched - start))
        runs.append(1e3 * (perf_counter() - start))
    return float("nan"), median(launches[2:]), median(runs[2:])


def measure_tiny_kernels(nodes: int, times: int) -> None:
    plain = [torch.cuda.Stream() for _ in range(BRANCHES)]
    groups = [place.compute_stream for place in penstock.virtual_devices("cuda:0", BRANCHES)]
    for where, streams in (("whole GPU", plain), ("groups", groups)):
        shapes = [
            ("one chain", streams[:1], False),
            (f"{BRANCHES} branches, joined", streams, True),
            (f"{BRANCHES} branches, apart", streams, False),
        ]
        for name, used, joined in shapes:
            graph = capture(build_kernels(used, nodes, joined), torch.cuda.Stream())
            print_rows(f"{name}, {where}", [graph], times)
    chains = [
        capture(build_kernels([stream], nodes // BRANCHES, False), torch.cuda.Stream())
        for stream in groups
    ]
    print_rows(f"{BRANCHES} chains as {BRANCHES} graphs, groups", chains, times)


def measure_step(rows: int, times: int) -> None:
    """Print the nodes and the launch of the captured step of `benchmarks/graph.py`."""
    graphs: list[torch.cuda.CUDAGraph] = []
    graph_class = torch.cuda.CUDAGraph

    def keep() -> torch.cuda.CUDAGraph:
        graphs.append(graph_class(keep_graph=True))
        return graphs[-1]

    x = torch.randn(32 * rows, 2048, device="cuda:0", dtype=torch.bfloat16)
    bench = Bench(blocks_of(8, 2048), x, 32, times)
    places = penstock.virtual_devices("cuda:0", BRANCHES)
    torch.cuda.CUDAGraph = keep  # type: ignore[assignment,misc]
    try:
        pipe = bench._pipe(GRAPH, places)
        for _ in range(3):
            pipe.step(x)
    finally:
        torch.cuda.CUDAGraph = graph_class  # type: ignore[misc]
    print_rows(f"step, {rows} rows", graphs[-1:], times)
    driver = load_driver("counting the nodes of a graph")
    _, _, nodes = count_nodes(driver, driver.CUgraph(graphs[-1].raw_cuda_graph()))
    names = Counter(name_node(driver, node) for node in nodes)
    actions = sum(map(len, pipe.forecast().program.lanes))
    print(f"\n{actions} actions; nodes by kernel:\n")
    for name, number in names.most_common(20):
        print(f"{number:6}  {name[:110]}", flush=True)


def name_node(driver: Any, node: Any) -> str:
    kind = check_status(driver.cuGraphNodeGetType(node), "reading a node")
    if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        return str(kind.name)
    try:
        params = check_status(driver.cuGraphKernelNodeGetParams(node), "reading a kernel")
        if int(params.func):
            name = check_status(driver.cuFuncGetName(params.func), "reading a name")
        else:
            name = check_status(driver.cuKernelGetName(params.kern), "reading a name")
        return bytes(name).decode()
    except Exception as error:
        return f"a kernel: {type(error).__name__}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1920, 7680])
    parser.add_argument("--rows", type=int, nargs="*", default=[128])
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--lock", help="a file by which processes that share the GPU take turns")
    args = parser.parse_args()
    needs_cuda()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}\n")
    print(head(HEADS), flush=True)
    with GpuLock(args.lock).hold(exclusive=True):
        for rows in args.rows:
            measure_step(rows, args.times)
        for nodes in args.nodes:
            measure_tiny_kernels(nodes, args.times)


if __name__ == "__main__":
    main()
