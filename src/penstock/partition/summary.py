"""A cut in words: what each stage has, takes and gives, which one is the slowest, and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import wrap

from penstock.balance import cut
from penstock.outline import (
    Flow,
    Outline,
    Piece,
    Shared,
    bytes_said,
    folded,
    numbers_said,
    seconds_said,
    stages_said,
)

WIDTH = 100
UNEVEN = 1.25  # times the mean, from which on a stage is worth a word
HEAVY = 3.0  # times what neighbours send, from which on a skip is


def summary(outline: Outline) -> str:
    """All of it, line by line."""
    lines = [_title(outline), "", *_table(outline), ""]
    for head, said in (
        ("sends", _once([_sent(flow) for flow in outline.flows if not flow.is_skip])),
        ("skips", _once(list(_skips(outline)))),
        ("shared", list(_shared(outline))),
        ("slowest" if outline.measured else "largest", [_slowest(outline)]),
        ("advice", [advice(outline)]),
    ):
        lines += _headed(head, said)
    return "\n".join(lines)


def _title(outline: Outline) -> str:
    counts = " + ".join(map(str, outline.counts))
    units = "unit" if outline.counts == (1,) else "units"
    return (
        f"{outline.model} in {outline.stages} stage{'s' * (outline.stages > 1)} of {counts} "
        f"{units}, {numbers_said(outline.total)} parameters"
    )


def _headed(head: str, said: Sequence[str]) -> Iterator[str]:
    """The lines of one thing, the first with its heading, long ones wrapped."""
    first = f"{head:<9}"
    for one in said:
        for line in wrap(one, WIDTH - 9, break_long_words=False) or [""]:
            yield first + line
            first = " " * 9
        first = " " * 9


# ---- the table ----------------------------------------------------------------------------


def _table(outline: Outline) -> Iterator[str]:
    """A row a stage, its units at the end."""
    rows = [_HEADS, *(_cells(outline, stage) for stage in range(outline.stages))]
    shown = [at for at in range(len(_HEADS)) if any(row[at] != "-" for row in rows[1:])]
    widths = {at: max(len(row[at]) for row in rows) for at in shown}
    room = max(WIDTH - sum(widths.values()) - 2 * len(shown), 40)
    for stage, row in enumerate(rows, -1):
        cells = "  ".join(f"{row[at]:>{widths[at]}}" for at in shown)
        names = _names(outline, stage, room) if stage >= 0 else ["units"]
        for line in names:
            yield f"{cells}  {line}"
            cells = " " * len(cells)


_HEADS = ("stage", "parameters", "bytes", "keeps", "ms of F/I/W", "receives", "sends")


def _cells(outline: Outline, stage: int) -> tuple[str, ...]:
    keeps = outline.keeps(stage)
    times = "-"
    if outline.measured:
        times = "/".join(f"{float(f'{1e3 * seconds:.3g}'):g}" for seconds in outline.seconds(stage))
    return (
        str(stage),
        numbers_said(outline.parameters[stage]),
        bytes_said(outline.sizes[stage]),
        "-" if keeps is None else bytes_said(keeps),
        times,
        _total(flow for flow in outline.flows if flow.dst == stage),
        _total(flow for flow in outline.flows if flow.src == stage),
    )


def _total(flows: Iterator[Flow]) -> str:
    sizes = [flow.size for flow in flows]
    if not sizes or None in sizes:
        return "-"
    return bytes_said(sum(size or 0 for size in sizes))


def _names(outline: Outline, stage: int, room: int) -> list[str]:
    names = folded([piece.name for piece in outline.of(stage)])
    return wrap(", ".join(names), room, break_long_words=False) or [""]


# ---- what goes between stages -------------------------------------------------------------


def _sent(flow: Flow) -> str:
    return f"stage {flow.src} to {flow.dst}: {_value(flow)}"


def _value(flow: Flow) -> str:
    size = "" if flow.size is None else f", {bytes_said(flow.size)}"
    return flow.name + (f" ({flow.where})" if flow.where else "") + size


def _skips(outline: Outline) -> Iterator[str]:
    """Each value once, with all stages that it jumps to."""
    found: dict[tuple[str, int, int], list[Flow]] = {}
    for flow in outline.flows:
        if flow.is_skip:
            found.setdefault((flow.name, flow.src, flow.value), []).append(flow)
    for flows in found.values():
        to = stages_said(sorted({flow.dst for flow in flows}))
        yield f"{_value(flows[0])}: stage {flows[0].src} straight to {to}"


def _once(lines: Sequence[str]) -> list[str]:
    """Those that are alike as one."""
    counts = Counter(lines)
    return [line + (f", {times} times" if times > 1 else "") for line, times in counts.items()]


def _shared(outline: Outline) -> Iterator[str]:
    """Those of one module together."""
    groups: dict[tuple[str, tuple[int, ...]], list[Shared]] = {}
    for one in outline.shared:
        module = one.names[0].rpartition(".")[0] if len(one.names) == 1 else " = ".join(one.names)
        groups.setdefault((module, one.stages), []).append(one)
    for (module, stages), those in groups.items():
        what = " = ".join(those[0].names) if len(those) == 1 else f"all {len(those)} of {module}"
        size = bytes_said(sum(one.size for one in those))
        yield f"{what}, {size}: on {stages_said(stages)}, their gradients are summed"


# ---- which one is slow, and what to do ----------------------------------------------------


def _slowest(outline: Outline) -> str:
    worst, ratio = _worst(outline)
    if outline.measured:
        took = f"{seconds_said(outline.load(worst))} of F, I and W for one micro-batch"
    else:
        took = f"{bytes_said(outline.load(worst))} of parameters"
    return f"stage {worst}: {took}, {ratio:.3g} times the mean"


def _worst(outline: Outline) -> tuple[int, float]:
    loads = [outline.load(stage) for stage in range(outline.stages)]
    mean = sum(loads) / len(loads)
    worst = loads.index(max(loads))
    return worst, loads[worst] / mean if mean else 1.0


def advice(outline: Outline) -> str:
    """The one thing that would help most."""
    worst, ratio = _worst(outline)
    if outline.stages > 1 and outline.measured and ratio >= UNEVEN:
        return _of_the_slowest(outline, worst, ratio)
    heavy = _heaviest_skip(outline)
    remedy = "" if heavy is None else _remedy(outline, heavy)
    if heavy is not None and remedy:
        return (
            f"stage {heavy.src} sends {bytes_said(heavy.size or 0)} straight to stage {heavy.dst} "
            f"in every micro-batch: {remedy}"
        )
    if outline.stages > 1 and not outline.measured:
        return (
            "nothing was measured: parameters say little about time; cut by balance='time', with "
            "an example"
        )
    return "none: the stages are even"


def _of_the_slowest(outline: Outline, worst: int, ratio: float) -> str:
    begin = f"stage {worst} takes {ratio:.2g} times the mean"
    mean = sum(outline.load(stage) for stage in range(outline.stages)) / outline.stages
    largest = max(outline.of(worst), key=_seconds)
    if _seconds(largest) >= mean:
        return (
            f"{begin}, and its unit '{largest.name}' alone {_seconds(largest) / mean:.2g} times: "
            "no cut between units can be even; open it with units=, or take fewer stages"
        )
    times = list(map(_seconds, outline.pieces))
    best = cut(times, outline.stages)
    ends = [sum(best[: stage + 1]) for stage in range(len(best))]
    most = max(sum(times[end - count : end]) for end, count in zip(ends, best, strict=True))
    if most < 0.95 * outline.load(worst):
        return f"{begin}: stages={list(best)} would be more even, {most / mean:.2g} times"
    return f"{begin}, and no cut between units is more even: take fewer stages, or smaller units"


def _remedy(outline: Outline, heavy: Flow) -> str:
    """A V schedule has stages 0 and the last on one rank, 1 and the last but one, and so on."""
    if heavy.src + heavy.dst == outline.stages - 1:
        first = "a" if outline.stages % 2 == 0 else "with an even number of stages, a"
        return f"{first} schedule such as zb-v has both on one rank, and sends nothing"
    if heavy.end - heavy.start > len(outline.pieces) / 2:
        return ""
    made, used = outline.pieces[heavy.start].name, outline.pieces[heavy.end].name
    return f"it is spared if one stage takes all from '{made}' to '{used}'"


def _seconds(piece: Piece) -> float:
    return sum(piece.seconds or ())


def _heaviest_skip(outline: Outline) -> Flow | None:
    """One that is several times as large as what neighbours usually send."""
    sizes = sorted(f.size for f in outline.flows if f.size is not None and not f.is_skip)
    skips = [flow for flow in outline.flows if flow.is_skip and flow.size]
    if not skips or not sizes:
        return None
    heaviest = max(skips, key=lambda flow: flow.size or 0)
    return heaviest if (heaviest.size or 0) >= HEAVY * sizes[len(sizes) // 2] else None
