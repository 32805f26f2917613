"""A cut in words: what each stage has, takes and gives, which one is the slowest, and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import wrap

from penstock.model_summary import (
    ModelSummary,
    SharedParameter,
    Transfer,
    UnitSummary,
    collapse_name_ranges,
    format_bytes,
    format_count,
    format_seconds,
    format_stages,
)
from penstock.schedules.balance import balance_costs

LINE_WIDTH = 100
IMBALANCE_THRESHOLD = 1.25  # times the mean, from which on a stage is worth a word
LARGE_SKIP_RATIO = 3.0  # times what neighbours send, from which on a skip is


def format_summary(summary: ModelSummary) -> str:
    """All of it, line by line."""
    lines = [_format_title(summary), "", *_format_table(summary), ""]
    for head, said in (
        (
            "sends",
            _merge_duplicates(
                [_format_transfer(flow) for flow in summary.transfers if not flow.is_skip]
            ),
        ),
        ("skips", _merge_duplicates(list(_format_skips(summary)))),
        ("shared", list(_format_shared_parameters(summary))),
        ("slowest" if summary.is_measured else "largest", [_format_slowest_stage(summary)]),
        ("advice", [suggest_improvement(summary)]),
    ):
        lines += _format_section(head, said)
    return "\n".join(lines)


def _format_title(summary: ModelSummary) -> str:
    counts = " + ".join(map(str, summary.counts))
    units = "unit" if summary.counts == (1,) else "units"
    return (
        f"{summary.model_name} in {summary.num_stages} stage{'s' * (summary.num_stages > 1)} of {counts} "
        f"{units}, {format_count(summary.total_parameters)} parameters"
    )


def _format_section(heading: str, entries: Sequence[str]) -> Iterator[str]:
    """The lines of one thing, the first with its heading, long ones wrapped."""
    first = f"{heading:<9}"
    for one in entries:
        for line in wrap(one, LINE_WIDTH - 9, break_long_words=False) or [""]:
            yield first + line
            first = " " * 9
        first = " " * 9


# ---- the table ----------------------------------------------------------------------------


def _format_table(summary: ModelSummary) -> Iterator[str]:
    """A row a stage, its units at the end."""
    rows = [_COLUMN_HEADINGS, *(_format_row(summary, stage) for stage in range(summary.num_stages))]
    shown = [at for at in range(len(_COLUMN_HEADINGS)) if any(row[at] != "-" for row in rows[1:])]
    widths = {at: max(len(row[at]) for row in rows) for at in shown}
    room = max(LINE_WIDTH - sum(widths.values()) - 2 * len(shown), 40)
    for stage, row in enumerate(rows, -1):
        cells = "  ".join(f"{row[at]:>{widths[at]}}" for at in shown)
        names = _format_unit_names(summary, stage, room) if stage >= 0 else ["units"]
        for line in names:
            yield f"{cells}  {line}"
            cells = " " * len(cells)


_COLUMN_HEADINGS = ("stage", "parameters", "bytes", "keeps", "ms of F/I/W", "receives", "sends")


def _format_row(summary: ModelSummary, stage: int) -> tuple[str, ...]:
    keeps = summary.stage_activation_bytes(stage)
    times = "-"
    if summary.is_measured:
        times = "/".join(
            f"{float(f'{1e3 * seconds:.3g}'):g}" for seconds in summary.stage_seconds(stage)
        )
    return (
        str(stage),
        format_count(summary.stage_parameter_counts[stage]),
        format_bytes(summary.stage_parameter_bytes[stage]),
        "-" if keeps is None else format_bytes(keeps),
        times,
        _format_total_bytes(flow for flow in summary.transfers if flow.dst == stage),
        _format_total_bytes(flow for flow in summary.transfers if flow.src == stage),
    )


def _format_total_bytes(transfers: Iterator[Transfer]) -> str:
    sizes = [flow.nbytes for flow in transfers]
    if not sizes or None in sizes:
        return "-"
    return format_bytes(sum(size or 0 for size in sizes))


def _format_unit_names(summary: ModelSummary, stage: int, width: int) -> list[str]:
    names = collapse_name_ranges([piece.name for piece in summary.stage_units(stage)])
    return wrap(", ".join(names), width, break_long_words=False) or [""]


# ---- what goes between stages -------------------------------------------------------------


def _format_transfer(transfer: Transfer) -> str:
    return f"stage {transfer.src} to {transfer.dst}: {_format_value(transfer)}"


def _format_value(transfer: Transfer) -> str:
    size = "" if transfer.nbytes is None else f", {format_bytes(transfer.nbytes)}"
    return transfer.name + (f" ({transfer.source_line})" if transfer.source_line else "") + size


def _format_skips(summary: ModelSummary) -> Iterator[str]:
    """Each value once, with all stages that it jumps to."""
    found: dict[tuple[str, int, int], list[Transfer]] = {}
    for flow in summary.transfers:
        if flow.is_skip:
            found.setdefault((flow.name, flow.src, flow.value_id), []).append(flow)
    for flows in found.values():
        to = format_stages(sorted({flow.dst for flow in flows}))
        yield f"{_format_value(flows[0])}: stage {flows[0].src} straight to {to}"


def _merge_duplicates(lines: Sequence[str]) -> list[str]:
    """Those that are alike as one."""
    counts = Counter(lines)
    return [line + (f", {times} times" if times > 1 else "") for line, times in counts.items()]


def _format_shared_parameters(summary: ModelSummary) -> Iterator[str]:
    """Those of one module together."""
    groups: dict[tuple[str, tuple[int, ...]], list[SharedParameter]] = {}
    for one in summary.shared_parameters:
        module = one.names[0].rpartition(".")[0] if len(one.names) == 1 else " = ".join(one.names)
        groups.setdefault((module, one.stages), []).append(one)
    for (module, stages), those in groups.items():
        what = " = ".join(those[0].names) if len(those) == 1 else f"all {len(those)} of {module}"
        size = format_bytes(sum(one.parameter_bytes for one in those))
        yield f"{what}, {size}: on {format_stages(stages)}, their gradients are summed"


# ---- which one is slow, and what to do ----------------------------------------------------


def _format_slowest_stage(summary: ModelSummary) -> str:
    worst, ratio = _find_slowest_stage(summary)
    if summary.is_measured:
        took = f"{format_seconds(summary.stage_load(worst))} of F, I and W for one micro-batch"
    else:
        took = f"{format_bytes(summary.stage_load(worst))} of parameters"
    return f"stage {worst}: {took}, {ratio:.3g} times the mean"


def _find_slowest_stage(summary: ModelSummary) -> tuple[int, float]:
    loads = [summary.stage_load(stage) for stage in range(summary.num_stages)]
    mean = sum(loads) / len(loads)
    worst = loads.index(max(loads))
    return worst, loads[worst] / mean if mean else 1.0


def suggest_improvement(summary: ModelSummary) -> str:
    """The one thing that would help most."""
    worst, ratio = _find_slowest_stage(summary)
    if summary.num_stages > 1 and summary.is_measured and ratio >= IMBALANCE_THRESHOLD:
        return _suggest_rebalancing(summary, worst, ratio)
    heavy = _find_large_skip(summary)
    remedy = "" if heavy is None else _suggest_skip_fix(summary, heavy)
    if heavy is not None and remedy:
        return (
            f"stage {heavy.src} sends {format_bytes(heavy.nbytes or 0)} straight to stage {heavy.dst} "
            f"in every micro-batch: {remedy}"
        )
    if summary.num_stages > 1 and not summary.is_measured:
        return (
            "nothing was measured: parameters say little about time; cut by balance='time', with "
            "an example"
        )
    return "none: the stages are even"


def _suggest_rebalancing(summary: ModelSummary, slowest_stage: int, ratio: float) -> str:
    begin = f"stage {slowest_stage} takes {ratio:.2g} times the mean"
    mean = (
        sum(summary.stage_load(stage) for stage in range(summary.num_stages)) / summary.num_stages
    )
    largest = max(summary.stage_units(slowest_stage), key=_sum_unit_seconds)
    if _sum_unit_seconds(largest) >= mean:
        return (
            f"{begin}, and its unit '{largest.name}' alone {_sum_unit_seconds(largest) / mean:.2g} times: "
            "no cut between units can be even; open it with units=, or take fewer stages"
        )
    times = list(map(_sum_unit_seconds, summary.units))
    best = balance_costs(times, summary.num_stages)
    ends = [sum(best[: stage + 1]) for stage in range(len(best))]
    most = max(sum(times[end - count : end]) for end, count in zip(ends, best, strict=True))
    if most < 0.95 * summary.stage_load(slowest_stage):
        return f"{begin}: stages={list(best)} would be more even, {most / mean:.2g} times"
    return f"{begin}, and no cut between units is more even: take fewer stages, or smaller units"


def _suggest_skip_fix(summary: ModelSummary, skip: Transfer) -> str:
    """A V schedule has stages 0 and the last on one rank, 1 and the last but one, and so on."""
    if skip.src + skip.dst == summary.num_stages - 1:
        first = "a" if summary.num_stages % 2 == 0 else "with an even number of stages, a"
        return f"{first} schedule such as zb-v has both on one rank, and sends nothing"
    if skip.consumer - skip.producer > len(summary.units) / 2:
        return ""
    made, used = summary.units[skip.producer].name, summary.units[skip.consumer].name
    return f"it is spared if one stage takes all from '{made}' to '{used}'"


def _sum_unit_seconds(unit: UnitSummary) -> float:
    return sum(unit.seconds or ())


def _find_large_skip(summary: ModelSummary) -> Transfer | None:
    """One that is several times as large as what neighbours usually send."""
    sizes = sorted(f.nbytes for f in summary.transfers if f.nbytes is not None and not f.is_skip)
    skips = [flow for flow in summary.transfers if flow.is_skip and flow.nbytes]
    if not skips or not sizes:
        return None
    heaviest = max(skips, key=lambda flow: flow.nbytes or 0)
    return heaviest if (heaviest.nbytes or 0) >= LARGE_SKIP_RATIO * sizes[len(sizes) // 2] else None
