"""What goes across the cuts of a model, as lines to be drawn, and the lane of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.outline import Flow, Outline, bytes_said

MANY = 14  # arcs, from which on those between two stages are one
LONG = 34  # letters, from which on a name is shortened


@dataclass(frozen=True)
class Arc:
    """A line above the units, from one to another. A tie is a parameter that both have."""

    start: int
    end: int
    label: str
    skip: bool
    tie: bool = False


def arcs_of(outline: Outline) -> Iterator[Arc]:
    """One for all values that go from a unit to another; of many, one for each two stages."""
    groups: dict[tuple[int, ...], list[Flow]] = {}
    for flow in outline.flows:
        groups.setdefault((flow.src, flow.dst, flow.start, flow.end), []).append(flow)
    if len(groups) > MANY:
        groups = {}
        for flow in outline.flows:
            groups.setdefault((flow.src, flow.dst), []).append(flow)
    for flows in groups.values():
        first = flows[0]
        start = max(flow.start for flow in flows)
        end = min(flow.end for flow in flows)
        yield Arc(start, end, _label(flows, len(groups) > MANY), first.is_skip)
    yield from _ties(outline)


def _ties(outline: Outline) -> Iterator[Arc]:
    ties: dict[tuple[int, int], list[str]] = {}
    for one in outline.shared:
        first, *others = (_home(outline, stage, one.names) for stage in one.stages)
        for home in others:
            ties.setdefault((first, home), []).append(one.names[0])
    for (first, home), names in ties.items():
        what = short(names[0]) if len(names) == 1 else f"{len(names)} parameters"
        yield Arc(first, home, f"shared: {what}", skip=False, tie=True)


def _label(flows: Sequence[Flow], crowded: bool) -> str:
    sizes = [flow.size for flow in flows]
    said = [] if None in sizes else [bytes_said(sum(size or 0 for size in sizes))]
    what = short(flows[0].name) if len(flows) == 1 else f"{len(flows)} values"
    if crowded and said and not flows[0].is_skip:
        return said[0]
    return ", ".join([what, *said])


def _home(outline: Outline, stage: int, names: Sequence[str]) -> int:
    """The unit of a stage that has a parameter; the stage's first, if it is a parent's own."""
    mine = [at for at, piece in enumerate(outline.pieces) if piece.stage == stage]
    for at in mine:
        if any(name.startswith(f"{outline.pieces[at].name}.") for name in names):
            return at
    return mine[0]


def short(name: str) -> str:
    """A name; of a long one its end."""
    return name if len(name) <= LONG else "…" + name[1 - LONG :]


def lanes_for(reach: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """A lane for each, so that no two meet; the shortest run lowest."""
    taken: list[list[tuple[float, float]]] = []
    found = [0] * len(reach)
    for at in sorted(range(len(reach)), key=lambda at: reach[at][1] - reach[at][0]):
        low, high = reach[at]
        free = len(taken)
        while free and all(high <= a or b <= low for a, b in taken[free - 1]):
            free -= 1
        if free == len(taken):
            taken.append([])
        taken[free].append((low, high))
        found[at] = free
    return tuple(found)
