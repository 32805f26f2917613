from __future__ import annotations

from pathlib import Path

from penstock import schedules
from penstock.draw import write_gallery

COMMITTED = Path(__file__).parents[2] / "docs" / "gallery"


def test_the_gallery_in_the_docs_is_up_to_date(tmp_path: Path) -> None:
    shown = [exhibit.name for exhibit in write_gallery(tmp_path)]
    assert shown == [*schedules.FAMILIES, "fit"]
    assert (tmp_path / "index.md").read_text() == (COMMITTED / "index.md").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in COMMITTED.iterdir()}
