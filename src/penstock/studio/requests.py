"""Answer the requests of the studio's page: JSON in, JSON out.

    catalog   {}                         every schedule, with its source and its use
    timeline  {setting}                  simulate, verify and explain one schedule
    edit      {setting, move}            move an action in its lane, and verify the result
    compare   {setting, names}           the numbers of some schedules
    action    {setting, rank, position}  what an action needs and gives
    lesson    {setting}                  one sentence for each action, in order of time
    open      {text}                     a file: a schedule, timeline, plan or profile
    measured  {run, plan}                a measured step beside its plan
    export    {setting, format}          the schedule as text, SVG or a trace for Perfetto

A setting is an object with the fields of `DEFAULTS` in settings.py. `answer` never raises: an
answer is either `{"ok": true, ...}` or `{"ok": false, "error": message}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from penstock.draw.perfetto import trace
from penstock.draw.style import SHADES, format_caption, shift_to_zero
from penstock.draw.svg import timeline_svg
from penstock.errors import ArgumentError, FormatError, PenstockError
from penstock.planning.plan import Plan
from penstock.planning.profile import Profile
from penstock.schedules import FAMILIES, family_of, lower_bound
from penstock.schedules.cost import Cost
from penstock.schedules.explain import (
    IDLE_CAUSES,
    Place,
    TimelineIndex,
    compare_run,
    critical_path,
    find_idle,
)
from penstock.schedules.ir import OP_RULES, Op, Program, Schedule, StageGraph, schedule_of
from penstock.schedules.notation import dumps
from penstock.schedules.request import summarize
from penstock.schedules.simulator import Deadlock, Span, play
from penstock.schedules.timeline import Timeline, simulate
from penstock.schedules.verify import find_memory_excess, verify
from penstock.studio.settings import (
    DEFAULTS,
    MAX_PROFILE,
    MAX_TEXT,
    index_setting,
    load_work,
    read_list,
    read_setting,
    read_whole,
    schedule_request,
    simulate_setting,
)
from penstock.text_format import choose_time_unit, format_bytes, make_printable

# ---- the entry point ----------------------------------------------------------------------


def answer(request: str) -> str:
    """Answer one request.

    Args:
        request: A JSON object with `kind` and the fields of that kind.

    Returns:
        A JSON object with `ok`, and `error`, a message for the user, if that is false.

    Example:
        >>> answer('{"kind": "timeline", "setting": {"ranks": 0}}')[:42]
        '{"ok": false, "error": "ranks=0: each of t'
    """
    try:
        parsed = _parse(request)
        return json.dumps({"ok": True, **_rounded(_HANDLERS[parsed["kind"]](parsed))})
    except PenstockError as error:
        message = str(error)
    except (MemoryError, RecursionError, OverflowError):
        message = "this is too large. Use fewer ranks, stages or micro-batches."
    except Exception as error:  # the page has to go on in any case
        message = f"this is a defect of Penstock: {type(error).__name__}: {error}"
    return json.dumps({"ok": False, "error": make_printable(message, 4000)})


def _parse(request: str) -> dict[str, Any]:
    try:
        parsed = json.loads(request)
    except ValueError:
        raise ArgumentError("a request is a JSON object") from None
    if not isinstance(parsed, dict) or str(parsed.get("kind")) not in _HANDLERS:
        raise ArgumentError(f"kind must be one of {', '.join(_HANDLERS)}")
    return parsed


def _rounded(value: Any) -> Any:
    """Return a value with its floats rounded to twelve digits.

    Releases of Python round the sum of floats differently, and the page must agree with all.
    """
    if type(value) is float:
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


# ---- timelines ----------------------------------------------------------------------------


def _handle_timeline(request: Mapping[str, Any]) -> dict[str, Any]:
    setting = read_setting(request)
    if setting["schedule"] == "text":
        work = load_work(setting["text"])
        problems = verify(work, _graph_of(work, setting))
        if problems:
            return _describe_unsound(schedule_of(work), _graph_of(work, setting), setting, problems)
    timeline = simulate_setting(setting)
    name, memory = setting["schedule"], setting["memory"]
    excess = _find_excess(timeline.program.schedule, timeline.cost, memory)
    return {"problems": excess, "waits": [], **_describe_timeline(name, timeline, memory)}


def _handle_edit(request: Mapping[str, Any]) -> dict[str, Any]:
    """Move an action to another place of its lane, verify the schedule, and simulate it.

    This runs while the action is dragged, so it leaves out what takes longest: the messages are not
    actions here. The answer to `timeline` has everything.
    """
    setting = read_setting(request)
    work = _work_of_setting(setting)
    schedule, graph = _move_action(schedule_of(work), request.get("move")), _graph_of(work, setting)
    skips = {"skips": _skips_of(graph, schedule.stages)}
    problems = verify(schedule, graph)
    if problems:
        return {**_describe_unsound(schedule, graph, setting, problems), **skips}
    cost = schedule_request(setting).build_cost(schedule.placement)
    spans = list(play(schedule, graph, cost))
    excess = _find_excess(schedule, cost, setting["memory"])
    return {"problems": excess, "waits": [], **_describe_spans(schedule, spans), **skips}


def _find_excess(schedule: Schedule, cost: Cost, memory: float | None) -> list[str]:
    return [] if memory is None else list(find_memory_excess(schedule, memory, cost))


def _graph_of(work: Schedule | Program, setting: Mapping[str, Any]) -> StageGraph:
    """Return the stage graph: a program has its own, a schedule that of the setting."""
    if isinstance(work, Program):
        if setting["skips"]:
            raise ArgumentError("a program lists its own edges. Write the skip there.")
        return work.graph
    return schedule_request(setting).build_graph(work.stages)


def _skips_of(graph: StageGraph, stages: int) -> list[tuple[int, int]]:
    """Return the edges that a chain does not have, with which an edited program is a schedule."""
    chain = set(StageGraph.chain(stages).edges)
    if not chain <= set(graph.edges):
        raise ArgumentError(
            "the stages of this program do not form a chain with skips, so it cannot be edited here"
        )
    return sorted(set(graph.edges) - chain)


def _work_of_setting(setting: Mapping[str, Any]) -> Schedule | Program:
    if setting["schedule"] == "text":
        return load_work(setting["text"])
    return simulate_setting(setting).program.schedule


def _move_action(schedule: Schedule, move: Any) -> Schedule:
    """Return the schedule with one action at another place. It no longer overlaps with others."""
    if not isinstance(move, dict):
        raise ArgumentError("a move has a rank, a source and a target")
    rank, source, target = (
        read_whole(name, move.get(name)) for name in ("rank", "source", "target")
    )
    lanes = list(schedule.lanes)
    if not 0 <= rank < len(lanes) or not {source, target} <= set(range(len(lanes[rank]))):
        raise ArgumentError(f"there is no place {source} or {target} in the lane of rank {rank}")
    lane = list(lanes[rank])
    action = lane.pop(source)
    lane.insert(target, action)
    lanes[rank] = tuple(lane)
    neighbours = set(pairwise(lane))
    overlaps = frozenset(
        pair
        for pair in schedule.overlaps
        if schedule.placement[pair[0].stage] != rank or pair in neighbours
    )
    return replace(schedule, lanes=tuple(lanes), overlaps=overlaps)


def _describe_unsound(
    schedule: Schedule, graph: StageGraph, setting: Mapping[str, Any], problems: Sequence[str]
) -> dict[str, Any]:
    """Return what can be drawn of a schedule that must not run: all that runs before it stops."""
    spans: list[Span] = []
    waits: list[dict[str, Any]] = []
    try:
        cost = schedule_request(setting).build_cost(schedule.placement)
        for span in play(schedule, graph, cost):
            spans.append(span)
    except Deadlock as deadlock:
        waits = [
            {
                "rank": wait.rank,
                "position": wait.step,
                "needs": list(wait.places[0]) if wait.places else None,
                "text": str(wait),
            }
            for wait in deadlock.waits
        ]
    except PenstockError:  # a stage that does not exist: the problems say so
        pass
    return {"problems": problems[:50], "waits": waits, **_describe_spans(schedule, spans)}


def _describe_spans(schedule: Schedule, spans: list[Span]) -> dict[str, Any]:
    """Return the lanes of a schedule; an action that never runs has no time."""
    times: list[list[tuple[float, float] | None]] = [[None] * len(lane) for lane in schedule.lanes]
    for span in spans:
        times[span.rank][span.step] = span.start, span.end
    lanes = [
        _lane(lane, lane_times) for lane, lane_times in zip(schedule.lanes, times, strict=True)
    ]
    return {
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "stages": schedule.stages,
        "placement": schedule.placement,
        "makespan": max((span.end for span in spans), default=0.0),
        "lanes": lanes,
        "text": dumps(schedule),
    }


def _lane(actions: Any, times: Any) -> dict[str, Any]:
    return {
        "ops": "".join(action.op.value for action in actions),
        "stages": [action.stage for action in actions],
        "microbatches": [action.microbatch for action in actions],
        "starts": [None if time is None else time[0] for time in times],
        "ends": [None if time is None else time[1] for time in times],
    }


def _describe_timeline(name: str, timeline: Timeline, memory: float | None) -> dict[str, Any]:
    """Return everything that the page draws of a timeline, with times counted from zero."""
    timeline = shift_to_zero(timeline)
    schedule, index = timeline.program.schedule, TimelineIndex(timeline)
    ran = [[span.action for span in lane] for lane in timeline.computes]
    times = [[(span.start, span.end) for span in lane] for lane in timeline.computes]
    idle = list(find_idle(index, memory))
    by_cause = dict.fromkeys(IDLE_CAUSES, 0.0)
    for gap in idle:
        by_cause[gap.cause] += gap.end - gap.start
    unit = choose_time_unit(timeline.makespan)
    return {
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "stages": schedule.stages,
        "placement": schedule.placement,
        "makespan": timeline.makespan,
        "unit": [unit.per_second, unit.name],
        "caption": format_caption(timeline),
        "facts": summarize(name, timeline),
        "bound": lower_bound(
            schedule.placement, schedule.chunks, timeline.cost, timeline.program.graph
        )
        if _trains(schedule)
        else None,
        "lanes": [_lane(*pair) for pair in zip(ran, times, strict=True)],
        "memory": [_curve(timeline, rank) for rank in range(timeline.ranks)],
        "critical": [list(place) for place in critical_path(index)],
        "idle": {
            "ranks": [gap.rank for gap in idle],
            "starts": [gap.start for gap in idle],
            "ends": [gap.end for gap in idle],
            "causes": [IDLE_CAUSES.index(gap.cause) for gap in idle],
            "blockers": [list(gap.blocker) if gap.blocker else None for gap in idle],
        },
        "idle_by_cause": by_cause,
        "overlaps": sorted(
            [*index.places[left], *index.places[right]]
            for left, right in schedule.overlaps
            if left in index.places and right in index.places
        ),
        "cost": {name: getattr(timeline.cost, name) for name in ("F", "I", "W", "send")},
        "text": dumps(schedule),
    }


def _trains(schedule: Schedule) -> bool:
    return any(not OP_RULES[a.op].is_forward for lane in schedule.lanes for a in lane)


def _curve(timeline: Timeline, rank: int) -> dict[str, list[float]]:
    points = dict(timeline.memory(rank))  # of several sizes at one time, the last one stays
    return {"times": list(points), "sizes": list(points.values())}


# ---- tables -------------------------------------------------------------------------------

# The rows of the table of all schedules: "fit, v" is `fit` with stages placed like a V.
COMPARED = [name for name, family in FAMILIES.items() if family.trains] + ["fit", "fit, v"]


def _handle_catalog(request: Mapping[str, Any]) -> dict[str, Any]:
    families = [
        {
            "name": name,
            "use": family.use,
            "source": family.source,
            "stages_per_rank": family.stages_per_rank,
            "free": family.free,
            "trains": family.trains,
        }
        for name, family in FAMILIES.items()
    ]
    ops = [{"op": op.value, "name": OP_RULES[op].name, "shades": SHADES[op]} for op in Op]
    return {
        "families": families,
        "compared": COMPARED,
        "ops": ops,
        "idle_causes": IDLE_CAUSES,
        "defaults": DEFAULTS,
    }


def _handle_compare(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the named schedules. One that does not exist in these sizes says why.

    `stages_per_rank` applies to those that allow any number.
    """
    setting = read_setting(request)
    rows: list[dict[str, Any]] = []
    for name in map(str, read_list("names", request.get("names"), 40)):
        placement = "v" if name == "fit, v" else "loop"
        kind = "fit" if name in ("fit", "fit, v") else name
        free = name == "fit" or (kind != "fit" and family_of(name).free)
        stages = setting["stages_per_rank"] if free else None
        try:
            timeline = simulate_setting(
                {**setting, "schedule": kind, "placement": placement, "stages_per_rank": stages}
            )
        except PenstockError as error:
            rows.append({"schedule": name, "error": str(error)})
            continue
        excess = _find_excess(timeline.program.schedule, timeline.cost, setting["memory"])
        rows.append({**summarize(name, timeline), "fits": not excess})
    return {"rows": rows}


# ---- one action ---------------------------------------------------------------------------


def _handle_action(request: Mapping[str, Any]) -> dict[str, Any]:
    index = index_setting(read_setting(request))
    timeline = index.timeline
    rank, position = (
        read_whole("rank", request.get("rank")),
        read_whole("position", request.get("position")),
    )
    if not (0 <= rank < timeline.ranks and 0 <= position < len(timeline.computes[rank])):
        raise ArgumentError(f"there is no action {position} on rank {rank}")
    place = Place(rank, position)
    span, unit = index.span(place), choose_time_unit(timeline.makespan)
    needs = [
        {"place": list(a.producer), "message": str(a.message), "time": a.time}
        for a in index.arrivals(place)
    ]
    gives = [{"place": list(to), "message": str(m)} for m, to in index.consumers(place)]
    return {
        "name": str(index.action(place)),
        "sentence": _sentence(index, place),
        "times": f"{unit.format(span.start)} to {unit.format(span.end)}",
        "needs": needs,
        "gives": gives,
        "earlier": [list(earlier) for earlier in index.earlier_on_cell(place)],
    }


_VERBS = {
    Op.F: "runs the forward of stage {s} on micro-batch {m}",
    Op.B: "runs the backward of stage {s} on micro-batch {m}",
    Op.I: "computes the input gradient of stage {s} for micro-batch {m}",
    Op.W: "computes the weight gradient of stage {s} for micro-batch {m}, which nobody waits for",
    Op.R: "recomputes stage {s} on micro-batch {m}, because its activations were not kept",
}


def _sentence(index: TimelineIndex, place: Place) -> str:
    """Return what an action does and where its input comes from."""
    action = index.action(place)
    _, stage, microbatch = action
    other = f"runs '{OP_RULES[action.op].name}' of stage {{s}} on micro-batch {{m}}"
    text = f"Rank {place.rank} {_VERBS.get(action.op, other).format(s=stage, m=microbatch)}"
    senders = sorted({a.producer.rank for a in index.arrivals(place)} - {place.rank})
    carries = OP_RULES[action.op].carries
    if senders and carries:
        ranks = " and ".join(f"rank {rank}" for rank in senders)
        text += f", with the {carries} from {ranks}"
    receivers = sorted({to.rank for _, to in index.consumers(place)} - {place.rank})
    if receivers:
        ranks = " and ".join(f"rank {rank}" for rank in receivers)
        text += f". The result goes to {ranks}"
    elif carries == "gradients" and not index.timeline.program.graph.before(stage):
        text += f". Micro-batch {microbatch} is through"
    return text + "."


MAX_LESSON = 2000  # actions


def _handle_lesson(request: Mapping[str, Any]) -> dict[str, Any]:
    index = index_setting(read_setting(request))
    places = sorted(index.places.values(), key=lambda p: (index.span(p).start, p.rank))
    if len(places) > MAX_LESSON:
        raise ArgumentError(
            f"this schedule has {len(places):,} actions, too many to step through. Use fewer ranks "
            "or micro-batches"
        )
    steps = [{"place": list(place), "sentence": _sentence(index, place)} for place in places]
    return {"steps": steps}


# ---- files --------------------------------------------------------------------------------


def _handle_open(request: Mapping[str, Any]) -> dict[str, Any]:
    """Say what a file is: a schedule as text, or a timeline, a plan or a profile that was saved."""
    text = request.get("text")
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise ArgumentError(f"a file may have at most {MAX_TEXT // 2**20} MB")
    if text.lstrip()[:1] == "{":
        return _open_json(text)
    schedule = schedule_of(load_work(text))
    return {
        "file": "schedule",
        "ranks": schedule.ranks,
        "chunks": schedule.chunks,
        "text": text if isinstance(load_work(text), Program) else dumps(schedule),
    }


def _open_json(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise FormatError("this is not a file of Penstock:", ["it is not JSON"]) from None
    form = data.get("format")
    if form == "penstock plan":
        return _open_plan(Plan.from_json(data))
    if form == "penstock profile":
        return _open_profile(Profile.from_json(data))
    timeline = Timeline.from_json(text)
    return {
        "file": "timeline",
        "ranks": timeline.ranks,
        "chunks": timeline.program.schedule.chunks,
        "profile": _profile_of(timeline.cost),
    }


def _open_plan(plan: Plan) -> dict[str, Any]:
    """Return the forecast of a plan, its text with the certificate, and what its caps leave."""
    caps = [
        None if math.isinf(cap) else cap - resident
        for cap, resident in zip(plan.memory, plan.forecast.resident, strict=True)
    ]
    timeline = _describe_timeline(plan.schedule_name, plan.timeline, None)
    timeline["caption"] = format_caption(plan.timeline, format_bytes)
    return {
        "file": "plan",
        "title": plan.describe_choice(),
        "report": make_printable(str(plan)),
        "caps": caps,
        "peaks": [format_bytes(peak) for peak in plan.timeline.peak],
        "ranks": plan.ranks,
        "chunks": plan.chunks,
        "profile": _profile_of(plan.timeline.cost),
        "timeline": {"problems": [], "waits": [], **timeline},
    }


def _open_profile(profile: Profile) -> dict[str, Any]:
    """Return the seconds of the units on the first device, relative to their mean."""
    kind, rows = profile.devices[0].kind, profile.rows
    seconds = [
        sum(
            part.at(rows)
            for part in (unit.seconds[kind].F, unit.seconds[kind].I, unit.seconds[kind].W)
        )
        for unit in profile.units
    ]
    return {
        "file": "profile",
        "ranks": len(profile.devices),
        "profile": _relative_to_mean(seconds)[:MAX_PROFILE],
    }


def _profile_of(cost: Cost) -> list[float]:
    """Return the costs of the stages relative to their mean."""
    return _relative_to_mean([sum(p) for p in zip(cost.F, cost.I, cost.W, strict=True)])


def _relative_to_mean(seconds: Sequence[float]) -> list[float]:
    total = sum(seconds)
    return [second * len(seconds) / total if total else 1.0 for second in seconds]


def _handle_measured(request: Mapping[str, Any]) -> dict[str, Any]:
    """Put a measured step beside its plan: a saved forecast, or one with the measured costs."""
    texts = [request.get("run"), request.get("plan")]
    for text in texts:
        if text is not None and (not isinstance(text, str) or len(text) > MAX_TEXT):
            raise ArgumentError(f"a file may have at most {MAX_TEXT // 2**20} MB")
    run = Timeline.from_json(texts[0] or "")
    problems = verify(run.program)
    if problems:
        raise ArgumentError(f"the program of this timeline cannot run: {problems[0]}")
    plan = Timeline.from_json(texts[1]) if texts[1] else simulate(run.program, run.cost)
    comparison = compare_run(plan, run)
    return {
        "plan": {"problems": [], "waits": [], **_describe_timeline("plan", plan, None)},
        "run": {"problems": [], "waits": [], **_describe_timeline("run", run, None)},
        "ratios": comparison.ratios,
        "sentences": comparison.sentences,
    }


def _handle_export(request: Mapping[str, Any]) -> dict[str, Any]:
    setting, form = read_setting(request), request.get("format")
    if form == "text" and setting["schedule"] == "text":
        return {"content": setting["text"]}  # also a schedule that must not run yet
    timeline = shift_to_zero(simulate_setting(setting))
    if form == "text":
        return {"content": dumps(timeline.program.schedule)}
    if form == "perfetto":
        return {"content": json.dumps(trace(timeline), separators=(",", ":"))}
    if form == "timeline":
        return {"content": timeline.to_json()}
    if form == "svg":
        return {"content": timeline_svg(timeline, title=setting["schedule"])}
    raise ArgumentError("format must be text, svg, perfetto or timeline")


_HANDLERS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "catalog": _handle_catalog,
    "timeline": _handle_timeline,
    "edit": _handle_edit,
    "compare": _handle_compare,
    "action": _handle_action,
    "lesson": _handle_lesson,
    "open": _handle_open,
    "measured": _handle_measured,
    "export": _handle_export,
}
