"""Random requests of the page: schedules, costs, caps, skips, recomputation, edits and files.

    python -m tests.studio.random_requests --cases 500

The page computes in Pyodide. This script sends the same requests to Pyodide, in node, and to the
library in this interpreter. Every answer must be the same text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from penstock import dumps, lower, schedules, simulate
from penstock.planning import search_plan
from penstock.schedules.cost import Cost
from penstock.studio.build import BUILT, zip_modules
from penstock.studio.requests import answer
from tests.studio.files import slow_run, small_profile

NODE_SCRIPT = """
import fs from "node:fs";
const [folder, modules, requests] = process.argv.slice(2);
const { loadPyodide } = await import(`${folder}/pyodide.mjs`);
const python = await loadPyodide({ indexURL: `${folder}/` });
python.FS.writeFile("/penstock.zip", fs.readFileSync(modules));
python.runPython("import sys; sys.path.insert(0, '/penstock.zip')");
const answer = python.runPython("from penstock.studio.requests import answer; answer");
const lines = JSON.parse(fs.readFileSync(requests, "utf8")).map((request) => answer(request));
fs.writeFileSync(`${requests}.answers`, JSON.stringify(lines));
"""


def random_setting(draw: Random) -> dict[str, Any]:
    """Return a setting, most often a valid one."""
    name = draw.choice([*schedules.FAMILIES, "fit", "text"])
    setting: dict[str, Any] = {
        "schedule": name,
        "ranks": draw.choice([1, 2, 3, 4, 5, 8]) if draw.random() < 0.97 else 0,
        "chunks": draw.choice([1, 2, 3, 4, 6, 8, 12]),
        "F": draw.choice([1, 1.0, 0.5, draw.random()]),
        "I": draw.choice([1, 1.0, draw.random()]),
        "W": draw.choice([1, 1.0, draw.random()]),
        "send": draw.choice([0, 0, 0.1, draw.random()]),
    }
    if name == "fit":
        setting["placement"] = draw.choice(["loop", "v"])
        setting["chunks"] = min(setting["chunks"], 4)
        setting["ranks"] = min(setting["ranks"], 4)
    if draw.random() < 0.1:
        setting["stages_per_rank"] = draw.choice([1, 2, 3])
    if draw.random() < 0.3:
        setting["memory"] = draw.choice([1, 1.5, 2, 4, 100] if draw.random() < 0.9 else [0, -1])
    if draw.random() < 0.3:
        setting["profile"] = [round(draw.uniform(0.2, 2), 3) for _ in range(draw.randint(1, 9))]
    if draw.random() < 0.3:
        setting["checkpoint"] = draw.choice(["always", "except_last", "never"])
    if draw.random() < 0.2:
        setting["skips"] = [
            sorted(draw.sample(range(max(2, setting["ranks"])), 2))
            for _ in range(draw.randint(1, 2))
        ]
    if name == "text":
        setting["text"] = random_text(draw)
    return setting


def random_text(draw: Random) -> str:
    """Return the text of a schedule or program, sometimes with actions out of place."""
    name = draw.choice([n for n, family in schedules.FAMILIES.items() if family.trains])
    schedule = schedules.make(name, draw.choice([2, 3, 4]), draw.choice([2, 4, 6]))
    work = lower(schedule) if draw.random() < 0.3 else schedule
    lines = dumps(work).splitlines()
    if draw.random() < 0.5:
        words = lines[-1].split()
        draw.shuffle(words)
        lines[-1] = " ".join(words)
    if draw.random() < 0.1:
        lines.append("nonsense <script>")
    return "\n".join(lines)


@cache
def saved_plans() -> list[str]:
    """Return plans and a profile, as they are saved."""
    profile = small_profile()
    plans = [search_plan(profile.with_devices(n), solver_seconds=0) for n in (1, 2)]
    return [json.dumps(profile.to_json()), *(json.dumps(plan.to_json()) for plan in plans)]


def random_request(draw: Random) -> str:
    """Return a request as text."""
    kinds = ["timeline"] * 4 + ["edit", "compare", "action", "lesson", "export", "open", "measured"]
    kind = draw.choice(kinds)
    request: dict[str, Any] = {"kind": kind}
    if kind == "measured":
        plan = simulate(
            lower(schedules.make(draw.choice(["1f1b", "gpipe", "naive"]), 3, 4)),
            Cost.even((0, 1, 2), F=draw.random() / 100, send=draw.random() / 1000),
        )
        request["run"] = slow_run(plan, draw.randrange(99)).to_json()
        if draw.random() < 0.5:
            request["plan"] = plan.to_json()
        return json.dumps(request)
    if kind == "open":
        request["text"] = random_text(draw) if draw.random() < 0.7 else draw.choice(saved_plans())
        return json.dumps(request)
    request["setting"] = random_setting(draw)
    if kind == "edit":
        places = {name: draw.randrange(8) for name in ("source", "target")}
        request["move"] = {"rank": draw.randrange(3), **places}
    if kind == "compare":
        request["names"] = draw.sample([*schedules.FAMILIES], 2)
    if kind == "action":
        request.update(rank=draw.randrange(3), position=draw.randrange(9))
    if kind == "export":
        request["format"] = draw.choice(["text", "svg", "perfetto", "timeline", "gif"])
    return json.dumps(request)


_TIMELINE = {"format": "penstock timeline", "version": 1}
_NO_COST: dict[str, list[float]] = {"F": [], "I": [], "W": [], "activation": []}
_ZERO_COST = {"F": [0], "I": [0], "W": [0], "activation": [0]}
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**12, 1e308, float("nan"), float("inf"), "", "x" * 50, "<script>"),
    *([], [[]], {}, {"a": 1}, [None] * 5, [[0, 1, 2]], "0F0", "-\n-", "chunks: 0\n0F0"),
    *("edges: 0>1\n0F0 0B0\n1F0 1B0", "edges: 5>9\n0F0", "edges:\n0F0 0B0", "placement:\n-"),
    json.dumps({**_TIMELINE, "program": "edges:\n-", "cost": _NO_COST, "spans": []}),
    json.dumps({**_TIMELINE, "program": "edges:\n0F0 0B0", "cost": _ZERO_COST, "spans": []}),
    json.dumps(
        {
            **_TIMELINE,
            "program": "edges:\n0F0 0B0",
            "cost": _ZERO_COST,
            "spans": [[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]],
        }
    ),
)


def damaged_request(draw: Random) -> str:
    """Return a request with one or two of its values replaced by something else."""
    request = json.loads(random_request(draw))
    if request["kind"] in ("open", "measured") and draw.random() < 0.7:
        request.update({name: draw.choice(JUNK) for name in ("text", "run", "plan")})
    for _ in range(draw.choice([1, 2])):
        parent, key = draw.choice(list(_places(request)))
        parent[key] = json.loads(json.dumps(draw.choice(JUNK)))
    return json.dumps(request)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in nested lists and dicts, with each of its keys or indices."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def answers_of_the_page(requests: list[str], folder: Path) -> list[str]:
    """Return the answers that Pyodide gives, in node."""
    modules, file = folder / "penstock.zip", folder / "requests.json"
    modules.write_bytes(zip_modules())
    file.write_text(json.dumps(requests))
    script = folder / "answer.mjs"
    script.write_text(NODE_SCRIPT)
    subprocess.run(["node", script, BUILT / "pyodide", modules, file], check=True, timeout=1200)
    answers: list[str] = json.loads(Path(f"{file}.answers").read_text())
    return answers


def find_differences(requests: list[str]) -> list[str]:
    """Return a line for each request that the page and the library answer differently."""
    with TemporaryDirectory() as folder:
        theirs = answers_of_the_page(requests, Path(folder))
    pairs = zip(requests, theirs, map(answer, requests), strict=True)
    return [f"{request[:300]}\n  {a[:300]}\n  {b[:300]}" for request, a, b in pairs if a != b]


def find_missing() -> str | None:
    """Return what is missing to run Pyodide in node, or None."""
    if shutil.which("node") is None:
        return "node is not installed"
    return None if (BUILT / "pyodide").is_dir() else "the studio is not built: make studio"


def main() -> None:
    """Compare many answers, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if missing := find_missing():
        sys.exit(missing)
    begin = time.monotonic()
    requests = [random_request(Random(options.seed + i)) for i in range(options.cases)]
    differences = find_differences(requests)
    refused = sum(answer(request).startswith('{"ok": false') for request in requests)
    print("\n".join(differences))
    print(
        f"{len(requests)} requests, {refused} of them refused, {len(differences)} answered "
        f"differently, in {time.monotonic() - begin:.0f} s"
    )
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()
