"""Random valid schedules, and a naive lowering that deadlocks where sends block."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock import Action, Compute, Op, Program, Recv, Schedule, Send, StageGraph
from penstock.schedules.ir import consumes, follows, produces

WAYS = ((Op.F, Op.B), (Op.F, Op.I, Op.W), (Op.F, Op.R, Op.B), (Op.F, Op.R, Op.I, Op.W))


@st.composite
def graphs(draw: st.DrawFn, stages: int) -> StageGraph:
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    skips = draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []
    return StageGraph.chain(stages, skips)


@st.composite
def sound_schedules(draw: st.DrawFn) -> tuple[Schedule, StageGraph]:
    """Draw a graph and a sound schedule with any placement, and full or split backwards."""
    stages = draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 4))
    graph = draw(graphs(stages))
    return draw(orders(graph, stages, ranks, chunks)), graph


@st.composite
def orders(draw: st.DrawFn, graph: StageGraph, stages: int, ranks: int, chunks: int) -> Schedule:
    """Draw a schedule: any placement, B or I and W, actions in a random order that can run."""
    placement = tuple(draw(st.integers(0, ranks - 1)) for _ in range(stages))
    left = []
    for stage in range(stages):
        for i in range(chunks):
            left += [Compute(op, stage, i) for op in draw(st.sampled_from(WAYS))]
    all_of_them, done, sent = set(left), set(), set()
    lanes: list[list[Compute]] = [[] for _ in range(ranks)]
    while left:
        possible = [
            action
            for action in left
            if all(earlier in done for earlier in follows(action) if earlier in all_of_them)
            and all(message in sent for message in consumes(action, graph))
        ]
        action = draw(st.sampled_from(possible))
        left.remove(action)
        done.add(action)
        sent.update(produces(action, graph))
        lanes[placement[action.stage]].append(action)
    return Schedule(placement, chunks, tuple(map(tuple, lanes)))


def obvious(schedule: Schedule, graph: StageGraph | None = None) -> Program:
    """Lower naively: receive just before use, send just after."""
    graph = graph or StageGraph.chain(schedule.stages)
    lanes: list[tuple[Action, ...]] = []
    for lane in schedule.lanes:
        out: list[Action] = []
        for action in lane:
            out += [Recv(m) for m in consumes(action, graph) if schedule.crosses(m)]
            out.append(action)
            out += [Send(m) for m in produces(action, graph) if schedule.crosses(m)]
        lanes.append(tuple(out))
    return Program(schedule, graph, tuple(lanes))
