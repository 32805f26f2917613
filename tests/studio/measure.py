"""Measure the studio in Chromium: first picture, dragging, scrolling, and its size.

    python -m tests.studio.measure

It needs what `make studio` and `make browser` install. Frames are counted in the browser's own
trace. Times on a busy machine vary; repeat and take the median.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.studio.build import BUILT
from tests.studio.test_page import drive, find_missing


def main() -> None:
    if missing := find_missing():
        sys.exit(missing)
    with TemporaryDirectory() as folder:
        print(json.dumps(drive(Path(folder), MEASURE="1"), indent=1))
    size = sum(file.stat().st_size for file in BUILT.rglob("*") if file.is_file())
    print(f"{size / 1e6:.1f} MB in all")


if __name__ == "__main__":
    main()
