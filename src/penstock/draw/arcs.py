"""What goes across the cuts of a model, as lines to be drawn, and the lane of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.outline import ModelSummary, Transfer, format_bytes

MAX_ARCS = 14  # arcs, from which on those between two stages are one
MAX_NAME_LENGTH = 34  # letters, from which on a name is shortened


@dataclass(frozen=True)
class Arc:
    """A line above the units, from one to another. A tie is a parameter that both have."""

    start: int
    end: int
    label: str
    is_skip: bool
    is_tie: bool = False


def build_arcs(outline: ModelSummary) -> Iterator[Arc]:
    """One for all values that go from a unit to another; of many, one for each two stages."""
    groups: dict[tuple[int, ...], list[Transfer]] = {}
    for flow in outline.transfers:
        groups.setdefault((flow.src, flow.dst, flow.producer, flow.consumer), []).append(flow)
    if len(groups) > MAX_ARCS:
        groups = {}
        for flow in outline.transfers:
            groups.setdefault((flow.src, flow.dst), []).append(flow)
    for flows in groups.values():
        first = flows[0]
        start = max(flow.producer for flow in flows)
        end = min(flow.consumer for flow in flows)
        yield Arc(start, end, _arc_label(flows, len(groups) > MAX_ARCS), first.is_skip)
    yield from _build_tie_arcs(outline)


def _build_tie_arcs(outline: ModelSummary) -> Iterator[Arc]:
    ties: dict[tuple[int, int], list[str]] = {}
    for one in outline.shared_parameters:
        first, *others = (
            _find_unit_with_parameter(outline, stage, one.names) for stage in one.stages
        )
        for home in others:
            ties.setdefault((first, home), []).append(one.names[0])
    for (first, home), names in ties.items():
        what = shorten_name(names[0]) if len(names) == 1 else f"{len(names)} parameters"
        yield Arc(first, home, f"shared: {what}", is_skip=False, is_tie=True)


def _arc_label(flows: Sequence[Transfer], crowded: bool) -> str:
    sizes = [flow.nbytes for flow in flows]
    said = [] if None in sizes else [format_bytes(sum(size or 0 for size in sizes))]
    what = shorten_name(flows[0].name) if len(flows) == 1 else f"{len(flows)} values"
    if crowded and said and not flows[0].is_skip:
        return said[0]
    return ", ".join([what, *said])


def _find_unit_with_parameter(outline: ModelSummary, stage: int, names: Sequence[str]) -> int:
    """The unit of a stage that has a parameter; the stage's first, if it is a parent's own."""
    mine = [at for at, piece in enumerate(outline.units) if piece.stage == stage]
    for at in mine:
        if any(name.startswith(f"{outline.units[at].name}.") for name in names):
            return at
    return mine[0]


def shorten_name(name: str) -> str:
    """A name; of a long one its end."""
    return name if len(name) <= MAX_NAME_LENGTH else "…" + name[1 - MAX_NAME_LENGTH :]


def assign_arc_levels(extents: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """A lane for each, so that no two meet; the shortest run lowest."""
    taken: list[list[tuple[float, float]]] = []
    found = [0] * len(extents)
    for at in sorted(range(len(extents)), key=lambda at: extents[at][1] - extents[at][0]):
        low, high = extents[at]
        free = len(taken)
        while free and all(high <= a or b <= low for a, b in taken[free - 1]):
            free -= 1
        if free == len(taken):
            taken.append([])
        taken[free].append((low, high))
        found[at] = free
    return tuple(found)
