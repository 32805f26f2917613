"""Settings of the studio: what the page asks for, checked field by field, and its timeline.

A setting comes from a link, so anybody may have written it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from penstock.draw.style import shift_to_zero
from penstock.errors import ArgumentError
from penstock.schedules.explain import TimelineIndex
from penstock.schedules.ir import Program, Schedule, schedule_of
from penstock.schedules.lowering import CHECKPOINT_MODES, lower
from penstock.schedules.notation import loads
from penstock.schedules.request import MAX_CELLS, ScheduleRequest
from penstock.schedules.timeline import Timeline, simulate
from penstock.text_format import make_printable

DEFAULTS: dict[str, Any] = {
    "schedule": "1f1b",  # a name, "fit", or "text"
    "ranks": 4,
    "chunks": 8,
    "stages_per_rank": None,
    "placement": "loop",  # of fit: loop or v
    "F": 1.0,
    "I": 1.0,
    "W": 1.0,
    "send": 0.0,
    "profile": [],  # the cost over the depth of the model, relative to its mean
    "checkpoint": "never",
    "memory": None,
    "skips": [],
    "text": "",  # the schedule itself, where `schedule` is "text"
}
MAX_TEXT = 32 * 2**20  # characters of a file
MAX_PROFILE = 4096


def read_setting(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of a request with every field, all of the right types."""
    fields = request.get("setting", {})
    if not isinstance(fields, dict):
        raise ArgumentError("setting must be an object")
    unknown = [str(name) for name in fields if name not in DEFAULTS]
    if unknown:
        raise ArgumentError(f"a setting has no field '{make_printable(unknown[0], 40)}'")
    setting = {**DEFAULTS, **fields}
    for name in ("ranks", "chunks"):
        setting[name] = read_whole(name, setting[name])
    if setting["stages_per_rank"] is not None:
        setting["stages_per_rank"] = read_whole("stages_per_rank", setting["stages_per_rank"])
    for name in ("F", "I", "W", "send"):
        setting[name] = _number(name, setting[name], 1e9)
    if not any(setting[name] for name in "FIW"):
        raise ArgumentError("at least one of F, I and W must be more than 0")
    if setting["memory"] is not None:
        setting["memory"] = _number("memory", setting["memory"], 1e15)
        if not setting["memory"]:
            raise ArgumentError("memory must be more than 0. Leave it out for no cap.")
    setting["profile"] = _profile(setting["profile"])
    setting["skips"] = [_skip(pair) for pair in read_list("skips", setting["skips"], 100)]
    for name in ("schedule", "placement", "checkpoint", "text"):
        if not isinstance(setting[name], str) or len(setting[name]) > MAX_TEXT:
            raise ArgumentError(f"{name} must be a text")
    if setting["checkpoint"] not in CHECKPOINT_MODES:
        raise ArgumentError(f"checkpoint must be one of {', '.join(CHECKPOINT_MODES)}")
    return setting


def read_whole(name: str, value: Any) -> int:
    """Return a whole number, or raise an error that names the field."""
    if type(value) is not int or abs(value) > 10**9:
        raise ArgumentError(f"{name} must be a whole number, not {str(value)[:40]}")
    return value


def _number(name: str, value: Any, most: float) -> float:
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ArgumentError(f"{name} must be a number from 0 to {most:g}, not {str(value)[:40]}")
    return float(value)


def read_list(name: str, value: Any, most: int) -> list[Any]:
    """Return a list of at most so many entries, or raise an error that names the field."""
    if not isinstance(value, list) or len(value) > most:
        raise ArgumentError(f"{name} must be a list of at most {most} entries")
    return value


def _profile(value: Any) -> list[float]:
    profile = [
        _number("profile", factor, 1e6) for factor in read_list("profile", value, MAX_PROFILE)
    ]
    if profile and not any(profile):
        raise ArgumentError("at least one entry of profile must be more than 0")
    return profile


def _skip(pair: Any) -> tuple[int, int]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ArgumentError("a skip is a pair of stages, such as [0, 3]")
    return read_whole("a stage of a skip", pair[0]), read_whole("a stage of a skip", pair[1])


def schedule_request(setting: Mapping[str, Any]) -> ScheduleRequest:
    """Return the sizes, costs and limits of a setting."""
    return ScheduleRequest(
        setting["ranks"],
        setting["chunks"],
        setting["stages_per_rank"],
        {name: setting[name] for name in ("F", "I", "W", "send")},
        setting["checkpoint"],
        setting["memory"],
        tuple(setting["skips"]),
        tuple(setting["profile"]),
    )


def simulate_setting(setting: Mapping[str, Any]) -> Timeline:
    """Return the timeline of a setting. Several requests ask for the same one in a row."""
    return _simulate_cached(json.dumps(setting, sort_keys=True))


def index_setting(setting: Mapping[str, Any]) -> TimelineIndex:
    """Return the timeline of a setting, from time zero, with what each action needs and gives."""
    return _index_cached(json.dumps(setting, sort_keys=True))


@lru_cache(maxsize=2)
def _index_cached(key: str) -> TimelineIndex:
    return TimelineIndex(shift_to_zero(_simulate_cached(key)))


@lru_cache(maxsize=4)
def _simulate_cached(key: str) -> Timeline:
    setting = json.loads(key)
    setting["skips"] = [tuple(pair) for pair in setting["skips"]]
    request, name = schedule_request(setting), setting["schedule"]
    if name == "text":
        work = load_work(setting["text"])
        if isinstance(work, Schedule):
            work = lower(work, request.build_graph(work.stages))
        return simulate(work, request.build_cost(work.schedule.placement))
    if name == "fit":
        return request.simulate_fit(setting["placement"])
    return request.simulate_named(name)


def load_work(text: str) -> Schedule | Program:
    """Return the schedule or program in a text, unless it is too large to draw."""
    work = loads(text)
    schedule = schedule_of(work)
    cells = schedule.stages * schedule.chunks
    if max(cells, sum(map(len, work.lanes))) > 8 * MAX_CELLS or schedule.ranks > MAX_CELLS:
        raise ArgumentError(
            f"this schedule has {schedule.ranks:,} ranks, {schedule.stages:,} stages and "
            f"{schedule.chunks:,} micro-batches, too many to draw. Use fewer: the pattern repeats"
        )
    return work
