"""Renew the pictures of docs/studio.md: `python -m tests.studio.screenshots`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from tests.studio.test_page import ROOT, drive, find_missing

SHOWN = ("light", "dark", "deadlock", "measured", "learn", "phone")


def main() -> None:
    if missing := find_missing():
        sys.exit(missing)
    target = ROOT / "docs" / "studio"
    target.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        problems = {name: text for name, text in drive(Path(folder)).items() if text}
        if problems:
            sys.exit(f"the page does not work: {problems}")
        for name in SHOWN:
            picture = Image.open(Path(folder) / "pictures" / f"{name}.png").convert("RGB")
            # A palette makes small files. This method keeps colours that few pixels have.
            palette = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE)
            palette.save(target / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
