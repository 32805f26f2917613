"""Files that are dropped onto the page: a schedule, a measured step with its plan, and bad ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

from penstock import Timeline, lower, schedules, simulate
from penstock.schedules.cost import Cost
from penstock.schedules.ir import Compute

SCRIPT = "<script>window.executed=1</script><img src=x onerror=window.executed=1>"


def slow_run(plan: Timeline, seed: int = 7) -> Timeline:
    """Return a timeline like a measured one: slower, uneven, and with gaps between actions."""
    draw = Random(seed)
    clock = [0.0] * plan.ranks
    spans = []
    for span in sorted(plan.spans, key=lambda span: span.start):
        length = span.end - span.start
        if isinstance(span.action, Compute):
            length *= draw.uniform(0.95, 1.15) * (1.5 if span.action.stage == 2 else 1)
        start = max(clock[span.rank], span.start * 1.25)
        spans.append(span._replace(start=start, end=start + length))
        clock[span.rank] = start + length
    return replace(plan, spans=tuple(spans))


def write_files(folder: Path) -> None:
    """Write all files that the tests drop onto the page."""
    plan = simulate(
        lower(schedules.one_f_one_b(ranks=4, chunks=8)),
        Cost.even((0, 1, 2, 3), F=0.004, I=0.004, W=0.004, send=0.0002),
    )
    plan.save(folder / "plan.json")
    slow_run(plan).save(folder / "run.json")
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
