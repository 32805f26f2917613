"""The page of the studio in a real browser, which `make browser` and `make studio` install."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from penstock import loads, verify
from penstock.schedules.timeline import Timeline
from penstock.studio.build import BUILT, build
from penstock.studio.server import StudioServer
from tests.studio.files import write_files

ROOT = Path(__file__).parents[2]
PLAYWRIGHT = ROOT / "build" / "browser" / "node_modules" / "playwright-core"
CHECKS = (
    "load",
    "every preset",
    "edit to a deadlock and back",
    "drop a trace",
    "drop a plan and a profile",
    "what JavaScript repeats agrees with the library",
    "drop with the mouse",
    "share by URL",
    "export",
    "keyboard alone",
    "learn",
    "bad files",
    "dark theme",
    "phone width",
    "embedded in another page",
    "no request leaves localhost",
    "no error in the console",
)


def find_missing() -> str | None:
    """Return what is missing to run the page in a browser, or None."""
    if not (BUILT / "pyodide").is_dir():
        return "the studio is not built: make studio"
    if shutil.which("node") is None or shutil.which("chromium") is None or not PLAYWRIGHT.is_dir():
        return "there is no browser to drive: make browser"
    return None


def drive(folder: Path, **environment: str) -> dict[str, str | None]:
    """Serve the studio of this tree, drive it in Chromium, and return the results."""
    built, files, pictures = (folder / name for name in ("built", "files", "pictures"))
    files.mkdir()
    pictures.mkdir()
    build(built, pyodide=BUILT / "pyodide")
    write_files(files)
    with StudioServer(folder=built) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        chromium = shutil.which("chromium")
        assert chromium is not None
        script = Path(__file__).parent / "browser.mjs"
        done = subprocess.run(
            ["node", script, PLAYWRIGHT, chromium, server.url, files, pictures],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
            timeout=480,
            check=False,
        )
        server.shutdown()
        thread.join()
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, str | None] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_page_in_a_browser(tmp_path: Path) -> None:
    """One test for all checks, because starting the browser and Python in it takes longest."""
    if missing := find_missing():
        pytest.skip(missing)
    results = drive(tmp_path)
    assert {check: problem for check, problem in results.items() if problem is not None} == {}
    assert tuple(results) == CHECKS
    pictures = tmp_path / "pictures"
    schedule = loads((pictures / "exported.txt").read_text())
    assert verify(schedule) == ()
    timeline = Timeline.load(pictures / "exported.timeline.json")
    assert timeline.program.schedule == schedule
    trace = json.loads((pictures / "exported.perfetto.json").read_text())
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) == 64
