"""Files that are dropped onto the page: a schedule, a measured step with its plan, and bad ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

from penstock import Timeline, lower, schedules, simulate
from penstock.draw import style
from penstock.planning import Profile, search_plan
from penstock.planning.profile import DeviceProfile, PerRows, UnitProfile, UnitSeconds
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute, Message, Op, Send, consumes
from penstock.schedules.timeline import cost_from_spans
from penstock.text_format import format_number

SCRIPT = "<script>window.executed=1</script><img src=x onerror=window.executed=1>"


def slow_run(plan: Timeline, seed: int = 7) -> Timeline:
    """Return a timeline like a measured one: uneven, slow on stage 2, and with late messages."""
    draw = Random(seed)
    clock = [0.0] * plan.ranks
    arrivals: dict[Message, float] = {}
    spans = []
    for span in plan.spans:  # in an order in which everything can run
        action, length, start = span.action, 0.0, clock[span.rank]
        if isinstance(action, Compute):
            needed = [arrivals.get(m, 0.0) for m in consumes(action, plan.program.graph)]
            start = max(start, *needed, 0.0)
            slower = 1.3 if action.stage == 2 else 1.0
            length = (span.end - span.start) * draw.uniform(0.97, 1.06) * slower
        clock[span.rank] = end = start + length
        if isinstance(action, Send):
            arrivals[action.message] = end + 2 * plan.cost.send
        spans.append(span._replace(start=start, end=end))
    return replace(plan, spans=tuple(spans), cost=cost_from_spans(plan.program, spans))


def small_profile() -> Profile:
    """Return a profile of six units on two devices."""
    seconds = [PerRows(0.001, 0.0005 * (1 + unit)) for unit in range(6)]
    units = [
        UnitProfile(f"layer {i}", {"cpu": UnitSeconds(s, s, s)}) for i, s in enumerate(seconds)
    ]
    return Profile("six layers", 8, tuple(units), devices=(DeviceProfile("cpu"),) * 2)


def write_files(folder: Path) -> None:
    """Write all files that the tests drop onto the page."""
    plan = simulate(
        lower(schedules.one_f_one_b(ranks=4, chunks=8)),
        Cost.even((0, 1, 2, 3), F=0.004, I=0.004, W=0.004, send=0.0002),
    )
    plan.save(folder / "plan.json")
    slow_run(plan).save(folder / "run.json")
    profile = small_profile()
    profile.save(folder / "profile.json")
    search_plan(profile, solver_seconds=0).save(folder / "made-by-the-planner.json")
    (folder / "repeated.json").write_text(json.dumps(_repeated_in_javascript()))
    (folder / "mine.txt").write_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n")
    file = json.loads(plan.to_json())
    (folder / "broken.json").write_text(json.dumps({**file, "spans": [[0, 0, 5, 1]]}))
    (folder / "cut.json").write_text(plan.to_json()[:500])
    (folder / "deep.json").write_text('{"format":' + "[" * 100_000)
    names = {**file, "program": SCRIPT, "format": file["format"]}
    (folder / "names.json").write_text(json.dumps({**names, "cost": {SCRIPT: 1}, "program": "0F0"}))
    (folder / "chunks.txt").write_text("chunks: 999999999\n0F0 0B0\n")
    (folder / "scripts.txt").write_text(f"{SCRIPT} 0F0\n")
    (folder / "noise.bin").write_bytes(Random(0).randbytes(200_000))
    with (folder / "large.bin").open("wb") as stream:
        stream.truncate(100 * 2**20)


def _repeated_in_javascript() -> dict[str, list[tuple[object, object]]]:
    """Return inputs and results of the functions that the page has written again."""
    draw = Random(3)
    numbers = [0.0, 1.0, 21.0, 0.5, 9999.4, 9999.6, 1e4, 2.5e9, 1e-3]
    numbers += [draw.uniform(1e-3, 1) * 10 ** draw.randint(0, 12) for _ in range(300)]
    colours = [colour for shades in style.SHADES.values() for colour in shades]
    families = [family.build for name, family in schedules.FAMILIES.items() if name != "naive"]
    shades: list[tuple[object, object]] = []
    for build in families:
        schedule = build(3, 6)
        seen = style.stage_colours(schedule)
        first = style.SHADES[Op.F]
        shades.append(
            (schedule.placement, [first.index(seen[Op.F, s]) for s in range(schedule.stages)])
        )
    return {
        "numbers": [(number, format_number(number)) for number in numbers],
        "colours": [(colour, style.contrasting_ink(colour)) for colour in colours],
        "shades": shades,
    }
