"""A cut model as text: `print(partition)`.

The report has a title, a table with a row for each stage, and sections: what stages send to each
other, which values skip stages, which parameters are shared, which stage is the slowest, and one
piece of advice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from textwrap import wrap

from penstock.model_summary import ModelSummary, SharedParameter, Transfer, UnitSummary
from penstock.schedules.balance import balance_costs
from penstock.text_format import (
    collapse_name_ranges,
    format_bytes,
    format_count,
    format_seconds,
    format_stages,
)

LINE_WIDTH = 100
IMBALANCE_THRESHOLD = 1.25  # advise another cut if a stage takes this many times the mean
LARGE_SKIP_RATIO = 3.0  # advise on a skip that is this many times the usual transfer


def format_summary(summary: ModelSummary, with_advice: bool = True) -> str:
    """Return the whole report, or all of it but the advice."""
    lines = [format_title(summary), "", *_format_table(summary), ""]
    for heading, entries in list_sections(summary, with_advice):
        lines += _format_section(heading, entries)
    return "\n".join(lines)


def list_sections(summary: ModelSummary, with_advice: bool = True) -> list[tuple[str, list[str]]]:
    """Return the sections below the table, each with its heading and entries."""
    sends = [
        f"stage {transfer.src} to {transfer.dst}: {_format_value(transfer)}"
        for transfer in summary.transfers
        if not transfer.is_skip
    ]
    return [
        ("sends", _merge_duplicates(sends)),
        ("skips", _merge_duplicates(list(_format_skips(summary)))),
        ("shared", list(_format_shared_parameters(summary))),
        ("slowest" if summary.is_measured else "largest", [_format_slowest_stage(summary)]),
        ("advice", [suggest_improvement(summary)] if with_advice else []),
    ]


def describe_for_notebook(
    summary: ModelSummary,
) -> tuple[str, list[tuple[str, ...]], list[tuple[str, str]]]:
    """Return the title, the rows of the table with all units, and the sections in one line each."""
    headings, *rows = list_stage_rows(summary)
    table = [(*headings, "units")]
    for stage, row in enumerate(rows):
        names = collapse_name_ranges([unit.name for unit in summary.stage_units(stage)])
        table.append((*row, ", ".join(names)))
    sections = [(heading, "; ".join(lines)) for heading, lines in list_sections(summary) if lines]
    return format_title(summary), table, sections


def format_title(summary: ModelSummary) -> str:
    """Return the model, its stages and its parameters in one line."""
    counts = " + ".join(map(str, summary.counts))
    units = "unit" if summary.counts == (1,) else "units"
    return (
        f"{summary.model_name} in {summary.num_stages} stage{'s' * (summary.num_stages > 1)} "
        f"of {counts} {units}, {format_count(summary.total_parameters)} parameters"
    )


def _format_section(heading: str, entries: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a section: the first with the heading, long entries wrapped."""
    margin = f"{heading:<9}"
    for entry in entries:
        for line in wrap(entry, LINE_WIDTH - 9, break_long_words=False) or [""]:
            yield margin + line
            margin = " " * 9
        margin = " " * 9


# ---- the table -----------------------------------------------------------------------------------


def _format_table(summary: ModelSummary) -> Iterator[str]:
    """Yield the table: a row for each stage, with the names of its units at the end."""
    rows = list_stage_rows(summary)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    names_width = max(LINE_WIDTH - sum(widths) - 2 * len(widths), 40)
    for stage, row in enumerate(rows, -1):  # -1 is the row of headings
        cells = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        names = _format_unit_names(summary, stage, names_width) if stage >= 0 else ["units"]
        for line in names:
            yield f"{cells}  {line}"
            cells = " " * len(cells)


def list_stage_rows(summary: ModelSummary) -> list[tuple[str, ...]]:
    """Return the headings and a row for each stage, without the names of its units.

    A column without a single value (nothing was measured, for example) is left out.
    """
    rows = [_COLUMN_HEADINGS, *(_format_row(summary, stage) for stage in range(summary.num_stages))]
    columns = range(len(_COLUMN_HEADINGS))
    shown = [column for column in columns if any(row[column] != "-" for row in rows[1:])]
    return [tuple(row[column] for column in shown) for row in rows]


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
        _format_total_bytes(t for t in summary.transfers if t.dst == stage),
        _format_total_bytes(t for t in summary.transfers if t.src == stage),
    )


def _format_total_bytes(transfers: Iterator[Transfer]) -> str:
    sizes = [transfer.nbytes for transfer in transfers]
    if not sizes or None in sizes:
        return "-"
    return format_bytes(sum(size or 0 for size in sizes))


def _format_unit_names(summary: ModelSummary, stage: int, width: int) -> list[str]:
    names = collapse_name_ranges([unit.name for unit in summary.stage_units(stage)])
    return wrap(", ".join(names), width, break_long_words=False) or [""]


# ---- transfers and shared parameters -------------------------------------------------------------


def _format_value(transfer: Transfer) -> str:
    size = "" if transfer.nbytes is None else f", {format_bytes(transfer.nbytes)}"
    return transfer.name + (f" ({transfer.source_line})" if transfer.source_line else "") + size


def _format_skips(summary: ModelSummary) -> Iterator[str]:
    """Yield a line for each value that skips stages, with all stages that receive it."""
    skips: dict[tuple[str, int, int], list[Transfer]] = {}
    for transfer in summary.transfers:
        if transfer.is_skip:
            key = (transfer.name, transfer.src, transfer.value_id)
            skips.setdefault(key, []).append(transfer)
    for transfers in skips.values():
        to = format_stages(sorted({transfer.dst for transfer in transfers}))
        yield f"{_format_value(transfers[0])}: stage {transfers[0].src} straight to {to}"


def _merge_duplicates(lines: Sequence[str]) -> list[str]:
    """Return each distinct line once, with the number of times it occurs."""
    counts = Counter(lines)
    return [line + (f", {times} times" if times > 1 else "") for line, times in counts.items()]


def _format_shared_parameters(summary: ModelSummary) -> Iterator[str]:
    """Yield a line for each module whose parameters several stages share."""
    groups: dict[tuple[str, tuple[int, ...]], list[SharedParameter]] = {}
    for shared in summary.shared_parameters:
        # A parameter with several names is tied between modules and gets a line of its own.
        names = shared.names
        module = names[0].rpartition(".")[0] if len(names) == 1 else " = ".join(names)
        groups.setdefault((module, shared.stages), []).append(shared)
    for (module, stages), group in groups.items():
        what = " = ".join(group[0].names) if len(group) == 1 else f"all {len(group)} of {module}"
        size = format_bytes(sum(shared.parameter_bytes for shared in group))
        yield f"{what}, {size}: on {format_stages(stages)}, their gradients are summed"


# ---- the slowest stage, and advice ---------------------------------------------------------------


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
    """Return the one change that would help most.

    An uneven cut comes first, because the slowest stage sets the speed of the whole pipe. A large
    skip comes second. Parameters alone say too little for advice, so the third is to measure.
    """
    worst, ratio = _find_slowest_stage(summary)
    if summary.num_stages > 1 and summary.is_measured and ratio >= IMBALANCE_THRESHOLD:
        return _suggest_rebalancing(summary, worst, ratio)
    skip = _find_large_skip(summary)
    remedy = "" if skip is None else _suggest_skip_fix(summary, skip)
    if skip is not None and remedy:
        return (
            f"stage {skip.src} sends {format_bytes(skip.nbytes or 0)} straight to stage "
            f"{skip.dst} in every micro-batch: {remedy}"
        )
    if summary.num_stages > 1 and not summary.is_measured:
        return (
            "nothing was measured, and parameters say little about time: use balance='time' and "
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
            f"{begin}, and its unit '{largest.name}' alone "
            f"{_sum_unit_seconds(largest) / mean:.2g} times: no cut between units can be even; "
            "split the unit with units=, or use fewer stages"
        )
    # The current cut may be uneven because stages=[...] was given by hand. Suggest the best cut of
    # the same units, if it takes at least 5 percent off the slowest stage.
    times = list(map(_sum_unit_seconds, summary.units))
    best = balance_costs(times, summary.num_stages)
    ends = [sum(best[: stage + 1]) for stage in range(len(best))]
    most = max(sum(times[end - count : end]) for end, count in zip(ends, best, strict=True))
    if most < 0.95 * summary.stage_load(slowest_stage):
        return f"{begin}: stages={list(best)} would be more even, {most / mean:.2g} times"
    return f"{begin}, and no cut between units is more even: use fewer stages, or smaller units"


def _suggest_skip_fix(summary: ModelSummary, skip: Transfer) -> str:
    """Return how to avoid sending a skip, or an empty text.

    A V schedule places stage 0 and the last stage on one rank, stage 1 and the last but one, and so
    on. A skip between two such stages then stays on its rank.
    """
    if skip.src + skip.dst == summary.num_stages - 1:
        article = "a" if summary.num_stages % 2 == 0 else "with an even number of stages, a"
        return f"{article} schedule such as zb-v has both on one rank, and sends nothing"
    # One stage with more than half of the units would cost more than the skip.
    if skip.consumer - skip.producer > len(summary.units) / 2:
        return ""
    producer, consumer = summary.units[skip.producer].name, summary.units[skip.consumer].name
    return f"to avoid it, put all units from '{producer}' to '{consumer}' into one stage"


def _sum_unit_seconds(unit: UnitSummary) -> float:
    return sum(unit.seconds or ())


def _find_large_skip(summary: ModelSummary) -> Transfer | None:
    """Return the largest skip, if it is much larger than the median transfer of neighbours."""
    sizes = sorted(f.nbytes for f in summary.transfers if f.nbytes is not None and not f.is_skip)
    skips = [transfer for transfer in summary.transfers if transfer.is_skip and transfer.nbytes]
    if not skips or not sizes:
        return None
    largest = max(skips, key=lambda transfer: transfer.nbytes or 0)
    return largest if (largest.nbytes or 0) >= LARGE_SKIP_RATIO * sizes[len(sizes) // 2] else None
